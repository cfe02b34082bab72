"""Middleware for API keys, rate limits, and rejections during shutdown."""

from __future__ import annotations

import contextlib
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlmserve.cancellation import client
from vlmserve.errors import VLMServeError
from vlmserve.server.accounts import Account
from vlmserve.server.body import drop_body
from vlmserve.server.connection import add_note, note_error
from vlmserve.server.entrance import HAS_LEFT, Entrance
from vlmserve.server.errors import RefusedError, error_code, error_response, head_too_large
from vlmserve.server.front import Front
from vlmserve.server.history import OWNER
from vlmserve.server.keys import salted
from vlmserve.server.origins import Origins
from vlmserve.server.page import ASSETS, REFERENCE

OPEN_PATHS = frozenset({"/", "/health", "/openapi.json", "/ping", "/ready", "/version", REFERENCE})
"""Paths without a key: probes, the OpenAPI document, and pages, which ask for a key."""
METRICS_PATHS = frozenset({"/metrics", "/live"})
"""Paths that need a key with --protect-metrics."""
_PROBES = frozenset({"/health", "/ping", "/ready", "/version"})
"""Probes, which load balancers call with any host name."""
_VERSIONS = ("1.0", "1.1")
TENANT = "vlmserve.tenant"
"""Key in an ASGI scope: `StoredKey.tenant`, the owner of cached data."""
ACCOUNT = "vlmserve.account"
"""Key in an ASGI scope: the request's `Account`, on a server with keys."""


class Guard:
    """Rejects in OpenAI's form, and changes only the headers of other responses."""

    def __init__(self, app: ASGIApp, service: Front) -> None:
        self._app = app
        self._service = service
        self._keys = service.keys
        self._origins = Origins(service.config, needs_key=service.keys is not None)
        self._max_head = service.config.max_header_bytes
        self._entrance = Entrance()
        self._open = OPEN_PATHS if service.config.protect_metrics else OPEN_PATHS | METRICS_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        account: Account | None = None

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if self._service.phase in ("leaving", "closing"):
                    headers["connection"] = "close"
                if account is not None:
                    headers.update(account.headers())
            await send(message)

        with contextlib.ExitStack() as stack:
            try:
                self._check_head(scope)
                if scope["path"] not in _PROBES:
                    self._origins.check(Headers(scope=scope))
                account = self._authenticate(scope)
                client.set(scope.get(OWNER) or (scope.get("client") or ("",))[0])
                if scope["method"] == "POST":
                    await self._entrance.enter(scope.get(HAS_LEFT, lambda: False))
                    await self._check_open(scope, receive)
                    if account is not None:
                        if self._keys is not None and self._keys.limits is not None:
                            await self._keys.limits.refresh(account)
                        stack.enter_context(account.admit())
            except VLMServeError as error:
                code = error_code(error)
                self._service.metrics.count_error(code)
                note_error(scope, code, str(error))
                await error_response(error, scope["path"])(scope, receive, send_with_headers)
                return
            await self._app(scope, receive, send_with_headers)

    def _check_head(self, scope: Scope) -> None:
        """Raise RefusedError for HTTP without headers (505), several Host headers (400) or a long head (431).

        The HTTP protocol accepts a long head that arrives in one piece.
        """
        if scope["http_version"] not in _VERSIONS:
            message = f"HTTP/{scope['http_version']} is not supported; use HTTP/1.1"
            raise RefusedError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, message, "http_version_not_supported")
        size = len(scope["raw_path"]) + len(scope["query_string"])
        if size + sum(len(name) + len(value) + len(b": \r\n") for name, value in scope["headers"]) > self._max_head:
            raise head_too_large(self._max_head)
        if sum(name == b"host" for name, _ in scope["headers"]) > 1:
            message = "The request has several Host headers; send one"
            raise RefusedError(HTTPStatus.BAD_REQUEST, message, "invalid_http")

    def _authenticate(self, scope: Scope) -> Account | None:
        """Find the request's account; None if no key is needed. Raises RefusedError (401)."""
        if self._keys is None or scope["path"] in self._open or scope["path"].startswith(ASSETS):
            return None
        key = _presented(Headers(scope=scope))
        account = None if key is None else self._keys.find(key)
        if account is None:
            message = (
                "This server needs an API key; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
                if key is None
                else "The API key is not valid here"
            )
            headers = {"WWW-Authenticate": "Bearer"}
            raise RefusedError(HTTPStatus.UNAUTHORIZED, message, "invalid_api_key", headers=headers)
        scope[ACCOUNT] = account
        scope[OWNER] = account.owner
        scope[TENANT] = account.key.tenant
        add_note(scope, f"key {account.name}", key=account.name)
        return account

    async def _check_open(self, scope: Scope, receive: Receive) -> None:
        if self._service.phase != "closing" or (problem := self._service.problem()) is None:
            return
        # a client that is still sending might not read the response before the connection closes
        await drop_body(Request(scope, receive), self._service.max_body_bytes)
        raise problem


def account_of(request: Request) -> Account | None:
    account: Account | None = request.scope.get(ACCOUNT)
    return account


def salt_of(request: Request, cache_salt: str | None) -> str:
    """The salt of a request and its key together; "" without either."""
    tenant: bytes | None = request.scope.get(TENANT)
    return cache_salt or "" if tenant is None else salted(tenant, cache_salt or "")


def _presented(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key", "").strip() or None
