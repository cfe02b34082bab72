"""The FastAPI application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from importlib import metadata
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from vlmserve.errors import EngineDeadError, VLMServeError
from vlmserve.server.accounts import RATE_LIMIT_HEADERS
from vlmserve.server.connection import RequestLog
from vlmserve.server.debug import show_caches
from vlmserve.server.errors import (
    error_body,
    handle_http_exception,
    handle_vlmserve_error,
    json_response,
    retry_after,
)
from vlmserve.server.guard import Guard
from vlmserve.server.page import start_page
from vlmserve.server.routes.chat import chat_completions
from vlmserve.server.routes.completions import completions
from vlmserve.server.routes.history import add_history_routes
from vlmserve.server.routes.messages import count_tokens, messages
from vlmserve.server.routes.tokens import detokenize, tokenize
from vlmserve.server.schema.base import RequestModel
from vlmserve.server.schema.chat import ChatRequest
from vlmserve.server.schema.completions import CompletionRequest
from vlmserve.server.schema.messages import CountRequest, MessagesRequest
from vlmserve.server.schema.models import ModelCard
from vlmserve.server.schema.tokens import DetokenizeRequest, TokenizeRequest
from vlmserve.server.service import Phase, Service

_POSTS: tuple[tuple[str, Callable[[Request], Awaitable[Response]], type[RequestModel]], ...] = (
    ("/v1/chat/completions", chat_completions, ChatRequest),
    ("/v1/completions", completions, CompletionRequest),
    ("/v1/messages", messages, MessagesRequest),
    ("/v1/messages/count_tokens", count_tokens, CountRequest),
    ("/tokenize", tokenize, TokenizeRequest),
    ("/detokenize", detokenize, DetokenizeRequest),
)
_SCHEMA_REF = "#/components/schemas/{model}"


def create_app(service: Service) -> FastAPI:
    """The application around a service, which may still be loading."""
    app = FastAPI(title="vlmserve", version=version(), redirect_slashes=False, docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_middleware(Guard, service=service)
    app.add_middleware(RequestLog)
    if service.config.cors_origins:
        # Outside of all others: a browser's preflight has no key, and it shows a page no error without these headers.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.config.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after", *RATE_LIMIT_HEADERS),
        )
    app.add_exception_handler(VLMServeError, count_and_handle_error)
    app.add_exception_handler(HTTPException, handle_http_exception)
    for path, endpoint in (
        ("/v1/models", list_models),
        ("/v1/models/{name:path}", show_model),
        ("/health", health),
        ("/ready", ready),
        ("/version", show_version),
        ("/metrics", show_metrics),
    ):
        app.add_api_route(path, endpoint, response_class=Response, response_model=None)
        # A route of its own: OpenAPI wants one operation for one name.
        app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False, response_model=None)
    if service.config.enable_debug:
        app.add_api_route("/debug/cache", show_caches, response_class=Response, response_model=None)
    app.add_api_route("/", index, include_in_schema=False, response_class=HTMLResponse)
    parts: dict[str, Any] = {}
    for path, post, kind in _POSTS:
        schema = kind.model_json_schema(ref_template=_SCHEMA_REF)
        parts |= schema.pop("$defs", {})
        app.add_api_route(
            path,
            post,
            methods=["POST"],
            response_class=Response,
            response_model=None,
            openapi_extra={"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}},
        )
    parts |= add_history_routes(app)
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        document.setdefault("components", {}).setdefault("schemas", {}).update(parts)
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # how FastAPI documents it
    return app


def version() -> str:
    """The installed version; "unknown" when it runs from a folder that was never installed."""
    try:
        return metadata.version("vlmserve")
    except metadata.PackageNotFoundError:
        return "unknown"


def _card(service: Service, name: str) -> ModelCard:
    info = service.info
    return ModelCard(name, service.created, info.max_model_len if info else None)


async def list_models(request: Request) -> Response:
    """The model that is served, under each of its names."""
    service: Service = request.app.state.service
    return json_response({"object": "list", "data": [_card(service, name) for name in service.model_names]})


async def show_model(request: Request, name: str) -> Response:
    """One model by name."""
    service: Service = request.app.state.service
    service.check_model(name)
    return json_response(_card(service, name if name in service.model_names else service.model_name))


async def health(request: Request) -> Response:
    """Whether the server works or helps itself: 503 with the reason until its model is loaded and once it closes.

    200 while the engine is restarted, too: what kills the server then makes all longer.
    """
    return _state(request.app.state.service, fine=("asleep", "serving", "restarting"))


async def ready(request: Request) -> Response:
    """200 when requests are answered, even if the first one has to load the model, else 503 with the reason."""
    return _state(request.app.state.service, fine=("asleep", "serving"))


def _state(service: Service, fine: Collection[Phase]) -> Response:
    phase, problem = service.phase, service.problem()
    if isinstance(problem, EngineDeadError):
        return json_response({"status": "dead", "reason": str(problem)}, 503, {"Retry-After": retry_after(problem)})
    state: dict[str, str] = {"status": "ok" if phase == "serving" else phase}
    if problem is None or phase == "asleep":
        return json_response(state)
    state["reason"] = str(problem)
    if phase in fine:
        return json_response(state)
    return json_response(state, 503, {"Retry-After": retry_after(problem)})


async def show_version() -> Response:
    """The version of vlmserve."""
    return json_response({"version": version()})


async def show_metrics(request: Request) -> Response:
    """All metrics for Prometheus; those of the engine while there is one."""
    service: Service = request.app.state.service
    page, content_type = service.metrics.exposition(request.headers.get("accept", ""))
    return Response(page, headers={"Content-Type": content_type})


async def count_and_handle_error(request: Request, error: Exception) -> Response:
    """Exception handler for `VLMServeError`."""
    assert isinstance(error, VLMServeError)
    service: Service = request.app.state.service
    service.metrics.count_error(error_body(error)["error"]["code"])
    return await handle_vlmserve_error(request, error)


async def index(request: Request) -> HTMLResponse:
    """What this is, for people with a browser."""
    service: Service = request.app.state.service
    return HTMLResponse(start_page(service.model_name, str(request.base_url).rstrip("/")))
