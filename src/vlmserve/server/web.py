"""uvicorn, started and stopped by us instead of by signals, and bounded where it is not."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Generator
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from vlmserve.server.app import create_app
from vlmserve.server.errors import RefusedError, error_response, head_too_large
from vlmserve.server.service import Service

_KEEP_ALIVE = 75
"""Seconds that an idle connection stays open; longer than what usual load balancers keep theirs."""
_LAST_BYTES = 3
"""Seconds for the ends of answers to reach slow clients."""


class WebServer:
    """Serves `service` over HTTP on a bound socket."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        self.url = f"http://{shown}:{port}"
        self._listener = listener
        self._task: asyncio.Task[None] | None = None
        config = uvicorn.Config(
            create_app(service),
            # uvicorn takes any callable that makes a protocol.
            http=functools.partial(_Protocol, head_timeout=service.config.head_timeout),  # type: ignore[arg-type]
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=_LAST_BYTES,
            h11_max_incomplete_event_size=service.config.max_header_bytes,
        )
        self._server = _Uvicorn(config)

    def start(self) -> None:
        """Begin to accept connections."""
        self._task = asyncio.ensure_future(self._server.serve([self._listener]))

    async def stop(self) -> None:
        """Close the socket, let responses that are complete get out, and end the rest."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task


class _Protocol(H11Protocol):
    """A connection on which a request's head must arrive in time, and whose errors have the form of all others."""

    def __init__(self, *arguments: Any, head_timeout: float, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._head_timeout = head_timeout
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # What comes after a response is the next head, or the rest of a body that nobody reads any more.
        if self.conn.their_state is h11.IDLE or self.conn.our_state is h11.DONE:
            self._expect_head()
        else:
            self._expect_nothing()

    def _expect_head(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self._head_timeout, self._too_late)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        begun, _ = self.conn.trailing_data
        if begun and self.conn.our_state is h11.IDLE:
            message = f"The request did not arrive within {self._head_timeout:g} s"
            self._refuse(RefusedError(HTTPStatus.REQUEST_TIMEOUT, message, "head_timeout"))
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what is no HTTP, of which a head that is too long is one kind."""
        limit = self.config.h11_max_incomplete_event_size or 0
        if len(self.conn.trailing_data[0]) > limit:
            error = head_too_large(limit)
        else:
            error = RefusedError(HTTPStatus.BAD_REQUEST, "This is not a valid HTTP request", "invalid_http")
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(error)
        self.transport.close()

    def _refuse(self, error: RefusedError) -> None:
        response = error_response(error)
        headers = [*response.raw_headers, (b"connection", b"close")]
        head = h11.Response(status_code=error.status, headers=headers, reason=error.status.phrase.encode())
        for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone: the answers are finished before the web server stops."""
        yield
