"""HTTP/1.1 client of a gateway, with kept-alive connections and streamed answers.

It buffers about `_MOST_BUFFERED` bytes for a slow client, then stops reading.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import cast
from urllib.parse import urlsplit

import httptools

from vlmserve.errors import VLMServeError

_MOST_BUFFERED = 256 * 1024
_MOST_IDLE = 256
_CONNECT_SECONDS = 2.0
_NOT_PASSED_ON = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server", b"x-request-id"})


class UpstreamError(VLMServeError):
    """A worker did not answer, or not completely."""


class Answer(asyncio.Protocol):
    """A connection and its current answer."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_fresh = True
        self._transport: asyncio.Transport | None = None
        self._news = asyncio.Event()
        self._parts: deque[bytes] = deque()
        self._buffered = 0
        self._failed: str | None = None
        self._done = True
        self._has_head = False

    @property
    def is_open(self) -> bool:
        """True if another request may be sent."""
        return self._done and self._failed is None and self._transport is not None and not self._transport.is_closing()

    @property
    def is_silent(self) -> bool:
        """True if nothing of the answer has arrived."""
        return not self._has_head and not self.status

    def send(self, parts: Iterable[bytes | bytearray]) -> None:
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.headers = 0, []
        self._parts.clear()
        self._done = self._has_head = False
        self._keep = False
        self._transport.writelines(parts)

    async def head(self) -> None:
        """Raises UpstreamError."""
        while not self._has_head:
            await self._wait()

    async def read(self) -> bytes:
        """Read at least one byte; b"" at the end. Raises UpstreamError."""
        while not self._parts:
            if self._done:
                return b""
            await self._wait()
        data = self._parts.popleft() if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        if self._buffered > _MOST_BUFFERED and self._transport is not None:
            self._transport.resume_reading()
        self._buffered = 0
        return data

    async def read_all(self) -> bytes:
        """Read up to the end. Raises UpstreamError."""
        body = bytearray()
        while data := await self.read():
            body += data
        return bytes(body)

    def passed_on(self) -> list[tuple[bytes, bytes]]:
        return [(name, value) for name, value in self.headers if name not in _NOT_PASSED_ON]

    def close(self) -> None:
        """Closing cancels the answer on the worker."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from it

    def data_received(self, data: bytes) -> None:
        if self._done:
            self.close()  # unrequested data
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(str(exc) if exc else "the connection was closed")

    def on_status(self, reason: bytes) -> None:
        self.status = self._parser.get_status_code()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            self._has_head = True
        else:
            self.headers = []
        self._news.set()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._buffered += len(body)
        if self._buffered > _MOST_BUFFERED and self._transport is not None:
            self._transport.pause_reading()
        self._news.set()

    def on_message_complete(self) -> None:
        if not self._has_head:
            return
        self._done = True
        self.is_fresh = False
        self._keep = self._parser.should_keep_alive()
        if not self._keep:
            self.close()
        self._news.set()

    def _fail(self, reason: str) -> None:
        self._failed = self._failed or reason
        self.close()
        self._news.set()

    async def _wait(self) -> None:
        if self._failed is not None:
            raise UpstreamError(self._failed)
        self._news.clear()
        await self._news.wait()


class Upstream:
    """Connections to one worker. headers: sent with every request."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._idle: list[Answer] = []
        lines = {"Host": parts.netloc, **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, target: str, headers: Iterable[tuple[str, str]] = (), body: bytes | bytearray = b""
    ) -> AsyncIterator[Answer]:
        """Yield the answer after its head. Leaving early cancels it. Raises UpstreamError."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        head = f"{method} {target} HTTP/1.1\r\n{self._head}{lines}Content-Length: {len(body)}\r\n\r\n"
        parts = [head.encode("latin-1"), body] if body else [head.encode("latin-1")]
        answer = await self._ask(parts)
        try:
            yield answer
        finally:
            if answer.is_open and len(self._idle) < _MOST_IDLE:
                self._idle.append(answer)
            else:
                answer.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _ask(self, parts: Iterable[bytes | bytearray]) -> Answer:
        while True:
            answer = self._kept() or await self._connect()
            was_kept = not answer.is_fresh
            answer.send(parts)
            try:
                await answer.head()
            except UpstreamError:
                # The worker closed the idle connection before it saw the request; retry.
                if was_kept and answer.is_silent:
                    continue
                raise
            except BaseException:
                answer.close()
                raise
            return answer

    def _kept(self) -> Answer | None:
        while self._idle:
            answer = self._idle.pop()
            if answer.is_open:
                return answer
        return None

    async def _connect(self) -> Answer:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                transport, answer = await loop.create_connection(Answer, self._host, self._port)
        except (OSError, TimeoutError) as error:
            raise UpstreamError(f"no connection: {error}") from None
        with contextlib.suppress(OSError):
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return answer
