"""``POST /v1/completions``: prompts without a chat template."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vlmserve.errors import VLMServeError
from vlmserve.server.errors import error_body
from vlmserve.server.generation import Generation, Question
from vlmserve.server.routes.answering import Dialect, answer
from vlmserve.server.routes.events import DONE, event
from vlmserve.server.schema.completions import Completion, CompletionChoice, CompletionRequest
from vlmserve.server.service import Preparer, Service
from vlmserve.types import Prompt


class CompletionDialect(Dialect[CompletionRequest]):
    """OpenAI's completions. One for each request: it keeps what answers begin with."""

    kind = CompletionRequest
    id_prefix = "cmpl-"
    content_field = "prompt"

    def __init__(self) -> None:
        self._beginnings: list[str] = []

    def num_answers(self, body: CompletionRequest) -> int:
        return body.n * len(body.prompts)

    async def ask(self, service: Service, body: CompletionRequest) -> Question:
        params = body.sampling_params(service.defaults, body.max_tokens, service.default_limit)

        def prepare(preparer: Preparer) -> list[Prompt]:
            prompts = [
                preparer.text(prompt) if isinstance(prompt, str) else preparer.tokens(prompt) for prompt in body.prompts
            ]
            if body.echo:
                self._beginnings = [
                    prompt if isinstance(prompt, str) else preparer.decode(prompt)
                    for prompt in body.prompts
                    for _ in range(body.n)
                ]
            return prompts

        return Question(
            await service.prepare_text(prepare, sum(map(len, body.prompts))), params, body.n, body.cache_salt or ""
        )

    async def complete(self, body: CompletionRequest, generation: Generation) -> Completion:
        choices = [
            CompletionChoice(answer.index, self._beginning(answer.index) + answer.text, answer.finish_reason)
            for answer in await generation.finished()
        ]
        return Completion(generation.id, generation.created, generation.model, choices, generation.usage)

    async def events(self, body: CompletionRequest, generation: Generation) -> AsyncGenerator[bytes, None]:
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        usage = None if include_usage else msgspec.UNSET

        def chunk(index: int, text: str, finish_reason: str | None = None) -> bytes:
            choices = [CompletionChoice(index, text, finish_reason)]
            return event(Completion(generation.id, generation.created, generation.model, choices, usage))

        try:
            if self._beginnings:
                yield b"".join(chunk(index, text) for index, text in enumerate(self._beginnings))
            async with contextlib.aclosing(generation.pieces()) as pieces:
                async for piece in pieces:
                    yield chunk(piece.index, piece.text, piece.finish_reason)
            if include_usage:
                yield event(Completion(generation.id, generation.created, generation.model, [], generation.usage))
            yield DONE
        except VLMServeError as error:
            generation.failure = error
            yield event(error_body(error))

    def _beginning(self, index: int) -> str:
        return self._beginnings[index] if self._beginnings else ""


async def completions(request: Request) -> Response:
    """The route."""
    return await answer(request, CompletionDialect())
