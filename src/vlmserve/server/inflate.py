"""Compressed request bodies."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator
from http import HTTPStatus

from vlmserve.server.errors import RefusedError

_ACCEPTED = "gzip, deflate"
_GZIP = ("gzip", "x-gzip")
_INPUT_BYTES = 64 * 1024
"""Bytes per call of the decompressor, which copies unread input."""
_OUTPUT_BYTES = 256 * 1024
"""Bytes to inflate between other work of the event loop."""


def check_encoding(encoding: str) -> str:
    """Read ``Content-Encoding``: "gzip", "deflate", or "" for none. Raises RefusedError (415)."""
    coding = encoding.strip().lower()
    if coding in ("", "identity"):
        return ""
    if coding in _GZIP:
        return "gzip"
    if coding == "deflate":
        return coding
    raise RefusedError(
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        f"Content-Encoding {coding!r:.40} is not supported; use gzip or deflate, or send the body uncompressed",
        "unsupported_content_encoding",
        headers={"Accept-Encoding": _ACCEPTED},
    )


async def inflate(body: bytearray, coding: str) -> AsyncGenerator[bytes, None]:
    """Decompress a body in bounded pieces. Raises RefusedError (400) for a broken body."""
    decompressor = zlib.decompressobj(_window_bits(body, coding))
    try:
        for start in range(0, len(body), _INPUT_BYTES):
            data = bytes(body[start : start + _INPUT_BYTES])
            while data and not decompressor.eof:
                yield decompressor.decompress(data, _OUTPUT_BYTES)
                data = decompressor.unconsumed_tail
                await asyncio.sleep(0)
            if decompressor.eof and (data or decompressor.unused_data or start + _INPUT_BYTES < len(body)):
                raise _broken(coding, "it has bytes after its end")
        # if the input was cut off, the decompressor may still hold the last bytes
        while not decompressor.eof and (rest := decompressor.decompress(b"", _OUTPUT_BYTES)):
            yield rest
            await asyncio.sleep(0)
    except zlib.error:
        raise _broken(coding, "it is corrupt") from None
    if not decompressor.eof:
        raise _broken(coding, "it is truncated")


def _window_bits(body: bytearray, coding: str) -> int:
    """zlib's ``wbits``. Some clients send ``deflate`` without the zlib header that RFC 9110 requires."""
    if coding == "gzip":
        return zlib.MAX_WBITS | 16
    has_header = len(body) >= 2 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
    return zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS


def _broken(coding: str, why: str) -> RefusedError:
    message = f"The body is not valid {coding}: {why}"
    return RefusedError(HTTPStatus.BAD_REQUEST, message, "invalid_content_encoding")
