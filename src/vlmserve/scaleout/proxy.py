"""Forward a request to a worker, and retry on another if the first fails before it answers."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vlmserve.errors import OverloadedError, UnavailableError
from vlmserve.scaleout.gateway import Gateway
from vlmserve.scaleout.keys import RequestKey, request_key
from vlmserve.scaleout.messages import (
    BACKGROUND_HEADER,
    CLIENT_HEADER,
    OWNER_HEADER,
    PROMPT_HEADER,
    ROUTE_HEADER,
    SEED_HEADER,
    TENANT_HEADER,
)
from vlmserve.scaleout.router import Route, Router
from vlmserve.scaleout.upstream import Answer, UpstreamError
from vlmserve.server.body import BodyShare, content_type, read_body, skip_byte_order_mark
from vlmserve.server.connection import (
    add_note,
    cancel,
    disconnected,
    note_error,
    request_id_of,
    unless_disconnected,
)
from vlmserve.server.errors import error_body, messages_error_body
from vlmserve.server.guard import TENANT, account_of
from vlmserve.server.history import owner_of
from vlmserve.server.paths import OLLAMA
from vlmserve.server.routes.answering import BACKGROUND
from vlmserve.server.routes.events import event, named_event
from vlmserve.server.streams import LINES, begin_in_time

GENERATING = frozenset(
    "/v1/chat/completions /v1/completions /v1/responses /v1/messages /v1/decisions /v1/embeddings /v1/score /v1/rerank "
    "/v2/rerank /pooling /classify /api/chat /api/generate /api/embed /api/embeddings".split()
)
"""Paths that an engine answers."""
_OF_A_MODEL = GENERATING | {"/v1/messages/count_tokens", "/tokenize", "/detokenize", "/api/show"}
_LARGE = 2 * 1024**2
"""Bytes; larger bodies are parsed in another thread."""
_PASSED_ON = ("content-type", "accept", "traceparent", "tracestate", "idempotency-key", "range")
_OTHER_KEY = RequestKey((), (), 0, (), b"")
_MOST_WHOLE = 4 * 1024**2
"""Bytes; smaller answers are buffered until complete, so that another worker can replace a failed one."""
NEWS = 0.5
"""Seconds in which a gateway learns that a worker is leaving."""
_MOST_IMAGES_TOLD = 16
"""Maximum images of a request that other gateways are told."""
_EVENTS = (b"text/event-stream", LINES.encode())
"""Content types of streams that end with a message if their worker dies."""
_EVENT_END = b"\n\n"


class _Failed(Exception):
    """Another worker may repeat the attempt. answer: the worker's, if it gave one."""

    def __init__(self, reason: str, answer: _Whole | None = None) -> None:
        super().__init__(reason)
        self.answer = answer


