"""Comments in a stream that say why a request has no token yet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import msgspec

from vlmserve.errors import VLMServeError
from vlmserve.frontend.client import EngineClient
from vlmserve.server.generation import Generation
from vlmserve.types import EngineSnapshot

HEADER = "x-stream-progress"
"""Request header that turns these comments on."""
INTERVAL = 0.5
"""Seconds between comments."""
_PATIENCE = 1.0
"""Maximum seconds to wait for the engine before an empty comment. It also delays the detection of disconnects."""


def progress_comments(client: EngineClient, generation: Generation) -> Callable[[], Awaitable[bytes | None]]:
    """Return a function that makes the next comment, the JSON of `describe`."""

    async def comment() -> bytes | None:
        if any(answer.num_tokens for answer in generation.answers):
            return None
        try:
            async with asyncio.timeout(_PATIENCE):
                snapshot = await client.calls.inspect()
        except (VLMServeError, TimeoutError):
            return None
        found = describe(snapshot, generation.first_request_ids)
        return None if found is None else b": " + msgspec.json.encode(found) + b"\n\n"

    return comment


def describe(snapshot: EngineSnapshot, request_ids: Collection[str]) -> dict[str, Any] | None:
    """Say why a generation has no token yet; None if its requests have ended.

    - ``{"state": "waiting", "place": 1}``: the place in the queue
    - ``{"state": "images", "images": 2}``: images in the vision tower
    - ``{"state": "prompt", "tokens": 512, "total": 2048}``: computed tokens of the prompt
    - ``{"state": "answer"}``: the first token comes next
    """
    own = [one for one in snapshot.requests if one.request_id in request_ids]
    if not own:
        return None
    running = [one for one in own if one.state == "running"]
    if not running:
        queue = [one.request_id for one in snapshot.requests if one.state != "running"]
        return {"state": "waiting", "place": 1 + min(queue.index(one.request_id) for one in own)}
    first = running[0]
    if first.images_in_progress:
        return {"state": "images", "images": first.images_in_progress}
    if first.num_computed_tokens < first.num_prompt_tokens - 1:
        return {"state": "prompt", "tokens": first.num_computed_tokens, "total": first.num_prompt_tokens}
    return {"state": "answer"}
