"""Log the content of requests, with ``--log-prompts``."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.requests import Request

from vlmserve.server.connection import request_id_of
from vlmserve.server.schema.asking import ModelRequest

logger = logging.getLogger("vlmserve.prompts")

_LONGEST = 2000
"""Maximum logged characters of a text."""


def log_prompt(request: Request, body: ModelRequest) -> None:
    """Log a request's content, with images and long texts cut."""
    # `instructions` is no content field, because responses repeat it
    said = body.model_dump(include={*body.content_fields, "instructions"}, exclude_none=True, mode="json")
    shown, request_id = _cut(said), request_id_of(request)
    fields = {"request_id": request_id, "prompt": shown}
    logger.info("%s says %s", request_id, msgspec.json.encode(shown).decode(), extra={"fields": fields})


def _cut(value: Any) -> Any:
    match value:
        case dict():
            # Anthropic's API has base64 images in `data`
            return {key: "..." if key == "data" else _cut(part) for key, part in value.items()}
        case list():
            return [_cut(part) for part in value]
        case str():
            most = 32 if value.startswith("data:") else _LONGEST
            return value if len(value) <= most else f"{value[:most]}... ({len(value)} characters)"
        case _:
            return value
