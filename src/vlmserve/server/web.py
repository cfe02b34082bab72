"""uvicorn, started and stopped by us instead of by signals."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn

from vlmserve.server.app import create_app
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
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=_LAST_BYTES,
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


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone: the answers are finished before the web server stops."""
        yield
