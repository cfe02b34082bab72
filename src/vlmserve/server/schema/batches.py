"""The lines of a batch's input file, as OpenAI writes them: https://platform.openai.com/docs/guides/batch"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from vlmserve.errors import InvalidRequestError

MAX_CUSTOM_ID = 512
"""Characters of a line's id."""

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
"""What the lines of a batch may ask."""


class BatchLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request in a file. body: as it would be sent to `url`."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CUSTOM_ID)]
    method: Literal["POST"]
    url: Endpoint
    body: dict[str, Any]


_DECODER = msgspec.json.Decoder(BatchLine)


def read_line(data: bytes | bytearray | memoryview) -> BatchLine:
    """A line's request. Raises InvalidRequestError for anything else."""
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(
            f"{error}; a line is an object with custom_id, method (POST), url (like /v1/chat/completions) and body"
        ) from None