class _Whole(NamedTuple):
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Proxy:
    def __init__(self, gateway: Gateway, request: Request) -> None:
        self.gateway = gateway
        self._request = request
        self._path: str = request.scope["path"]
        raw: bytes = request.scope["raw_path"]
        query: bytes = request.scope["query_string"]
        self._target = (raw + (b"?" + query if query else b"")).decode("latin-1")
        self._seed = secrets.randbits(62)
        self._body = bytearray()
        self._router: Router
        self._key = _OTHER_KEY
        self._fields: dict[str, Any] | None = None
        """The body's fields, until the request is routed."""
        self._read_seconds = 0.0
        self._is_of_a_model = False
        self._name: object = None
        """The model or adapter that the request names."""
        self._may_be_absent = False
        """True after the failure of a worker that may be leaving."""
        self.streams = False
        """True if the client wants a stream; valid after `read`."""
        self.held = contextlib.ExitStack()
        """Closes after the answer."""
        self.is_kept = False
        """True if the answer may be stored. If its worker dies, it is stored as failed."""

    async def read(self, share: BodyShare) -> None:
        """Raises VLMServeError."""
        gateway, request = self.gateway, self._request
        if request.method == "POST":
            most = gateway.max_body_bytes
            if self._path == "/v1/files":
                most = min(gateway.config.max_file_bytes + 64 * 1024, gateway.config.body_memory)
            self._body = await read_body(request, most, share, gateway.config.body_timeout)
            skip_byte_order_mark(self._body)
        began = time.perf_counter()
        self._fields = await self._read_fields()
        self._is_of_a_model = self._fields is not None and self._path in _OF_A_MODEL
        has_events = self._path in GENERATING and not self._path.startswith(OLLAMA)
        self.streams = self._fields is not None and has_events and self._fields.get("stream") is True
        if self._fields is not None and self._is_of_a_model:
            self._name = self.gateway.untagged(_named(self._fields))
        self._read_seconds = time.perf_counter() - began

    def _see(self) -> None:
        """Raises VLMServeError."""
        began = time.perf_counter()
        name, fields, self._fields = self._find_model(), self._fields, None
        if self._path in GENERATING and fields is not None:
            tenant = self._request.scope.get(TENANT, b"").hex()
            salt = f"{tenant} {fields.get('cache_salt') or ''}"
            adapter = str(fields.get("model"))
            self._key = request_key(fields, model=name, salt=salt, adapter=adapter)
            self.is_kept = self._path == "/v1/responses" and fields.get("store") is not False
        self.gateway.metrics.routing.observe(self._read_seconds + time.perf_counter() - began)

    def _find_model(self) -> str:
        """Raises VLMServeError."""
        gateway = self.gateway
        name, self._router = gateway.model(self._name) if self._is_of_a_model else gateway.any_model()
        return name

    async def _read_fields(self) -> dict[str, Any] | None:
        """None: the body is no object, and the worker reports the error."""
        if not self._body or content_type(self._request).startswith("multipart/"):
            return None
        try:
            if len(self._body) > _LARGE:
                fields = await asyncio.to_thread(msgspec.json.decode, self._body)
            else:
                fields = msgspec.json.decode(self._body)
        except (msgspec.DecodeError, RecursionError):
            return None
        return fields if isinstance(fields, dict) else None

    def comment(self) -> bytes | None:
        """None: the usual ping."""
        return self.gateway.waiting_comment(self._name)

    async def answer(self) -> Response:
        """Raises VLMServeError if no worker can answer."""
        await self.gateway.await_worker(self._name, self.held)
        self._see()
        excluded: set[str] = set()
        last: _Failed | None = None
        for attempt in range(self.gateway.settings.max_attempts):
            sent = await self._send(excluded)
            if sent is None:
                break
            number, route = sent
            if attempt:
                self.gateway.metrics.retries.inc()
            self.gateway.metrics.requests.labels(route.worker.info.name).inc()
            try:
                return await self._try(number, route)
            except _Failed as failure:
                excluded.add(route.worker.info.id)
                if last is None or failure.answer is not None:
                    last = failure  # a full worker's answer tells the client more than a lost connection
        if last is not None and last.answer is not None:
            return _response(last.answer)
        raise UnavailableError("No worker can answer now; try again soon")

    async def _send(self, excluded: set[str]) -> tuple[int, Route] | None:
        """Wait if the model's last worker has just left or may be leaving, or if no worker has the adapter yet."""
        gateway, account = self.gateway, account_of(self._request)
        now = asyncio.get_running_loop().time
        began, until = now(), now() + gateway.patience
        while True:
            lacking = gateway.lacking(self._name)
            sent = gateway.send(self._router, self._key, {*excluded, *lacking}, account)
            if sent is not None:
                return sent
            told = began + NEWS if self._may_be_absent else now() + self._router.news_left(NEWS)
            if gateway.absent(self._name):
                await gateway.await_worker(self._name, self.held)
                excluded.clear()
                self._find_model()
                until = now() + gateway.patience
            elif (self._may_be_absent or not (excluded or lacking)) and now() < told:
                if await self._worker_changes(told) and not gateway.absent(self._name):
                    self._find_model()
            elif excluded or not lacking or not await self._worker_changes(until):
                return None

    async def _worker_changes(self, until: float) -> bool:
        """Wait for news of a worker. Returns False if there is none by `until`, a time of the loop."""
        try:
            async with asyncio.timeout_at(until):
                await self.gateway.change_of_worker()
        except TimeoutError:
            return False
        return True

    async def _try(self, number: int, route: Route) -> Response:
        """Raises _Failed."""
        stack = contextlib.AsyncExitStack()
        try:
            async with contextlib.AsyncExitStack() as opening:
                upstream = self.gateway.members[route.worker.info.url].upstream
                asking = upstream.request(self._request.method, self._target, self._headers(number), self._body)
                answer = await opening.enter_async_context(asking)
                first = await answer.read()
                if _is_stream(answer):
                    stack = opening.pop_all()
                    route.started()
                    add_note(self._request.scope, f"worker {route.worker.info.name}", worker=route.worker.info.name)
                    return _Stream(self, route, number, answer, first, stack)
                whole = _Whole(answer.status, answer.passed_on(), first + await answer.read_all())
        except (UpstreamError, KeyError) as error:
            self.gateway.forget(number)
            route.fail(connection=True)
            self._may_be_absent = True
            raise _Failed(str(error)) from None
        except BaseException:
            self.gateway.forget(number)
            route.abandon()
            raise
        self._judge(number, route, whole)
        return _response(whole)

    def _judge(self, number: int, route: Route, whole: _Whole) -> None:
        """Raises _Failed if another worker should try."""
        if whole.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            # It is full or shutting down, which is no failure.
            self.gateway.forget(number)
            route.abandon()
            self._may_be_absent = whole.status == HTTPStatus.SERVICE_UNAVAILABLE
            raise _Failed("it takes no more requests", whole)
        if whole.status >= HTTPStatus.INTERNAL_SERVER_ERROR and whole.status != HTTPStatus.INSUFFICIENT_STORAGE:
            self.gateway.forget(number)
            route.fail(connection=False)
            if self._path in GENERATING:
                raise _Failed("it failed", whole)
            return
        route.finish()
        if self._path not in GENERATING or whole.status >= HTTPStatus.BAD_REQUEST:
            self.gateway.forget(number)

    def _headers(self, number: int) -> list[tuple[str, str]]:
        given = self._request.headers
        headers = [(name, given[name]) for name in _PASSED_ON if name in given]
        headers += [("x-request-id", request_id_of(self._request)), (ROUTE_HEADER, f"{self.gateway.id}.{number}")]
        headers += [(SEED_HEADER, str(self._seed)), (OWNER_HEADER, owner_of(self._request))]
        if self._request.scope.get(BACKGROUND):
            headers.append((BACKGROUND_HEADER, "1"))
        if client := self._request.client:
            headers.append((CLIENT_HEADER, client.host))
        if tenant := self._request.scope.get(TENANT):
            headers.append((TENANT_HEADER, tenant.hex()))
        if self._key.segments:
            digests = (self._key.segments[-1].digest, *self._key.images[:_MOST_IMAGES_TOLD])
            headers.append((PROMPT_HEADER, ",".join(digest.hex() for digest in digests)))
        return headers

    def drop_body(self) -> None:
        self._body = bytearray()

    async def broken(self, first: bytes, reason: str) -> bytes:
        """The last event of a stream whose worker died. first: at least the first event."""
        self.gateway.metrics.broken.inc()
        error = UnavailableError(f"The worker that was answering is gone ({reason}); send the request again")
        note_error(self._request.scope, "worker_lost", reason)
        if self._path == "/v1/messages":
            return named_event(messages_error_body(error))
        if self._path.startswith(OLLAMA):
            return msgspec.json.encode({"error": str(error)}) + b"\n"
        if self._path == "/v1/responses":
            response = _response_of(first) | {
                "status": "failed", "error": {"code": "server_error", "message": str(error)}
            }  # fmt: skip
            if response.get("store") and self._body:
                await self.gateway.lost.keep(owner_of(self._request), self._body, response)
            return named_event({"type": "response.failed", "sequence_number": 2**31 - 1, "response": response})
        return event(error_body(error))


