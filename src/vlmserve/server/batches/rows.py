"""Answer requests of a batch like a client's, but in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message

from vlmserve.cancellation import client
from vlmserve.errors import VLMServeError
from vlmserve.server.accounts import Account
from vlmserve.server.app import count_and_handle_error
from vlmserve.server.batches.host import BatchHost
from vlmserve.server.connection import RequestLog
from vlmserve.server.guard import ACCOUNT, TENANT
from vlmserve.server.history import OWNER
from vlmserve.server.routes.answering import BACKGROUND
from vlmserve.server.routes.chat import chat_completions
from vlmserve.server.routes.completions import completions
from vlmserve.server.routes.embeddings import embeddings
from vlmserve.server.routes.responses import create_response
from vlmserve.storage.batches import Batch

Endpoint = Callable[[Request], Awaitable[Response]]

ATTEMPTS = 6
"""Maximum tries of a request that is rejected for load."""
MOST_DEATHS = 2
"""Engine deaths during a request after which it is not retried."""
FIRST_PAUSE, _LAST_PAUSE = 0.5, 30.0
_LOOK = 0.5
"""Seconds between checks whether the engine is back."""
_AGAIN = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})


OWN_ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/responses": create_response,
    "/v1/embeddings": embeddings,
}


@dataclass(frozen=True)
class RowAnswer:
    status: int
    request_id: str
    body: bytes

    @property
    def error_code(self) -> str | None:
        if self.status == HTTPStatus.OK:
            return None
        code: str | None = msgspec.json.decode(self.body)["error"]["code"]
        return code


class Rows:
    """Answers with the server's own routes, below keys and rate limits."""

    def __init__(self, service: BatchHost, endpoints: Mapping[str, Endpoint] = OWN_ENDPOINTS) -> None:
        """endpoints: by path."""
        self._service = service
        # after an engine death, one at a time, so that none is blamed for another
        self._suspects = asyncio.Lock()
        self._app = Starlette(
            routes=[Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()],
            middleware=[Middleware(RequestLog, service=service)],
            exception_handlers={VLMServeError: count_and_handle_error},
        )
        self._app.state.service = self._app.state.front = self._app.state.gateway = service

    async def answer(self, batch: Batch, account: Account | None, body: bytes) -> RowAnswer:
        """Answer a request. Retry where that may help."""
        pause, deaths = FIRST_PAUSE, 0
        for attempt in range(1, ATTEMPTS + 1):
            await self._until_serving()
            if deaths:
                async with self._suspects:
                    answer = await self.ask(batch, account, body)
            else:
                answer = await self.ask(batch, account, body)
            deaths += answer.error_code == "engine_dead"
            if answer.status not in _AGAIN or attempt == ATTEMPTS or deaths == MOST_DEATHS:
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)
        return answer

    async def _until_serving(self) -> None:
        while True:
            try:
                self._service.check_serving()
                return
            except VLMServeError:
                await asyncio.sleep(_LOOK)

    async def ask(self, batch: Batch, account: Account | None, body: bytes) -> RowAnswer:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": batch.endpoint,
            "raw_path": batch.endpoint.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
            "client": None,
            "server": None,
            OWNER: batch.owner,
            BACKGROUND: True,
            **({TENANT: bytes.fromhex(batch.tenant)} if batch.tenant else {}),
            **({} if account is None else {ACCOUNT: account}),
        }
        start: Message = {}
        chunks: list[bytes] = []
        unread = [body]

        async def receive() -> Message:
            if not unread:
                await asyncio.Event().wait()  # a batch never disconnects
            return {"type": "http.request", "body": unread.pop(), "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                chunks.append(message.get("body", b""))

        client.set(f"batches of {batch.owner}")
        await self._app(scope, receive, send)
        return RowAnswer(start["status"], Headers(raw=start["headers"])["x-request-id"], b"".join(chunks))
