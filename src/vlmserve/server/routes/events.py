"""Server-sent events on the wire."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's older streams."""

_encoder = msgspec.json.Encoder()


def event(value: object) -> bytes:
    """An event of builtins or msgspec structs, without a name."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


def named_event(value: Mapping[str, object]) -> bytes:
    """An event that is named after its type."""
    return f"event: {value['type']}\n".encode() + event(value)