class _Stream(Response):
    def __init__(
        self, proxy: Proxy, route: Route, number: int, answer: Answer, first: bytes, stack: contextlib.AsyncExitStack
    ) -> None:
        super().__init__(None, answer.status)
        self.raw_headers = answer.passed_on()
        self._proxy, self._route, self._number = proxy, route, number
        self._answer, self._first, self._stack = answer, first, stack
        self._is_cut = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send_all(send))
        watcher = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((sender, watcher), return_when=asyncio.FIRST_COMPLETED)
            if not sender.done():
                self._route.abandon()
                raise ClientDisconnect
            sender.result()
        finally:
            await cancel(sender, watcher)
            self._route.abandon()
            await self._stack.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._data():
            await send({"type": "http.response.body", "body": data, "more_body": True})
        if not self._is_cut:  # a cut answer closes the connection, so that the client notices
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _data(self) -> AsyncGenerator[bytes, None]:
        data = self._first
        try:
            while data:
                yield data
                data = await self._answer.read()
                if self._proxy.is_kept and _EVENT_END not in self._first:
                    self._first += data
        except UpstreamError as error:
            self._proxy.gateway.forget(self._number)
            self._route.fail(connection=True)
            last = await self._proxy.broken(self._first, str(error))
            if _is_events(self._answer):
                yield last
            else:
                self._is_cut = True
        else:
            self._route.finish()


