"""``POST /v1/completions``: continue prompts without a chat template."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from vlmserve.errors import VLMServeError
from vlmserve.prompt.expand import last_tokens, truncate
from vlmserve.server.errors import error_body
from vlmserve.server.generation import Generation, GenerationRequest, TextDelta
from vlmserve.server.routes.answering import Dialect, answer
from vlmserve.server.routes.events import DONE, event, usage_until_now
from vlmserve.server.schema.completions import Completion, CompletionChoice, CompletionRequest
from vlmserve.server.schema.logprobs import CompletionLogprobs, TokenNames, offsets_in, prompt_logprobs
from vlmserve.server.service import Service
from vlmserve.types import Prompt

if TYPE_CHECKING:
    from vlmserve.frontend.requests import RequestPreparer


class Echo(NamedTuple):
    text: str
    token_ids: list[int]


class CompletionDialect(Dialect[CompletionRequest]):
    """OpenAI's completions. Make one for each request: it keeps the prompts to repeat."""

    kind = CompletionRequest
    id_prefix = "cmpl-"
    operation = "text_completion"
    content_field = "prompt"

    def __init__(self) -> None:
        self._echoes: list[Echo] = []

    def num_answers(self, body: CompletionRequest) -> int:
        return body.num_running * len(body.prompts)

    async def ask(self, service: Service, body: CompletionRequest) -> GenerationRequest:
        generates = body.max_tokens != 0
        limit = body.max_tokens if generates else 1  # the engine computes at least one token
        params = body.sampling_params(service.defaults, limit, service.default_limit)
        kept, most = body.truncate_prompt_tokens, service.client.info.max_prompt_len

        def prepare(preparer: RequestPreparer) -> list[Prompt]:
            prompts = [
                preparer.text(prompt) if isinstance(prompt, str) else preparer.tokens(last_tokens(prompt, kept, most))
                for prompt in body.prompts
            ]
            whole = prompts
            prompts = [truncate(prompt, kept, most) for prompt in whole]
            if body.echo:
                texts = [
                    wanted if isinstance(wanted, str) and prompt is one else preparer.decode(prompt.token_ids)
                    for wanted, one, prompt in zip(body.prompts, whole, prompts, strict=True)
                ]
                self._echoes = [
                    Echo(text, prompt.token_ids)
                    for text, prompt in zip(texts, prompts, strict=True)
                    for _ in range(body.n)
                ]
            return prompts

        prompts = await service.preparation.text(prepare, sum(map(len, body.prompts)))
        return GenerationRequest(
            prompts,
            params,
            body.n,
            body.cache_salt or "",
            body.beams,
            num_samples=body.num_samples,
            generates=generates,
            every_token=body.return_token_ids,
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
        """Convert a delta of an answer. With `echo`, the first delta includes the prompt."""
        echo = self._echoes[delta.index] if self._echoes else Echo("", [])
        logprobs = None
        names = TokenNames(generation.token_bytes, body.return_tokens_as_token_ids)
        if body.logprobs is not None:
            logprobs = CompletionLogprobs()
            if begins and self._echoes:
                offsets = offsets_in(echo.text, map(generation.token_bytes, echo.token_ids))
                scored = generation.prompt_logprobs(delta.index)
                for token_id, scores, offset in zip(echo.token_ids, scored, offsets, strict=True):
                    logprobs.add(token_id, scores, offset, names)
            for one in delta.logprobs:
                logprobs.add(one.logprobs.token_id, one.logprobs, len(echo.text) + one.offset, names)
        text = echo.text + delta.text if begins else delta.text
        choice = CompletionChoice(delta.index, text, delta.finish_reason, logprobs)
        if begins and body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(generation.prompt_logprobs(delta.index), names)
        if body.return_token_ids:
            choice.token_ids = list(delta.token_ids)
            if begins:
                choice.prompt_token_ids = generation.request.prompts[delta.index // body.n].token_ids
        return choice


async def completions(request: Request) -> Response:
    """Continue a text or token ids without a chat template."""
    return await answer(request, CompletionDialect())
