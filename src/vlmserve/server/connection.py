"""Requests on their connections: disconnected clients, request ids, and the access log."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Coroutine, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlmserve.server.errors import internal_error_response
from vlmserve.server.spans import TRACE

if TYPE_CHECKING:
    from vlmserve.server.front import Front
    from vlmserve.server.tracing import Trace

access_log = logging.getLogger("vlmserve.access")
logger = logging.getLogger(__name__)

RELAXED_HEADER = "x-vlmserve-not-enforced"
"""Names schema keywords that the answer need not obey."""
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected, in the log."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_NOTES = "vlmserve.notes"
_FIELDS = "vlmserve.fields"
_REQUEST_ID_KEY = "vlmserve.request_id"
_WATCH_AFTER = 0.02
"""Seconds of work after which the connection is watched for a disconnect."""
_PROBES = ("/health", "/ping", "/ready", "/metrics", "/live")
"""Polled paths. Only failures are logged, and repeated statuses once."""

Result = TypeVar("Result")


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Raise ClientDisconnect when the client disconnects. The body must have been read."""
    worker = asyncio.current_task()
    left = False

    async def watch() -> None:
        nonlocal left
        await disconnected(request.receive)
        if worker is not None:
            left = True
            worker.cancel()

    watcher: asyncio.Future[None] | None = None

    def begin() -> None:
        nonlocal watcher
        watcher = asyncio.ensure_future(watch())

    # Short work is not watched.

    starting = asyncio.get_running_loop().call_later(_WATCH_AFTER, begin)
    try:
        return await work
    except asyncio.CancelledError:
        # Someone else may have cancelled it, too.
        if left and worker is not None and worker.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        worker = None  # an error's traceback would hold the task, which holds the error
        starting.cancel()
        if watcher is not None:
            watcher.cancel()


async def disconnected(receive: Receive) -> None:
    """Wait until the client has left. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _shown(text: str) -> str:
    return (text if text.isprintable() else ascii(text))[:200]


def note(request: Request, text: str, **fields: str | int) -> None:
    """Add text and fields to the access log; only JSON logs have the fields."""
    add_note(request.scope, text, **fields)


def add_note(scope: Scope, text: str, **fields: str | int) -> None:
    scope[_NOTES].append(text)
    scope[_FIELDS].update(fields)


def note_error(scope: Scope, code: str, reason: str) -> None:
    reason = _shown(reason)
    scope[_FIELDS].update(error=code, reason=reason)
    scope[_NOTES].append(f"{code}: {reason}")


def request_id_of(request: Request) -> str:
    request_id: str = request.scope[_REQUEST_ID_KEY]
    return request_id


class RequestLog:
    """Assigns request ids, traces requests, writes the access log and hides tracebacks from clients."""

    def __init__(self, app: ASGIApp, service: Front) -> None:
        self._app = app
        self._metrics = service.metrics
        self._tracing = service.tracing
        self._probed: dict[str, int] = {}
        """The latest status of each polled path."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        headers = Headers(scope=scope)
        wanted_id = headers.get("x-request-id", "")
        request_id = wanted_id if _REQUEST_ID.fullmatch(wanted_id) else f"req-{secrets.token_hex(16)}"
        notes: list[str] = []
        fields: dict[str, str | int] = {}
        scope[_NOTES], scope[_FIELDS], scope[_REQUEST_ID_KEY] = notes, fields, request_id
        trace = None
        if self._tracing is not None and scope["method"] == "POST":
            trace = scope[TRACE] = self._tracing.begin(scope["method"], _shown(scope["path"]), headers)
            fields["trace_id"] = trace.trace_id
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            status = CLIENT_CLOSED_REQUEST
            notes.append("the client left")
            fields["error"] = "client_left"
        except Exception:
            fields["error"] = "internal_error"
            self._log_bug(scope, request_id, fields)
            if status == 0:
                await internal_error_response()(scope, receive, send_with_id)
        finally:
            status = status or CLIENT_CLOSED_REQUEST
            level = logging.DEBUG if self._is_routine(scope["path"], status) else logging.INFO
            _log_access(level, scope, status, time.monotonic() - started, request_id, notes, fields)
            if trace is not None:
                _end_trace(trace, scope, status, request_id, fields)

    def _is_routine(self, path: str, status: int) -> bool:
        if path not in _PROBES:
            return False
        before, self._probed[path] = self._probed.get(path, HTTPStatus.OK), status
        return status in (HTTPStatus.OK, before)

    def _log_bug(self, scope: Scope, request_id: str, fields: Mapping[str, str | int]) -> None:
        self._metrics.count_error("internal_error")
        logger.exception(
            "%s %s failed, request %s",
            scope["method"],
            _shown(scope["path"]),
            request_id,
            extra={"fields": {"request_id": request_id, **fields}},
        )


def _log_access(
    level: int,
    scope: Scope,
    status: int,
    seconds: float,
    request_id: str,
    notes: Sequence[str],
    fields: Mapping[str, str | int],
) -> None:
    client = scope["client"][0] if scope.get("client") else "-"
    path = _shown(scope["path"])
    about = {"client": client, "method": scope["method"], "path": path, "status": status, "seconds": round(seconds, 6)}
    access_log.log(
        level,
        "%s %s %s %d in %.3f s, %s%s",
        client,
        scope["method"],
        path,
        status,
        seconds,
        request_id,
        "".join(f", {text}" for text in notes),
        extra={"fields": {**about, "request_id": request_id, **fields}},
    )


def _end_trace(trace: Trace, scope: Scope, status: int, request_id: str, fields: Mapping[str, str | int]) -> None:
    error = fields.get("error")
    attributes = {"vlmserve.request_id": request_id}
    if (route := scope.get("route")) is not None:
        attributes["http.route"] = route.path
    # A failed stream had status 200 already.
    failed = status >= CLIENT_CLOSED_REQUEST or (error is not None and status < HTTPStatus.BAD_REQUEST)
    trace.end(status, None if error is None else str(error), attributes, failed=failed)
