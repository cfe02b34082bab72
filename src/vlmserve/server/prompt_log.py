"""Logs the content of requests, if the server is started with ``--log-prompts``."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.requests import Request

from vlmserve.server.connection import request_id_of
from vlmserve.server.schema.asking import ModelRequest

logger = logging.getLogger("vlmserve.prompts")

_LONGEST = 2000
"""Characters of one piece of text."""


def log_prompt(request: Request, body: ModelRequest) -> None:
    """One line with what the request says, as JSON. Of images and long texts only the beginning."""
    # What is said before the conversation may be no content: a response shows its instructions again.
    said = body.model_dump(include={*body.content_fields, "instructions"}, exclude_none=True, mode="json")
    shown, request_id = _cut(said), request_id_of(request)
    fields = {"request_id": request_id, "prompt": shown}
    logger.info("%s says %s", request_id, msgspec.json.encode(shown).decode(), extra={"fields": fields})


def _cut(value: Any) -> Any:
    match value:
        case dict():
            # Where Anthropic's API has the base64 of an image.
            return {key: "..." if key == "data" else _cut(part) for key, part in value.items()}
        case list():
            return [_cut(part) for part in value]
        case str():
            most = 32 if value.startswith("data:") else _LONGEST
            return value if len(value) <= most else f"{value[:most]}... ({len(value)} characters)"
        case _:
            return value
