"""Ollama's API, on top of chat completions."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import time
from collections.abc import AsyncGenerator, Iterable
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vlmserve.errors import VLMServeError
from vlmserve.frontend.scoring import first_tokens
from vlmserve.frontend.tool_parser import ContentDelta, Event, ThoughtDelta, ToolCallDelta, ToolCallStart
from vlmserve.server.body import BodyShare
from vlmserve.server.errors import json_response
from vlmserve.server.generation import Generation, GenerationRequest
from vlmserve.server.history import owner_of
from vlmserve.server.routes.answering import answer
from vlmserve.server.routes.chat import ChatDialect
from vlmserve.server.routes.embeddings import EmbeddingDialect, written
from vlmserve.server.routes.reading import read, read_parsed
from vlmserve.server.schema.cards import Abilities, model_card
from vlmserve.server.schema.chat import ChatRequest
from vlmserve.server.schema.embeddings import EmbeddingRequest
from vlmserve.server.schema.ollama import (
    LATEST,
    AnsweredCall,
    AnsweredFunction,
    AnsweredMessage,
    LocalModel,
    LocalModels,
    ModelDetails,
    OllamaAnswer,
    OllamaChatRequest,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    ShownModel,
    ShowRequest,
)
from vlmserve.server.service import Service
from vlmserve.server.streams import LINES

if TYPE_CHECKING:
    from vlmserve.frontend.requests import RequestPreparer

API_VERSION = "0.13.0"
"""The version of Ollama that the API matches; clients compare it."""


class OllamaDialect(ChatDialect):
    media_type = LINES

    def __init__(self, owner: str, body_kind: type[OllamaChatRequest] | type[OllamaGenerateRequest]) -> None:
        super().__init__(owner)
        self._body_kind = body_kind
        self._is_chat = body_kind is OllamaChatRequest
        self._began = time.monotonic_ns()
        self._model = ""
        self._only_loads = False

    async def read(self, request: Request, share: BodyShare) -> ChatRequest:
        body = await read_parsed(request, self._body_kind, share)
        self._model, self._only_loads = body.model, body.is_empty
        return body.as_chat()

    def ready(self) -> object | None:
        if not self._only_loads:
            return None
        line = self._line([])
        line.done, line.done_reason = True, "load"
        return line

    async def complete(self, body: ChatRequest, generation: Generation) -> object:
        [said] = await generation.finished()
        reason = said.finish_reason or ""
        return self._answer(self._reader.read(said), generation, done_reason=reason)

    async def events(self, body: ChatRequest, generation: Generation) -> AsyncGenerator[bytes, None]:
        try:
            calls: list[Event] = []  # Ollama's streams have only complete calls
            async with contextlib.aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    news = self._reader.read(delta)
                    calls += [new for new in news if isinstance(new, ToolCallStart | ToolCallDelta)]
                    shown = [new for new in news if isinstance(new, ContentDelta | ThoughtDelta)]
                    if shown:
                        yield _encoded(self._answer(shown, generation))
                    if delta.finish_reason is not None:
                        if calls:
                            yield _encoded(self._answer(calls, generation))
                        yield _encoded(self._answer([], generation, done_reason=delta.finish_reason))
        except VLMServeError as error:
            generation.failure = error
            yield _encoded({"error": str(error)})

    def _answer(self, events: Iterable[Event], generation: Generation, done_reason: str | None = None) -> OllamaAnswer:
        """Make a response or a line of a stream. done_reason: why the answer ended; None before that."""
        line = self._line(events)
        if done_reason is not None:
            line.done = True
            self._add_end(line, generation, done_reason)
        return line

    def _line(self, events: Iterable[Event]) -> OllamaAnswer:
        text, thoughts, calls = "", "", []
        for new in events:
            match new:
                case ThoughtDelta(thought):
                    thoughts += thought
                case ContentDelta(said):
                    text += said
                case ToolCallStart(_, _, name):
                    calls.append((name, ""))
                case ToolCallDelta(_, arguments):
                    calls[-1] = (calls[-1][0], calls[-1][1] + arguments)
        line = OllamaAnswer(self._model, _now(), done=False)
        if self._is_chat:
            line.message = AnsweredMessage("assistant", text, thoughts)
            if whole := [call for name, arguments in calls if (call := _whole_call(name, arguments)) is not None]:
                line.message.tool_calls = whole
        else:
            line.response = text
            line.thinking = thoughts or msgspec.UNSET
        return line

    def _add_end(self, line: OllamaAnswer, generation: Generation, done_reason: str) -> None:
        usage, timings = generation.usage, generation.answers[0].timings
        line.done_reason = done_reason
        line.total_duration, line.load_duration = time.monotonic_ns() - self._began, 0
        line.prompt_eval_count, line.eval_count = usage.prompt_tokens, usage.completion_tokens
        line.prompt_eval_duration = _nanoseconds(0.0 if timings is None else timings.prefill)
        line.eval_duration = _nanoseconds((timings.decode or 0.0) if timings is not None else 0.0)


class OllamaEmbedDialect(EmbeddingDialect):
    def __init__(self, owner: str, body_kind: type[OllamaEmbedRequest] | type[OllamaEmbeddingsRequest]) -> None:
        super().__init__(owner)
        self._body_kind = body_kind
        self._began = time.monotonic_ns()
        self._model = ""
        self._truncates = True

    async def read(self, request: Request, share: BodyShare) -> EmbeddingRequest:
        body = await read_parsed(request, self._body_kind, share)
        self._model, self._truncates = body.model, body.truncate
        return body.as_embedding()

    async def ask(self, service: Service, body: EmbeddingRequest) -> GenerationRequest:
        most = service.client.info.max_prompt_len

        def cut(preparer: RequestPreparer) -> list[str]:
            room = max(1, most - len(preparer.encode("")))
            return [first_tokens(preparer, one, room) for one in body.prompts if isinstance(one, str)]

        if self._truncates:
            texts = await service.preparation.text(cut, sum(map(len, body.prompts)))
            body = body.model_copy(update={"input": texts})
        return await super().ask(service, body)

    async def complete(self, body: EmbeddingRequest, generation: Generation) -> object:
        await generation.finished()
        vectors = await written(generation.results())
        if self._body_kind is OllamaEmbeddingsRequest:
            return OllamaEmbedding(vectors[0])
        duration = time.monotonic_ns() - self._began
        return OllamaEmbeddings(self._model, vectors, duration, 0, generation.usage.prompt_tokens)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _now() -> str:
    when = datetime.datetime.now(datetime.UTC)
    return when.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _whole_call(name: str, arguments: str) -> AnsweredCall | None:
    """None for a call that was cut off."""
    try:
        return AnsweredCall(AnsweredFunction(name, msgspec.json.decode(arguments or "{}", type=dict[str, Any])))
    except msgspec.DecodeError:
        return None


def _encoded(value: object) -> bytes:
    return msgspec.json.encode(value) + b"\n"


async def ollama_chat(request: Request) -> Response:
    """Answer a conversation in the form of Ollama's API."""
    return await answer(request, OllamaDialect(owner_of(request), OllamaChatRequest))


