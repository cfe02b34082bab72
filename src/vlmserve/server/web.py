"""uvicorn with its own start and stop, and with the limits that it lacks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import resource
import socket
import weakref
from collections.abc import Generator
from http import HTTPStatus
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from vlmserve.server.entrance import HAS_LEFT, Entrance
from vlmserve.server.errors import RefusedError, error_response, framing_too_large, head_too_large
from vlmserve.settings.config import ServerConfig

logger = logging.getLogger(__name__)

_KEEP_ALIVE = 75
"""Seconds that an idle connection stays open; longer than in common load balancers."""
_LAST_BYTES = 3
"""Seconds for slow clients to read the ends of answers."""

_LOOK = 0.1
"""Seconds between checks for open connections."""

_ACCEPTED = 32
"""Connections to accept in an iteration of the event loop. uvloop accepts one per listening file descriptor."""

_STARTED = 16
"""Requests with bodies to start in an iteration of the event loop."""

_FIRST_PROBE, _NEXT_PROBE = 0.1, 5.0
"""Seconds between checks whether a client that has ended its side still reads."""
_OLD_GRACE = 1.0
"""Seconds for an HTTP/1.0 client, which cannot be checked."""
_CONNECTION_FILES = 2
"""Open files of a connection: a gateway also connects to a worker."""
_OWN_FILES = _ACCEPTED + 48
"""Open files without connections: listening sockets, log, engine sockets, storage."""
_CHUNK_FRAMING = 20
"""Uncounted bytes of a chunk's framing: a size of up to 16 digits and two line ends."""


