"""``POST /v1/embeddings``: vectors of texts, or of a conversation with images."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.requests import embedded_text
from vlmserve.prompt.expand import last_tokens
from vlmserve.server.generation import Generation, GenerationRequest
from vlmserve.server.history import owner_of, with_files
from vlmserve.server.routes.answering import Dialect, answer
from vlmserve.server.schema.base import log_once
from vlmserve.server.schema.content import conversation
from vlmserve.server.schema.embeddings import (
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    EmbeddingUsage,
    PoolingData,
    PoolingList,
    PoolingRequest,
)
from vlmserve.server.service import Service
from vlmserve.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from vlmserve.frontend.requests import RequestPreparer

Vectors = TypeVar("Vectors", EmbeddingRequest, PoolingRequest)
_FEW_VALUES = 10_000
"""Numbers that are written faster than a thread starts."""
_FOREIGN_IDS = (
    "must come from this model's tokenizer, or the vectors mean nothing: LangChain's OpenAIEmbeddings needs "
    "check_embedding_ctx_length=False"
)


class _VectorDialect(Dialect[Vectors]):
    id_prefix = "embd-"
    operation = "embeddings"
    content_field = "input"

    def __init__(self, owner: str = "") -> None:
        self._owner = owner

    def num_answers(self, body: Vectors) -> int:
        return len(body.prompts) or 1

    async def ask(self, service: Service, body: Vectors) -> GenerationRequest:
        task = service.preparer.vectors.embed(body.dimensions, normalize=body.normalize, pooling=body.pooling)
        params = SamplingParams(truncate_prompt_tokens=body.truncate_prompt_tokens)
        prompts = await self._prompts(service, body)
        return GenerationRequest(prompts, params, cache_salt=body.cache_salt or "", task=task)

    async def _prompts(self, service: Service, body: Vectors) -> list[Prompt]:
        if body.messages is None:
            return await prompts_of(service, body.prompts, body.truncate_prompt_tokens)
        self.content_field = "messages"
        begins, continues = body.add_generation_prompt, body.continue_final_message
        begins = service.preparer.vectors.begins_answers if begins is None else begins
        with service.bodies.share() as share:
            messages = await with_files(service, self._owner, conversation(body.messages), share)
            prompt = await service.preparation.prepare(
                messages,
                cache_salt=body.cache_salt or "",
                add_generation_prompt=begins and not continues,
                continue_final_message=continues,
                template_settings=body.chat_template_kwargs,
                mm_processor_kwargs=body.processor_kwargs,
            )
        return [prompt]

    def reword(self, error: InvalidRequestError) -> None:
        if error.param in (None, "messages", "prompt"):
            error.param = self.content_field


class EmbeddingDialect(_VectorDialect[EmbeddingRequest]):
    """OpenAI's client requests base64 by default, and reads lists as well."""

    kind = EmbeddingRequest

    async def complete(self, body: EmbeddingRequest, generation: Generation) -> object:
        await generation.finished()
        vectors = generation.results()
        as_base64 = body.encoding_format == "base64" and all(one.ndim == 1 for one in vectors)
        data = [Embedding(index, one) for index, one in enumerate(await written(vectors, as_base64=as_base64))]
        return EmbeddingList(data, generation.model, usage_of(generation))


class PoolingDialect(_VectorDialect[PoolingRequest]):
    kind = PoolingRequest
    id_prefix = "pool-"

    async def complete(self, body: PoolingRequest, generation: Generation) -> PoolingList:
        await generation.finished()
        values = await written(generation.results(), as_base64=body.encoding_format == "base64")
        data = [PoolingData(index, one) for index, one in enumerate(values)]
        return PoolingList(generation.id, generation.created, generation.model, data, usage_of(generation))


async def written(vectors: Sequence[npt.NDArray[np.float32]], *, as_base64: bool = False) -> list[str]:
    """Write vectors as JSON values, many of them in a worker thread."""

    def write() -> list[str]:
        if as_base64:
            return [base64.b64encode(one.astype("<f4").tobytes()).decode() for one in vectors]
        # the event loop encodes the whole response
        return [cast("str", msgspec.Raw(msgspec.json.encode(one.tolist()))) for one in vectors]

    return write() if sum(one.size for one in vectors) <= _FEW_VALUES else await asyncio.to_thread(write)


async def prompts_of(service: Service, inputs: list[str | list[int]], kept: int | None) -> list[Prompt]:
    """Prepare texts and token ids. kept: see `ModelRequest.truncate_prompt_tokens`."""
    most = service.client.info.max_prompt_len
    if any(not isinstance(one, str) for one in inputs):
        log_once("Input", "token ids", _FOREIGN_IDS, logging.WARNING)

    def prepare(preparer: RequestPreparer) -> list[Prompt]:
        return [
            embedded_text(preparer, one) if isinstance(one, str) else preparer.tokens(last_tokens(one, kept, most))
            for one in inputs
        ]

    return await service.preparation.text(prepare, sum(map(len, inputs)))


def usage_of(generation: Generation) -> EmbeddingUsage:
    usage = generation.usage
    return EmbeddingUsage(usage.prompt_tokens, usage.prompt_tokens, usage.prompt_tokens_details)


async def pooling(request: Request) -> Response:
    """Return vectors of texts, token ids or a conversation, or of each of their tokens."""
    return await answer(request, PoolingDialect(owner_of(request)))


async def embeddings(request: Request) -> Response:
    """Return vectors of texts, token ids or a conversation."""
    return await answer(request, EmbeddingDialect(owner_of(request)))
