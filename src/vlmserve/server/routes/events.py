from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import UNSET, UnsetType

from vlmserve.server.generation import Generation
from vlmserve.server.schema.sampling import StreamOptions
from vlmserve.server.schema.usage import Usage

DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's older APIs."""

_encoder = msgspec.json.Encoder()


def usage_until_now(options: StreamOptions | None, generation: Generation) -> Usage | UnsetType | None:
    """Return the usage for an event before the last one; null unless all events have it."""
    if options is None or not options.include_usage:
        return UNSET
    return generation.usage if options.continuous_usage_stats else None


def event(value: object) -> bytes:
    """Encode an event without a name. value: builtins or msgspec structs."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


def named_event(value: Mapping[str, object]) -> bytes:
    return f"event: {value['type']}\n".encode() + event(value)
