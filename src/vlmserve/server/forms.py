"""Forms with a file, parsed in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from vlmserve.errors import InvalidRequestError
from vlmserve.server.body import BodyShare, content_type, read_body, wrong_content_type

_FORM_BYTES = 64 * 1024
"""Maximum bytes of a form without its file."""
_CHUNK_BYTES = 256 * 1024
_CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "ascii"})
_COPIES = 3
"""Copies of a file in memory while its form is parsed."""


class Form(NamedTuple):
    data: bytes
    filename: str
    fields: dict[str, Any]


class _InMemory(MultiPartParser):
    """Parses in memory: the body is there already, and bounded."""

    def __init__(self, request: Request, body: bytearray) -> None:
        self.spool_max_size = len(body) + 1
        super().__init__(request.headers, _chunks(body), max_files=1, max_fields=8, max_part_size=_FORM_BYTES)


async def _chunks(body: bytearray) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(body), _CHUNK_BYTES):
        yield bytes(body[start : start + _CHUNK_BYTES])
        await asyncio.sleep(0)  # let others run


def max_form_file(limit: int, body_memory: int) -> int:
    return min(limit, body_memory // _COPIES - _FORM_BYTES)


async def read_form(request: Request, max_bytes: int, share: BodyShare, pause: float) -> Form:
    """pause: as for `read_body`. Raises InvalidRequestError, and as `read_body` does."""
    kind = content_type(request)
    if kind != "multipart/form-data":
        raise wrong_content_type("multipart/form-data", kind)
    _check_charset(request)
    body = await read_body(request, max_bytes + _FORM_BYTES, share, pause)
    share.need((_COPIES - 1) * len(body))
    try:
        form = await _InMemory(request, body).parse()
    except MultiPartException as error:
        raise InvalidRequestError(f"The form cannot be read: {error.message}") from None
    body.clear()
    fields = {name: value for name, value in form.multi_items() if name != "file"}
    if any(isinstance(value, UploadFile) for value in fields.values()):
        raise InvalidRequestError("The file must be in the field file", param="file")
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise InvalidRequestError("file is missing or has no filename", param="file")
    data = await file.read()
    await form.close()
    if len(data) > max_bytes:
        raise InvalidRequestError(f"The file has {len(data):,} bytes; at most {max_bytes:,} are allowed", param="file")
    return Form(data, file.filename or "", fields)


def _check_charset(request: Request) -> None:
    """Raise InvalidRequestError unless names are UTF-8: some of Python's codecs are no encodings."""
    _, parameters = parse_options_header(request.headers.get("content-type", ""))
    charset = parameters.get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() not in _CHARSETS:
        raise InvalidRequestError(f"The form's charset must be utf-8, not {charset!r:.100}")
