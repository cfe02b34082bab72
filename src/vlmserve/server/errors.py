"""Errors in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from vlmserve.errors import (
    EngineDeadError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PromptTooLongError,
    StorageFullError,
    UnavailableError,
    UnknownModelError,
    VLMServeError,
)
from vlmserve.server.paths import OLLAMA, methods_at, not_found_message

MESSAGES_PATH = "/v1/messages"
_MESSAGES_KINDS = {
    HTTPStatus.BAD_REQUEST: "invalid_request_error",
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.METHOD_NOT_ALLOWED: "invalid_request_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "invalid_request_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}
"""https://docs.anthropic.com/en/api/errors"""
_MESSAGES_DETAILS = {"thread": {"error_code": "thread_unsupported_request"}}
"""Details by rejected field; Anthropic's clients then retry without the field."""


_CONTEXT = re.compile(r"context length is (?P<context>\d+) tokens.* has (?:more than )?(?P<sent>\d+) input tokens")
"""Matches the message of `PromptTooLongError`."""


class RefusedError(VLMServeError):
    """A request that is rejected for its headers, key or time. retry_after: seconds. headers: of the response."""

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        code: str,
        *,
        retry_after: float = 1.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after
        self.headers = dict(headers or {})


def status_of(error: VLMServeError) -> HTTPStatus:
    match error:
        case RefusedError():
            return error.status
        case UnknownModelError() | NotFoundError():
            return HTTPStatus.NOT_FOUND
        case InvalidRequestError():
            return HTTPStatus.BAD_REQUEST
        case OverloadedError():
            return HTTPStatus.TOO_MANY_REQUESTS
        case EngineDeadError() | UnavailableError():
            return HTTPStatus.SERVICE_UNAVAILABLE
        case StorageFullError():
            return HTTPStatus.INSUFFICIENT_STORAGE
        case _:
            return HTTPStatus.INTERNAL_SERVER_ERROR


def error_body(error: VLMServeError) -> dict[str, Any]:
    """Make the JSON object of an error, also for the last event of a stream."""
    kind = "invalid_request_error" if status_of(error) < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    match error:
        case OverloadedError():
            kind, code = "rate_limit_error", "overloaded"
        case EngineDeadError():
            code = "engine_dead"
        case UnavailableError():
            code = "unavailable"
        case RefusedError(status=HTTPStatus.TOO_MANY_REQUESTS):
            kind, code = "rate_limit_error", error.code
        case StorageFullError():
            code = "storage_full"
        case InvalidRequestError() | RefusedError():
            code = error.code
        case _:
            code = "generation_failed"
    return {"error": {"message": str(error), "type": kind, "param": getattr(error, "param", None), "code": code}}


def error_code(error: VLMServeError) -> str:
    code: str = error_body(error)["error"]["code"]
    return code


def messages_error_body(error: VLMServeError) -> dict[str, Any]:
    kind = _MESSAGES_KINDS.get(status_of(error), "api_error")
    place = getattr(error, "param", None)
    message = str(error) if place is None or place in str(error) else f"{place}: {error}"
    if isinstance(error, PromptTooLongError):
        counts = _CONTEXT.search(message)
        message = f"prompt is too long: {message if counts is None else _counted(counts)}"
    details = {"details": _MESSAGES_DETAILS[place]} if place in _MESSAGES_DETAILS else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


def _counted(counts: re.Match[str]) -> str:
    return f"{counts['sent']} tokens > {int(counts['context']) - 1} maximum"


def retry_after(error: VLMServeError) -> str:
    """Return the value of ``Retry-After``: whole seconds, at least 1."""
    seconds: float = getattr(error, "retry_after", 1.0)
    return str(max(1, math.ceil(seconds)))


def error_response(error: VLMServeError, path: str = "") -> Response:
    """In the form of the API at `path`."""
    status = status_of(error)
    headers = error.headers if isinstance(error, RefusedError) else {}
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        headers = {**headers, "Retry-After": retry_after(error)}
    body = msgspec.json.encode(_body_at(path, error))
    # LiteLLM searches for '"code": "context_length_exceeded"', with the space.
    return json_response(msgspec.Raw(msgspec.json.format(body, indent=0)), status, headers)


def _body_at(path: str, error: VLMServeError) -> dict[str, Any]:
    if path.startswith(MESSAGES_PATH):
        return messages_error_body(error)
    return {"error": str(error)} if path.startswith(OLLAMA) else error_body(error)


def head_too_large(max_bytes: int) -> RefusedError:
    message = f"The head of the request is larger than the limit of {max_bytes} bytes"
    return RefusedError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message, "head_too_large")


def framing_too_large(max_bytes: int) -> RefusedError:
    message = f"Trailers and chunk extensions of the request are larger than the limit of {max_bytes} bytes"
    return RefusedError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message, "trailers_too_large")


def internal_error_response() -> Response:
    """Make the response after a bug. Only the log has the traceback."""
    message = "Something went wrong inside the server; its log says what"
    return json_response(
        {"error": {"message": message, "type": "server_error", "param": None, "code": "internal_error"}},
        HTTPStatus.INTERNAL_SERVER_ERROR,
    )


def json_response(value: object, status: int = HTTPStatus.OK, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


async def handle_vlmserve_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, VLMServeError)
    return error_response(error, request.url.path)


async def handle_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, status = request.scope["path"], HTTPStatus(error.status_code)
    headers = dict(error.headers or {})
    if status is HTTPStatus.NOT_FOUND:
        message, code = not_found_message(path, request.app.routes), "not_found"
    elif status is HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(methods_at(path, request.app.routes))
        message, code = f"{path} does not take {request.method}; use {headers['Allow']}", "method_not_allowed"
    else:
        message, code = str(error.detail), "http_error"
    return error_response(RefusedError(status, message, code, headers=headers), path)
