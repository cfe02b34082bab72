"""Server-sent events, with pings, because proxies and clients close silent connections after 60 s or more."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from vlmserve.errors import VLMServeError
from vlmserve.server.connection import cancel, disconnected, note_error
from vlmserve.server.errors import MESSAGES_PATH, error_code, error_response

if TYPE_CHECKING:
    from vlmserve.server.front import Front

EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
"""Ollama's streams of JSON lines."""
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""X-Accel-Buffering: nginx passes every event on at once."""
_COMMENT = b": ping\n\n"
"""Clients skip lines that begin with a colon."""
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
"""Ping event of Anthropic's API."""
NEWS_SECONDS = 1.0
"""Seconds between comments that say why an answer has not begun."""
_RESPONSES_PATH = "/v1/responses"


def _ping_at(path: str) -> bytes:
    return _PING if path.startswith(MESSAGES_PATH) else _COMMENT


def _error_event(path: str, body: bytes) -> bytes:
    """Make the event that ends a failed stream. body: of an error response."""
    if path.startswith(MESSAGES_PATH):
        return b"event: error\ndata: " + body + b"\n\n"
    if path.startswith(_RESPONSES_PATH):
        error = msgspec.json.decode(body)["error"]
        fields = {name: error.get(name) for name in ("code", "message", "param")}
        data = msgspec.json.encode({"type": "error", **fields, "sequence_number": 0})
        return b"event: error\ndata: " + data + b"\n\n"
    return b"data: " + body + b"\n\n"


class EventStream(Response):
    """When the client disconnects, the generator and `resources` close, also between events.

    After `interval` seconds without an event (0: never) it sends a comment or, in Anthropic's API, a ping. comment:
    makes the text to send in their place; None: the usual ping.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        resources: contextlib.ExitStack,
        interval: float = 0,
        media_type: str = EVENTS,
        comment: Callable[[], Awaitable[bytes | None]] | None = None,
    ) -> None:
        self._events = events
        self._comment = comment
        self._resources = resources
        self._interval = interval
        self._latest = time.monotonic()
        """When the latest event was sent."""
        self._lock = asyncio.Lock()
        """Held while sending."""
        super().__init__(None, headers=_HEADERS, media_type=media_type)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send_all(send))
        watcher = asyncio.ensure_future(disconnected(receive))
        try:
            while not await self._wait(sender, watcher):
                comment = None if self._comment is None else await self._comment()
                await self._ping(send, comment or _ping_at(scope["path"]))
            if not sender.done():
                raise ClientDisconnect
            sender.result()
        finally:
            await cancel(sender, watcher)
            await self._events.aclose()
            self._resources.close()

    async def _wait(self, *tasks: asyncio.Future[Any]) -> bool:
        """Return whether a task has ended within `interval` seconds."""
        left = max(0.0, self._latest + self._interval - time.monotonic()) if self._interval else None
        done, _ = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    async def _ping(self, send: Send, ping: bytes) -> None:
        async with self._lock:
            if time.monotonic() - self._latest >= self._interval:
                await send({"type": "http.response.body", "body": ping, "more_body": True})
                self._latest = time.monotonic()

    async def _send_all(self, send: Send) -> None:
        async with self._lock:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            async with self._lock:
                await send({"type": "http.response.body", "body": event, "more_body": True})
                self._latest = time.monotonic()
        async with self._lock:
            self._latest = float("inf")
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def begin_in_time(
    request: Request,
    answering: Coroutine[Any, Any, Response],
    streams: Callable[[], bool],
    interval: float,
    comment: Callable[[], bytes | None] | None = None,
) -> Response:
    """The response, or after `interval` seconds (0: never) a stream that sends pings and then the response.

    streams: returns whether the request wants a stream. comment: makes the text to send every `NEWS_SECONDS` in place
    of pings.
    """
    if not interval:
        return await answering
    asking = asyncio.ensure_future(answering)
    pings = _Pings(request.scope["path"], interval, comment)
    try:
        while not asking.done():
            await asyncio.wait((asking,), timeout=pings.pause)
            if not asking.done() and streams() and pings.is_due:
                return _EarlyStream(asking, pings)
        return asking.result()
    except BaseException:
        await cancel(asking)
        raise
    finally:
        del asking  # an error's traceback would hold the task, which holds the error


class _Pings:
    def __init__(self, path: str, interval: float, comment: Callable[[], bytes | None] | None) -> None:
        self._path, self._interval, self._comment = path, interval, comment
        self._latest = time.monotonic()
        self.pause = interval if comment is None else min(interval, NEWS_SECONDS)
        """Seconds between checks."""

    @property
    def is_due(self) -> bool:
        is_silent = time.monotonic() - self._latest >= self._interval
        return is_silent or (self._comment is not None and self._comment() is not None)

    def take(self) -> bytes:
        self._latest = time.monotonic()
        return (self._comment and self._comment()) or _ping_at(self._path)


class _EarlyStream(Response):
    """Sends pings until the response is ready, then its events, or its error as an event."""

    media_type = EVENTS

    def __init__(self, asking: asyncio.Future[Response], pings: _Pings) -> None:
        self._asking = asking
        self._pings = pings
        super().__init__(None, headers=_HEADERS)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._pings.take(), "more_body": True})
            while not self._asking.done():
                await asyncio.wait((self._asking,), timeout=self._pings.pause)
                if not self._asking.done() and self._pings.is_due:
                    await send({"type": "http.response.body", "body": self._pings.take(), "more_body": True})
        except BaseException:
            await cancel(self._asking)
            raise
        try:
            response = self._asking.result()
        except VLMServeError as error:
            note_failure(scope, error)
            response = error_response(error, path)

        async def send_rest(message: Message) -> None:
            if message["type"] == "http.response.body":
                await send(message)

        async def send_error(message: Message) -> None:
            if message["type"] == "http.response.body":
                await send({**message, "body": _error_event(path, message["body"])})

        await response(scope, receive, send_rest if _is_stream(response) else send_error)


def _is_stream(response: Response) -> bool:
    return response.headers.get("content-type", "").startswith(EVENTS)


def note_failure(scope: Scope, error: VLMServeError) -> None:
    front: Front = scope["app"].state.front
    code = error_code(error)
    front.metrics.count_error(code)
    note_error(scope, code, str(error))
