"""``POST /v1/chat/completions``: one answer, or a stream of events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vlmserve.errors import InvalidRequestError, VLMServeError
from vlmserve.server.errors import error_body
from vlmserve.server.generation import Generation, Piece, Question
from vlmserve.server.history import owner_of, with_files
from vlmserve.server.routes.answering import Dialect, answer
from vlmserve.server.routes.events import DONE, event
from vlmserve.server.schema.chat import (
    AnswerChoice,
    AnswerMessage,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    ChunkChoice,
    Delta,
)
from vlmserve.server.schema.content import conversation
from vlmserve.server.schema.logprobs import ChoiceLogprobs, choice_logprobs
from vlmserve.server.schema.usage import Usage
from vlmserve.server.service import Service


class ChatDialect(Dialect[ChatRequest]):
    """OpenAI's chat completions."""

    kind = ChatRequest
    id_prefix = "chatcmpl-"

    def __init__(self, owner: str = "") -> None:
        self._owner = owner

    def num_answers(self, body: ChatRequest) -> int:
        return body.num_running

    async def ask(self, service: Service, body: ChatRequest) -> Question:
        if (body.top_logprobs or 0) > service.max_logprobs:
            raise InvalidRequestError(f"top_logprobs must be at most {service.max_logprobs} here", param="top_logprobs")
        params = body.sampling_params(service.defaults, body.token_limit, service.default_limit)
        cache_salt = body.cache_salt or ""
        with service.bodies.share() as share:
            messages = await with_files(service, self._owner, conversation(body.messages), share)
            prompt = await service.prepare(messages, cache_salt)
        return Question([prompt], params, body.n, cache_salt, body.beams)

    async def complete(self, body: ChatRequest, generation: Generation) -> ChatCompletion:
        choices = [
            AnswerChoice(
                answer.index,
                AnswerMessage(answer.text),
                answer.finish_reason or "",
                _logprobs(body, answer, generation),
            )
            for answer in await generation.finished()
        ]
        return ChatCompletion(generation.id, generation.created, generation.model, choices, generation.usage)

    async def events(self, body: ChatRequest, generation: Generation) -> AsyncGenerator[bytes, None]:
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        null_usage = None if include_usage else msgspec.UNSET

        def chunk(choices: list[ChunkChoice], usage: Usage | msgspec.UnsetType | None = null_usage) -> bytes:
            return event(ChatChunk(generation.id, generation.created, generation.model, choices, usage))

        try:
            yield b"".join(chunk([ChunkChoice(answer.index, Delta("assistant", ""))]) for answer in generation.answers)
            async with contextlib.aclosing(generation.pieces()) as pieces:
                async for piece in pieces:
                    events = b""
                    if piece.text or piece.told:
                        logprobs = _logprobs(body, piece, generation)
                        events += chunk([ChunkChoice(piece.index, Delta(content=piece.text), logprobs=logprobs)])
                    if piece.finish_reason is not None:
                        events += chunk([ChunkChoice(piece.index, Delta(), piece.finish_reason)])
                    yield events
            if include_usage:
                yield chunk([], generation.usage)
            yield DONE
        except VLMServeError as error:
            generation.failure = error
            yield event(error_body(error))


def _logprobs(body: ChatRequest, piece: Piece, generation: Generation) -> ChoiceLogprobs | None:
    if not body.logprobs:
        return None
    return choice_logprobs((told.logprobs for told in piece.told), generation.token_bytes)


async def chat_completions(request: Request) -> Response:
    """The route."""
    return await answer(request, ChatDialect(owner_of(request)))
