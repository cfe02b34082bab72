"""Read request bodies within limits: for one body, and for all bodies in memory together."""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections.abc import AsyncGenerator, Iterator
from http import HTTPStatus

from starlette.requests import ClientDisconnect, Request

from vlmserve.server.errors import RefusedError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MIN_RATE = 500
"""Minimum average rate of a body in bytes per second, as in Apache's RequestReadTimeout."""
_DROP_TIMEOUT = 2.0
"""Seconds to continue reading a rejected body."""
BRISK_PATIENCE = 5.0
_BRISK_RATE = 10 * 1024**2
"""A body gives way when memory is short once it takes longer than these seconds plus its bytes at this rate."""
_ACCEPTED = "gzip, deflate"
_GZIP = ("gzip", "x-gzip")
_INPUT_BYTES = 64 * 1024
"""Bytes per call of the decompressor, which copies unread input."""
_OUTPUT_BYTES = 256 * 1024
"""Bytes to inflate between other work of the event loop."""


class BodyMemory:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.arriving: set[BodyShare] = set()
        """Shares of bodies whose next bytes are awaited."""

    @contextlib.contextmanager
    def share(self) -> Iterator[BodyShare]:
        share = BodyShare(self)
        try:
            yield share
        finally:
            share.give_back()

    def make_room(self, num_bytes: int) -> bool:
        """Reject slow bodies, the largest first. Returns whether `num_bytes` are free."""
        if self.used + num_bytes <= self.capacity:
            return True
        slow = sorted((share for share in self.arriving if share.is_slow), key=lambda share: share.taken)
        while slow and self.used + num_bytes > self.capacity:
            slow.pop().reject()
        return self.used + num_bytes <= self.capacity


class BodyShare:
    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self.taken = 0
        self._began = time.monotonic()
        self._waiting: asyncio.Timeout | None = None
        self.is_rejected = False
        """Another body got this one's memory."""

    @property
    def is_slow(self) -> bool:
        return time.monotonic() - self._began > BRISK_PATIENCE + self.taken / _BRISK_RATE

    @contextlib.asynccontextmanager
    async def arrives(self, seconds: float) -> AsyncGenerator[None, None]:
        """Wait for more of the body. Raises TimeoutError, also for a body that is rejected meanwhile."""
        async with asyncio.timeout(seconds) as self._waiting:
            self._memory.arriving.add(self)
            try:
                yield
            finally:
                self._memory.arriving.discard(self)
                self._waiting = None  # it holds the task, whose error may hold this share

    def reject(self) -> None:
        self.is_rejected = True
        self.give_back()
        self._memory.arriving.discard(self)
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time())

    def take(self, num_bytes: int) -> bool:
        """Take more bytes, and return whether they were free."""
        if not self._memory.make_room(num_bytes):
            return False
        self._memory.used += num_bytes
        self.taken += num_bytes
        return True

    def need(self, num_bytes: int) -> None:
        """Take more bytes. Raises RefusedError if they are not free."""
        if not self.take(num_bytes):
            raise _no_room()

    def give_back(self) -> None:
        self._memory.used -= self.taken
        self.taken = 0


async def read_json_body(request: Request, max_bytes: int, share: BodyShare, pause: float = 30.0) -> bytearray:
    """Raises RefusedError, like `read_body` and for another content type."""
    kind = content_type(request)
    if kind != "application/json" and not kind.endswith("+json"):
        raise wrong_content_type("application/json", kind)
    body = await read_body(request, max_bytes, share, pause)
    skip_byte_order_mark(body)
    return body


def skip_byte_order_mark(body: bytearray) -> None:
    """Some programs on Windows write a byte order mark before JSON."""
    if body.startswith(_BYTE_ORDER_MARK):
        del body[: len(_BYTE_ORDER_MARK)]


def content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def wrong_content_type(wanted: str, kind: str) -> RefusedError:
    message = f"The header Content-Type must be {wanted}, not {kind or 'absent'}"
    return RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, "unsupported_content_type")


async def read_body(request: Request, max_bytes: int, share: BodyShare, pause: float = 30.0) -> bytearray:
    """Read and decompress a body. Raises RefusedError for a body that is

    - over `max_bytes`, compressed or not
    - too large for the free memory, or slow while others need memory
    - silent for `pause` seconds, or slower than `MIN_RATE`
    - of unknown encoding
    """
    expects_continue = "expect" in request.headers
    declared = request.headers.get("content-length", "")
    spare = 2 * max_bytes
    refusal = _too_large(max_bytes) if declared.isdecimal() and int(declared) > max_bytes else None
    coding = ""
    try:
        coding = check_encoding(request.headers.get("content-encoding", ""))
    except RefusedError as error:
        refusal = error
    body = bytearray()
    more = True
    latest, received = time.monotonic() + pause, 0
    # Many clients send all of the body before they read an answer, so drop as much again.
    while more and spare >= 0 and not (refusal and expects_continue):
        try:
            async with share.arrives(min(pause, latest + received / MIN_RATE - time.monotonic())):
                message = await request.receive()
        except TimeoutError:
            if not share.is_rejected:
                raise RefusedError(HTTPStatus.REQUEST_TIMEOUT, "The body stopped arriving", "body_timeout") from None
        if share.is_rejected:
            raise _no_room()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk, more = message.get("body", b""), message.get("more_body", False)
        received += len(chunk)
        spare -= len(chunk)
        if refusal is None:
            if len(body) + len(chunk) > max_bytes:
                refusal = _too_large(max_bytes)
            elif not share.take(len(chunk)):
                refusal = _no_room()
        if refusal is None:
            body += chunk
        else:
            body.clear()
            share.give_back()
    if refusal is not None:
        raise refusal
    return await _inflated(body, coding, max_bytes, share) if coding else body


async def _inflated(body: bytearray, coding: str, max_bytes: int, share: BodyShare) -> bytearray:
    content = bytearray()
    async for piece in inflate(body, coding):
        if len(content) + len(piece) > max_bytes:
            raise _too_large(max_bytes)
        share.need(len(piece))
        content += piece
    return content


async def drop_body(request: Request, max_bytes: int) -> None:
    """Read a rejected body, within limits of time and size, so that its sender reads the response."""
    if "expect" in request.headers:
        return
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(_DROP_TIMEOUT):
            async for chunk in request.stream():
                max_bytes -= len(chunk)
                if max_bytes < 0:
                    return


def _too_large(max_bytes: int) -> RefusedError:
    message = f"The body is larger than the limit of {max_bytes} bytes"
    return RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, "body_too_large")


def _no_room() -> RefusedError:
    message = "Too many large requests are being read already; try again later"
    return RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, message, "overloaded")


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
