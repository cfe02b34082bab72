"""The ASGI application: routes, middleware, and error handlers."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from importlib import metadata
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vlmserve.errors import EngineDeadError, VLMServeError
from vlmserve.server.accounts import RATE_LIMIT_HEADERS
from vlmserve.server.connection import RELAXED_HEADER, RequestLog, note
from vlmserve.server.debug import show_caches
from vlmserve.server.errors import handle_http_exception, handle_vlmserve_error, json_response, retry_after
from vlmserve.server.front import Front
from vlmserve.server.guard import Guard
from vlmserve.server.live import LiveStats, LiveView
from vlmserve.server.openapi import Operation, document, routes
from vlmserve.server.origins import origin_pattern
from vlmserve.server.page import page_routes
from vlmserve.server.paths import OnePath
from vlmserve.server.routes.adapters import load_adapter, unload_adapter
from vlmserve.server.routes.chat import chat_completions
from vlmserve.server.routes.classes import classify
from vlmserve.server.routes.completions import completions
from vlmserve.server.routes.decisions import decisions
from vlmserve.server.routes.documents import preview_document
from vlmserve.server.routes.embeddings import embeddings, pooling
from vlmserve.server.routes.history import HISTORY_OPERATIONS
from vlmserve.server.routes.messages import count_tokens, messages
from vlmserve.server.routes.models import list_models, show_model
from vlmserve.server.routes.ollama import (
    ollama_chat,
    ollama_embed,
    ollama_embeddings,
    ollama_generate,
    ollama_ps,
    ollama_show,
    ollama_tags,
    ollama_version,
)
from vlmserve.server.routes.scores import rerank, rerank_for_cohere, score
from vlmserve.server.routes.tokens import detokenize, show_tokenizer, tokenize
from vlmserve.server.schema.cards import ModelCard, ModelList
from vlmserve.server.schema.chat import ChatCompletion, ChatRequest
from vlmserve.server.schema.classes import ClassificationList, ClassifyRequest
from vlmserve.server.schema.completions import Completion, CompletionRequest
from vlmserve.server.schema.decisions import Decision, DecisionRequest
from vlmserve.server.schema.documents import PREVIEW_FORM, DocumentPreview
from vlmserve.server.schema.embeddings import EmbeddingList, EmbeddingRequest, PoolingList, PoolingRequest
from vlmserve.server.schema.errors import MessagesErrorAnswer
from vlmserve.server.schema.messages import CountRequest, MessageAnswer, MessagesRequest, TokenCount
from vlmserve.server.schema.models import Health, LoadAdapterRequest, UnloadAdapterRequest
from vlmserve.server.schema.ollama import (
    LocalModels,
    OllamaAnswer,
    OllamaChatRequest,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaError,
    OllamaGenerateRequest,
    ShownModel,
    ShowRequest,
)
from vlmserve.server.schema.scores import CohereRanking, Ranking, RerankRequest, ScoreList, ScoreRequest
from vlmserve.server.schema.tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from vlmserve.server.service import Phase, Service
from vlmserve.server.streams import note_failure
from vlmserve.settings.config import ServerConfig


def operations(config: ServerConfig) -> list[Operation]:
    caches = Operation("GET", "/debug/cache", show_caches, answer=dict[str, Any])
    return [
        Operation("POST", "/v1/chat/completions", chat_completions, ChatRequest, answer=ChatCompletion, streams=True),
        Operation("POST", "/v1/completions", completions, CompletionRequest, answer=Completion, streams=True),
        Operation(
            "POST", "/v1/messages", messages, MessagesRequest, answer=MessageAnswer, streams=True,
            errors=MessagesErrorAnswer,
        ),
        Operation(
            "POST", "/v1/messages/count_tokens", count_tokens, CountRequest, answer=TokenCount,
            errors=MessagesErrorAnswer,
        ),
        Operation("POST", "/v1/embeddings", embeddings, EmbeddingRequest, answer=EmbeddingList),
        Operation("POST", "/v1/decisions", decisions, DecisionRequest, answer=Decision),
        Operation("POST", "/classify", classify, ClassifyRequest, answer=ClassificationList),
        Operation("POST", "/pooling", pooling, PoolingRequest, answer=PoolingList),
        Operation("POST", "/v1/score", score, ScoreRequest, answer=ScoreList),
        Operation("POST", "/v1/rerank", rerank, RerankRequest, answer=Ranking),
        Operation("POST", "/v2/rerank", rerank_for_cohere, RerankRequest, answer=CohereRanking),
        *HISTORY_OPERATIONS,
        Operation("POST", "/v1/documents/previews", preview_document, PREVIEW_FORM, answer=DocumentPreview),
        Operation("POST", "/tokenize", tokenize, TokenizeRequest, answer=Tokenized),
        Operation("POST", "/detokenize", detokenize, DetokenizeRequest, answer=Detokenized),
        Operation("GET", "/tokenizer_info", show_tokenizer, answer=dict[str, Any]),
        Operation("GET", "/v1/models", list_models, answer=ModelList),
        Operation("GET", "/v1/models/{name:path}", show_model, answer=ModelCard),
        Operation("POST", "/v1/load_lora_adapter", load_adapter, LoadAdapterRequest, answer="text/plain"),
        Operation("POST", "/v1/unload_lora_adapter", unload_adapter, UnloadAdapterRequest, answer="text/plain"),
        *_ollama_operations(),
        Operation("GET", "/health", health, answer=Health, errors=Health),
        Operation("GET", "/ping", ping, answer=Health, errors=Health),
        Operation("GET", "/ready", ready, answer=Health, errors=Health),
        Operation("GET", "/version", show_version, answer=dict[str, str]),
        Operation("GET", "/metrics", show_metrics, answer="text/plain"),
        Operation("GET", "/live", show_live, answer=LiveStats),
        *([caches] if config.enable_debug else []),
    ]  # fmt: skip


def _ollama_operations() -> list[Operation]:
    return [
        Operation(
            "POST", "/api/chat", ollama_chat, OllamaChatRequest, answer=OllamaAnswer, streams=True, errors=OllamaError
        ),
        Operation(
            "POST", "/api/generate", ollama_generate, OllamaGenerateRequest, answer=OllamaAnswer, streams=True,
            errors=OllamaError,
        ),
        Operation("POST", "/api/embed", ollama_embed, OllamaEmbedRequest, answer=OllamaEmbeddings, errors=OllamaError),
        Operation(
            "POST", "/api/embeddings", ollama_embeddings, OllamaEmbeddingsRequest, answer=OllamaEmbedding,
            errors=OllamaError,
        ),
        Operation("GET", "/api/tags", ollama_tags, answer=LocalModels, errors=OllamaError),
        Operation("GET", "/api/ps", ollama_ps, answer=LocalModels, errors=OllamaError),
        Operation("POST", "/api/show", ollama_show, ShowRequest, answer=ShownModel, errors=OllamaError),
        Operation("GET", "/api/version", ollama_version, answer=dict[str, str], errors=OllamaError),
    ]  # fmt: skip


def create_app(service: Service) -> Starlette:
    """Make the application of a service, which may still be loading."""
    app = assemble(service, routes(operations(service.config)))
    app.state.service = service
    app.state.live = LiveView(service)
    return app


def assemble(front: Front, served: Sequence[Route]) -> Starlette:
    config = front.config

    @functools.lru_cache(1)
    def described(max_logprobs: int | None) -> bytes:
        return msgspec.json.encode(document(version(), operations(config), max_logprobs))

    async def show_document(request: Request) -> Response:
        return Response(described(front.max_logprobs), media_type="application/json")

    pages = page_routes() if config.enable_page else []
    middleware = [Middleware(RequestLog, service=front), Middleware(Guard, service=front)]
    if config.cors_origins:
        # outermost: preflight requests have no key, and a page sees errors only with CORS headers
        cors = Middleware(
            CORSMiddleware,
            allow_origins=[origin for origin in config.cors_origins if origin == "*"],
            allow_origin_regex=origin_pattern(config.cors_origins) or None,
            allow_private_network=True,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after", RELAXED_HEADER, *RATE_LIMIT_HEADERS),
        )
        middleware.insert(0, cors)
    middleware.insert(0, Middleware(OnePath))
    app = Starlette(
        routes=[*served, Route("/openapi.json", show_document), *pages],
        middleware=middleware,
        exception_handlers={VLMServeError: count_and_handle_error, HTTPException: handle_http_exception},
    )
    app.router.redirect_slashes = False
    app.state.front = front
    return app


def version() -> str:
    """Return the installed version; "unknown" in a folder that was never installed."""
    try:
        return metadata.version("vlmserve")
    except metadata.PackageNotFoundError:
        return "unknown"


async def health(request: Request) -> Response:
    """Return 200 while the server should keep running, else 503 with the reason.

    200 also while the engine is restarted: killing the server would only take longer.
    """
    return _state(request, fine=("asleep", "serving", "restarting"))


async def ping(request: Request) -> Response:
    return await health(request)


async def ready(request: Request) -> Response:
    """Return 200 while requests are answered, else 503 with the reason."""
    service: Service = request.app.state.service
    silence = service.silence()
    if service.phase == "serving" and silence is not None:
        note(request, str(silence))
        return json_response(Health("unresponsive", str(silence)), 503, {"Retry-After": retry_after(silence)})
    return _state(request, fine=("asleep", "serving"))


def _state(request: Request, fine: Collection[Phase]) -> Response:
    service: Service = request.app.state.service
    phase, problem = service.phase, service.problem()
    if isinstance(problem, EngineDeadError):
        phase_shown, good = "dead", False
    else:
        phase_shown, good = "ok" if phase == "serving" else phase, problem is None or phase in fine
    reason = None if problem is None or phase == "asleep" else str(problem)
    state = Health(phase_shown, reason)
    if good or problem is None:
        return json_response(state)
    note(request, str(problem))
    return json_response(state, 503, {"Retry-After": retry_after(problem)})


async def show_version(request: Request) -> Response:
    """Return the version of vlmserve."""
    return json_response({"version": version()})


async def show_metrics(request: Request) -> Response:
    """Return metrics for Prometheus; engine metrics only while an engine runs."""
    service: Service = request.app.state.service
    await service.metrics.refresh()
    page, content_type = service.metrics.exposition(request.headers.get("accept", ""))
    return Response(page, headers={"Content-Type": content_type})


async def show_live(request: Request) -> Response:
    """Return the engine's work and recent answer times."""
    view: LiveView = request.app.state.live
    return json_response(await view.stats())


async def count_and_handle_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, VLMServeError)
    note_failure(request.scope, error)
    return await handle_vlmserve_error(request, error)