class WebServer:
    def __init__(self, app: ASGIApp, limits: ServerConfig, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        self.url = f"http://{shown}:{port}"
        self._listeners = [listener]
        self._task: asyncio.Task[None] | None = None
        config = uvicorn.Config(
            app,
            # uvicorn accepts any callable that returns a protocol
            http=functools.partial(  # type: ignore[arg-type]
                _Protocol,
                head_timeout=limits.head_timeout,
                send_timeout=limits.send_timeout,
                max_head=limits.max_header_bytes,
                waiting=Waiting(limits.max_connections),
                entrance=Entrance(_STARTED),
            ),
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=_LAST_BYTES,
        )
        self._server = _Uvicorn(config)

    def start(self) -> None:
        """Accept connections; then the URL may be announced."""
        # Duplicates inherit this timeout. A blocking socket would block another process that shares it.
        self._listeners[0].setblocking(False)
        self._listeners[0].listen(self._server.config.backlog)
        self._listeners += [self._listeners[0].dup() for _ in range(_ACCEPTED - 1)]
        self._task = asyncio.ensure_future(self._server.serve(self._listeners))

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    async def leave(self, grace: float) -> None:
        """Accept no more connections, and wait at most `grace` seconds until clients close theirs."""
        for server in self._server.servers:
            server.close()
        for listener in self._listeners:
            listener.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while self.num_connections:
                    await asyncio.sleep(_LOOK)

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task


class Waiting:
    """Connections that wait for a request or its rest, longest first, make room for new ones.

    Idle connections go first; others may have started to send.
    """

    def __init__(self, max_connections: int) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        possible = max(1, (files - _OWN_FILES) // _CONNECTION_FILES)
        most = max_connections if files == resource.RLIM_INFINITY else possible
        self.max_connections = min(max_connections, most)
        if most < max_connections:
            text = "--max-connections %d: %d are possible, because the process may open %d files (ulimit -n)"
            logger.warning(text, max_connections, most, files)
        self._idle: dict[_Protocol, None] = {}
        self._begun: dict[_Protocol, None] = {}

    def add(self, connection: _Protocol, *, idle: bool = False) -> None:
        self.discard(connection)
        (self._idle if idle else self._begun)[connection] = None

    def begin(self, connection: _Protocol) -> None:
        if connection in self._idle:
            self.add(connection)

    def discard(self, connection: _Protocol) -> None:
        self._idle.pop(connection, None)
        self._begun.pop(connection, None)

    def drop_one(self) -> bool:
        """Close the connection that has waited longest. Returns whether there was one."""
        connection = next(itertools.chain(self._idle, self._begun), None)
        if connection is None:
            return False
        self.discard(connection)
        connection.transport.abort()  # its peer may not read what is left
        return True


class _Protocol(HttpToolsProtocol):
    """Limits heads, trailers, chunk extensions, and pauses of a client that reads an answer."""

    def __init__(
        self,
        *arguments: Any,
        head_timeout: float,
        send_timeout: float,
        max_head: int,
        waiting: Waiting,
        entrance: Entrance,
        **more: Any,
    ) -> None:
        super().__init__(*arguments, **more)
        self._waiting = waiting
        self._entrance = entrance
        self._send_timeout = send_timeout
        self._unread: asyncio.TimerHandle | None = None
        self._head_timeout = head_timeout
        self._max_head = max_head
        self._in_body = False
        self._head_bytes = 0
        """Bytes of the incomplete head."""
        self._framing_bytes = 0
        """Bytes of the body's trailers and chunk extensions, without the usual framing of chunks."""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._waiting.max_connections and not self._waiting.drop_one():
            message = "Too many connections are in use; try again later"
            self._reject(RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, message, "overloaded"))
        self._waiting.add(self)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.discard(self)
        self._expect_nothing()
        self.resume_writing()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # false if the next pipelined request has begun
            self._waiting.add(self, idle=not (self._in_body or self._head_bytes))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _expect_reading(self, before: int | None = None) -> None:
        """Close the connection if its client has read none of `before` unread bytes."""
        unread = self.transport.get_write_buffer_size()
        if before is None or unread < before:
            self._unread = self.loop.call_later(self._send_timeout, self._expect_reading, unread)
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._waiting.begin(self)
        if self._in_body:
            self._framing_bytes += len(data)
        else:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._framing_bytes > self._max_head:
            self._reject(framing_too_large(self._max_head))
        if self._in_body and self.cycle is not None and self.cycle.response_complete:
            self._expect_head()  # the client still sends a body after its answer
            return
        if self._in_body or not self._head_bytes:
            self._expect_nothing()
            return
        self._expect_head()
        if self._head_bytes > self._max_head:
            self._reject(head_too_large(self._max_head))

    def on_header(self, name: bytes, value: bytes) -> None:
        # the headers of a running request must not change
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_body = True
        self._head_bytes = 0
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """POST requests start a few at a time, so that health probes need not wait."""
        begin = super()._start_asgi_task
        if cycle.scope["method"] != "POST":
            begin(cycle, app)
            return

        scope, current = cast(Scope, cycle.scope), weakref.ref(cycle)  # a reference would form a cycle with the scope
        scope[HAS_LEFT] = lambda: (one := current()) is None or one.disconnected

        def begin_unless_left() -> bool:
            if not cycle.disconnected:
                begin(cycle, app)
            return not cycle.disconnected

        self._entrance.admit(self.client[0] if self.client else "", begin_unless_left)

    def on_chunk_header(self) -> None:
        self._framing_bytes = max(0, self._framing_bytes - _CHUNK_FRAMING)

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = max(0, self._framing_bytes - len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._waiting.discard(self)
        self._in_body = False
        self._framing_bytes = 0
        super().on_message_complete()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return True to keep the connection, because the client may still read.

        A client that has left looks the same until a write to it fails; see `_probe`.
        """
        cycle: RequestResponseCycle | None = self.cycle
        # a started answer may be silent for long
        if self._in_body or cycle is None or cycle.response_started:
            return False
        cycle.keep_alive = False
        if cycle.scope["http_version"] == "1.1":
            self._probe(cycle, _FIRST_PROBE)
        else:  # HTTP/1.0 has no interim responses
            self.loop.call_later(_OLD_GRACE, self._close_unanswered, cycle)
        return True

    def _probe(self, cycle: RequestResponseCycle, pause: float) -> None:
        """Write interim responses until the answer starts. The second one fails if the client has left."""
        if not cycle.response_started and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
            self.loop.call_later(pause, self._probe, cycle, _NEXT_PROBE)

    def _close_unanswered(self, cycle: RequestResponseCycle) -> None:
        if not cycle.response_started:
            self.transport.close()

    def _expect_head(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self._head_timeout, self._too_late)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        if self._head_bytes:
            message = f"The request did not arrive within {self._head_timeout:g} s"
            self._reject(RefusedError(HTTPStatus.REQUEST_TIMEOUT, message, "head_timeout"))
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._reject(RefusedError(HTTPStatus.BAD_REQUEST, "This is not a valid HTTP request", "invalid_http"))

    def _reject(self, error: RefusedError) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and self._in_body:
            may_answer = not cycle.response_started
            cycle.disconnected = True  # this was its answer
            cycle.message_event.set()
        else:
            may_answer = cycle is None or cycle.response_complete or not cycle.response_started
        if may_answer and not self.transport.is_closing():
            response = error_response(error)
            head = [
                f"HTTP/1.1 {error.status.value} {error.status.phrase}".encode(),
                *(name + b": " + value for name, value in response.raw_headers),
                b"connection: close",
            ]
            self.transport.write(b"\r\n".join(head) + b"\r\n\r\n" + response.body)
        self.transport.close()


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """The caller lets answers finish before the web server stops."""
        yield