async def forward(request: Request) -> Response:
    gateway: Gateway = request.app.state.gateway
    if gateway.num_in_flight >= gateway.settings.max_in_flight:
        raise OverloadedError(f"{gateway.num_in_flight} requests are in flight already; try again later")
    with contextlib.ExitStack() as stack:
        stack.enter_context(gateway.admit())
        proxy = Proxy(gateway, request)
        share = stack.enter_context(gateway.bodies.share())
        stack.enter_context(proxy.held)
        await proxy.read(share)
        answering = _answer(request, proxy, share)
        interval = gateway.config.stream_ping_interval
        response = await begin_in_time(request, answering, lambda: proxy.streams, interval, proxy.comment)
        return _Held(response, stack.pop_all())


async def _answer(request: Request, proxy: Proxy, share: BodyShare) -> Response:
    gateway = proxy.gateway
    response = await unless_disconnected(request, proxy.answer())
    is_needed = proxy.is_kept and isinstance(response, _Stream)
    if not is_needed or gateway.bodies.used > gateway.bodies.capacity // 2:
        proxy.drop_body()
        share.give_back()
    if response.status_code >= HTTPStatus.BAD_REQUEST:
        _note_error(request, bytes(response.body))
    return response


def _note_error(request: Request, body: bytes) -> None:
    """Log a worker's error. body: in any API's form."""
    with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
        error = msgspec.json.decode(body)["error"]
        if isinstance(error, str):
            error = {"type": "ollama", "message": error}
        note_error(request.scope, str(error.get("code") or error["type"]), str(error["message"]))


class _Held(Response):
    def __init__(self, response: Response, stack: contextlib.ExitStack) -> None:
        self._response = response
        self._stack = stack
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stack:
            await self._response(scope, receive, send)


def _is_events(answer: Answer) -> bool:
    return dict(answer.headers).get(b"content-type", b"").startswith(_EVENTS)


def _is_stream(answer: Answer) -> bool:
    return _is_events(answer) or int(dict(answer.headers).get(b"content-length", b"0")) > _MOST_WHOLE


def _response(whole: _Whole) -> Response:
    response = Response(whole.body, whole.status)
    response.raw_headers = [header for header in whole.headers if header[0] != b"content-length"]
    response.raw_headers.append((b"content-length", str(len(whole.body)).encode()))
    return response


def _response_of(first: bytes) -> dict[str, Any]:
    line = first.partition(b"data: ")[2].partition(b"\n")[0]
    with contextlib.suppress(msgspec.DecodeError):
        return dict(msgspec.json.decode(line).get("response") or {})
    return {}


def _named(fields: dict[str, Any]) -> object:
    """Ollama's older clients send "name" instead of "model"."""
    return fields.get("model", fields.get("name"))
