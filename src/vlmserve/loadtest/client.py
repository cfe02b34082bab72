"""HTTP/1.1 client that reads the clock before it parses. Redirects, proxies or compression would delay streams."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from vlmserve.errors import ConfigurationError, VLMServeError

clock = time.perf_counter

MAX_BODY = 64 * 1024**2
"""Maximum bytes of an answer that `fetch` collects."""

Sink = Callable[[int, bytes, float], None]
"""Called with each piece of a body: status, bytes, arrival time."""


class RequestFailedError(VLMServeError):
    """No complete answer. reason: the class of failures in reports."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


class _Connection(asyncio.Protocol):
    __slots__ = (
        "_framed", "_keep", "_now", "_parser", "_reply", "_sink", "_status", "is_fresh", "received", "transport",
    )  # fmt: skip

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.is_fresh = True
        self.received = False
        self._reply: asyncio.Future[int] | None = None
        self._keep = False

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    @property
    def is_reusable(self) -> bool:
        return self._keep and self.is_open

    def send(self, request: Iterable[bytes], sink: Sink) -> asyncio.Future[int]:
        """A future of the status, done after the whole body went to `sink`. Fails with RequestFailedError."""
        assert self.transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._sink = sink
        self._status, self._framed, self.received = 0, False, False
        self._reply = asyncio.get_running_loop().create_future()
        self.transport.writelines(request)
        return self._reply

    def abort(self) -> None:
        self._reply = None
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit from it

    def data_received(self, data: bytes) -> None:
        self._now = clock()
        self.received = True
        if self._reply is None:
            self.abort()  # unrequested data
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(RequestFailedError("not HTTP", f"the answer is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        # An answer without a length ends with its connection.
        if exc is None and self._status and not self._framed:
            self.on_message_complete()
        elif self._reply is not None:
            why = str(exc) if exc else "the server closed the connection before the answer had ended"
            self._fail(RequestFailedError("connection closed", why))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._reply is None:
            return
        try:
            self._sink(self._status, body, self._now)
        except RequestFailedError as error:
            self._fail(error)

    def on_message_complete(self) -> None:
        if self._reply is None or self._reply.done():
            return
        self._keep = self._framed and self._parser.should_keep_alive()
        self.is_fresh = False
        reply, self._reply = self._reply, None
        reply.set_result(self._status)

    def _fail(self, error: RequestFailedError) -> None:
        reply = self._reply
        self.abort()
        if reply is not None and not reply.done():
            reply.set_exception(error)


class Client:
    """Sends each request to one server over an idle connection or a new one."""

    def __init__(
        self, url: str, *, headers: Sequence[tuple[str, str]] = (), timeout: float = 600.0, insecure: bool = False
    ) -> None:
        """url: scheme, host, port and path prefix. timeout: seconds per request. Raises ConfigurationError."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ConfigurationError(f"{url!r} is not the URL of a server; write one like http://127.0.0.1:8000")
        self._host, self._port = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/")
        self._ssl = _tls(insecure) if parts.scheme == "https" else None
        self._timeout = timeout
        self._idle: list[_Connection] = []
        lines = [f"Host: {parts.netloc.rpartition('@')[2]}", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in headers]
        if any("\r" in line or "\n" in line for line in lines):
            raise ConfigurationError("a header has a line break in it")
        self._head = "".join(f"{line}\r\n" for line in lines).encode()

    def request(self, method: str, path: str, body: Sequence[bytes] = ()) -> list[bytes]:
        """Does not copy `body`."""
        length = sum(map(len, body))
        line = f"{method} {self._prefix}{path} HTTP/1.1\r\n".encode()
        return [b"%s%sContent-Length: %d\r\n\r\n" % (line, self._head, length), *body]

    async def send(self, request: Sequence[bytes], sink: Sink) -> int:
        """Return the status; pass the body to `sink`. Raises RequestFailedError."""
        try:
            async with asyncio.timeout(self._timeout):
                return await self._send(request, sink)
        except TimeoutError:
            raise RequestFailedError("timeout", f"no complete answer within {self._timeout:g} seconds") from None

    async def fetch(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Return status and body. Raises RequestFailedError."""
        parts: list[bytes] = []
        size = 0

        def collect(status: int, data: bytes, now: float) -> None:
            nonlocal size
            size += len(data)
            if size > MAX_BODY:
                raise RequestFailedError("answer too large", f"the answer is larger than {MAX_BODY} bytes")
            parts.append(data)

        status = await self.send(self.request(method, path, [body] if body else []), collect)
        return status, b"".join(parts)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()

    async def _send(self, request: Sequence[bytes], sink: Sink) -> int:
        while True:
            connection = self._kept() or await self._connect()
            was_kept = not connection.is_fresh
            try:
                status = await connection.send(request, sink)
            except RequestFailedError as error:
                # The server closed the idle connection before the request; retry.
                if was_kept and not connection.received and error.reason == "connection closed":
                    continue
                raise
            except BaseException:
                connection.abort()
                raise
            if connection.is_reusable:
                self._idle.append(connection)
            else:
                connection.abort()
            return status

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> _Connection:
        where = f"{self._host}:{self._port}"
        try:
            transport, connection = await asyncio.get_running_loop().create_connection(
                _Connection, self._host, self._port, ssl=self._ssl
            )
        except ConnectionRefusedError:
            raise RequestFailedError(
                "connection refused", f"{where} refused the connection; is the server running?"
            ) from None
        except socket.gaierror as error:
            raise RequestFailedError("unknown host", f"{self._host}: {error.strerror}") from None
        except ssl.SSLError as error:
            raise RequestFailedError("TLS failed", f"{where}: {error}") from None
        except OSError as error:
            raise RequestFailedError("no connection", f"{where}: {error}") from None
        with contextlib.suppress(OSError):
            _socket(transport).setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


def _socket(transport: asyncio.BaseTransport) -> Any:
    return transport.get_extra_info("socket")


def _tls(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