async def ollama_generate(request: Request) -> Response:
    """Answer a prompt in the form of Ollama's API."""
    return await answer(request, OllamaDialect(owner_of(request), OllamaGenerateRequest))


async def ollama_embed(request: Request) -> Response:
    """Return vectors of texts in the form of Ollama's API."""
    return await answer(request, OllamaEmbedDialect(owner_of(request), OllamaEmbedRequest))


async def ollama_embeddings(request: Request) -> Response:
    """Return the vector of a text in the older form of Ollama's API."""
    return await answer(request, OllamaEmbedDialect(owner_of(request), OllamaEmbeddingsRequest))


async def ollama_tags(request: Request) -> Response:
    """List the model and its adapters in the form of Ollama's API."""
    service: Service = request.app.state.service
    names = [*service.names.own, *(name for name, _ in service.names.adapter_infos())]
    return json_response(LocalModels([_local(service, name) for name in names]))


async def ollama_ps(request: Request) -> Response:
    """List the loaded model in the form of Ollama's API."""
    service: Service = request.app.state.service
    names = [service.model_name] if service.awake else []
    return json_response(LocalModels([_local(service, name) for name in names]))


async def ollama_show(request: Request) -> Response:
    """Describe a model in the form of Ollama's API."""
    service: Service = request.app.state.service
    async with read(request, ShowRequest) as body:
        service.names.check(body.wanted)
        local = _local(service, body.wanted)
        abilities = service.abilities
        info: dict[str, Any] = {"general.architecture": "vlmserve"}
        if abilities is not None:
            info["vlmserve.context_length"] = abilities.max_model_len
        return json_response(ShownModel(local.details, info, local.capabilities, local.modified_at))


async def ollama_version(request: Request) -> Response:
    """Return the version of Ollama's API that these paths follow."""
    return json_response({"version": API_VERSION})


def _local(service: Service, name: str) -> LocalModel:
    return local_model(name, service.created, service.abilities)


def local_model(name: str, created: int, abilities: Abilities | None) -> LocalModel:
    """Make an entry of ``/api/tags``. abilities: None while the model is not loaded.

    An adapter's entry has the size of its model.
    """
    card = model_card(name, created, abilities)
    listed = card.capabilities if isinstance(card.capabilities, list) else ["completion"]
    digest = hashlib.sha256(name.encode()).hexdigest()
    tagged = name if ":" in name else f"{name}{LATEST}"
    size, details = 0, ModelDetails()
    if abilities is not None:
        size, details = abilities.weight_bytes, ModelDetails(parameter_size=_count(abilities.num_parameters))
    return LocalModel(tagged, tagged, card.created_at, size, digest, details, listed)


def _count(parameters: int) -> str:
    """A number of parameters in Ollama's form, such as ``4.3B``, ``135M`` or ``6.29M``; empty if it is 0."""
    for unit, letter, digits in ((10**9, "B", 1), (10**6, "M", 2)):
        if parameters >= unit:
            return f"{parameters / unit:.{digits if parameters % unit else 0}f}{letter}"
    return f"{parameters / 1000:.0f}K" if parameters else ""
