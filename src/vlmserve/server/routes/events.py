"""Server-sent events on the wire."""

from __future__ import annotations

import msgspec

DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's older streams."""

_encoder = msgspec.json.Encoder()


def event(value: object) -> bytes:
    """An event of builtins or msgspec structs, without a name."""
    return b"data: " + _encoder.encode(value) + b"\n\n"
