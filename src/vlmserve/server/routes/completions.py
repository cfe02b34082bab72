"""``POST /v1/completions``: prompts without a chat template."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from vlmserve.errors import VLMServeError
from vlmserve.server.errors import error_body
from vlmserve.server.generation import Generation, GenerationRequest, TextDelta
from vlmserve.server.routes.answering import Dialect, answer
from vlmserve.server.routes.events import DONE, event, usage_until_now
from vlmserve.server.schema.completions import Completion, CompletionChoice, CompletionRequest
from vlmserve.server.schema.logprobs import CompletionLogprobs, offsets_in
from vlmserve.server.service import Preparer, Service
from vlmserve.types import Prompt


class Echo(NamedTuple):
    """The prompt that an answer begins with."""

    text: str
    token_ids: list[int]


class CompletionDialect(Dialect[CompletionRequest]):
    """OpenAI's completions. One for each request: it keeps what answers begin with."""

    kind = CompletionRequest
    id_prefix = "cmpl-"
    operation = "text_completion"
    content_field = "prompt"

    def __init__(self) -> None:
        self._echoes: list[Echo] = []

    def num_answers(self, body: CompletionRequest) -> int:
        return body.num_running * len(body.prompts)

    async def ask(self, service: Service, body: CompletionRequest) -> GenerationRequest:
        params = body.sampling_params(service.defaults, body.max_tokens, service.default_limit)

        def prepare(preparer: Preparer) -> list[Prompt]:
            prompts = [
                preparer.text(prompt) if isinstance(prompt, str) else preparer.tokens(prompt) for prompt in body.prompts
            ]
            if body.echo:
                texts = [prompt if isinstance(prompt, str) else preparer.decode(prompt) for prompt in body.prompts]
                self._echoes = [
                    Echo(text, prompt.token_ids)
                    for text, prompt in zip(texts, prompts, strict=True)
                    for _ in range(body.n)
                ]
            return prompts

        prompts = await service.prepare_text(prepare, sum(map(len, body.prompts)))
        return GenerationRequest(
            prompts, params, body.n, body.cache_salt or "", body.beams, num_samples=body.num_samples
        )

    async def complete(self, body: CompletionRequest, generation: Generation) -> Completion:
        choices = [self._choice(body, generation, delta, begins=True) for delta in await generation.finished()]
        return Completion(generation.id, generation.created, generation.model, choices, generation.usage)

    async def events(self, body: CompletionRequest, generation: Generation) -> AsyncGenerator[bytes, None]:
        begun: set[int] = set()
        try:
            async with contextlib.aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    choices = [self._choice(body, generation, delta, begins=delta.index not in begun)]
                    begun.add(delta.index)
                    usage = usage_until_now(body.stream_options, generation)
                    yield event(Completion(generation.id, generation.created, generation.model, choices, usage))
            if body.includes_usage:
                yield event(Completion(generation.id, generation.created, generation.model, [], generation.usage))
            yield DONE
        except VLMServeError as error:
            generation.failure = error
            yield event(error_body(error))

    def _choice(
        self, body: CompletionRequest, generation: Generation, delta: TextDelta, *, begins: bool
    ) -> CompletionChoice:
        """A delta of an answer, with the prompt before the first one if `echo` is set."""
        echo = self._echoes[delta.index] if self._echoes else Echo("", [])
        logprobs = None
        if body.logprobs is not None:
            logprobs, token_bytes = CompletionLogprobs(), generation.token_bytes
            if begins and self._echoes:
                offsets = offsets_in(echo.text, map(token_bytes, echo.token_ids))
                prompt_logprobs = generation.prompt_logprobs(delta.index)
                for token_id, scores, offset in zip(echo.token_ids, prompt_logprobs, offsets, strict=True):
                    logprobs.add(token_id, scores, offset, token_bytes)
            for one in delta.logprobs:
                logprobs.add(one.logprobs.token_id, one.logprobs, len(echo.text) + one.offset, token_bytes)
        text = echo.text + delta.text if begins else delta.text
        return CompletionChoice(delta.index, text, delta.finish_reason, logprobs)


async def completions(request: Request) -> Response:
    """The route."""
    return await answer(request, CompletionDialect())
