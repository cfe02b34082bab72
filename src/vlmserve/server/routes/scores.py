"""``POST /v1/score``, ``/v1/rerank`` and ``/v2/rerank``: relevance of documents to a query."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.scoring import Asked, Scorer, Side, first_tokens, make_scorer, shortened
from vlmserve.server.connection import cancel
from vlmserve.server.generation import Generation, GenerationRequest
from vlmserve.server.history import owner_of, with_files
from vlmserve.server.routes.answering import Dialect, answer
from vlmserve.server.routes.embeddings import prompts_of, usage_of
from vlmserve.server.schema.scores import (
    CohereRanking,
    Ranked,
    RankedDocument,
    Ranking,
    RerankRequest,
    ScoreData,
    ScoreList,
    ScoreRequest,
)
from vlmserve.server.service import Service
from vlmserve.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from vlmserve.frontend.requests import RequestPreparer

_FEW_VALUES = 100_000
"""Vector elements that are compared faster than a thread starts."""
Scoring = TypeVar("Scoring", ScoreRequest, RerankRequest)


class _ScoringDialect(Dialect[Scoring]):
    operation = "rerank"
    content_field = "documents"

    def __init__(self, owner: str = "") -> None:
        self._owner = owner
        self._scorer: Scorer | None = None
        self._num_queries = 0
        self._texts: list[str | None] = []

    def num_answers(self, body: Scoring) -> int:
        return len(body.queries) + len(body.documents)

    def documents(self, preparer: RequestPreparer, body: Scoring) -> list[Side]:
        return [one.side for one in body.documents]

    async def ask(self, service: Service, body: Scoring) -> GenerationRequest:
        scorer = self._scorer = make_scorer(service.preparer)
        self._num_queries = len(body.queries)
        self._texts = [one.text for one in body.documents]
        size = sum(len(text) for text in self._texts if text is not None)
        queries, kept = [one.side for one in body.queries], body.truncate_prompt_tokens

        def ask(preparer: RequestPreparer) -> list[Asked]:
            documents: Sequence[Side] = self.documents(preparer, body)
            documents = shortened(scorer, preparer, queries, documents, body.instruction, kept)
            return scorer.prompts(queries, documents, body.instruction)

        asked = await service.preparation.text(ask, size)
        tasks = [asyncio.ensure_future(self._prompt(service, body, scorer, one)) for one in asked]
        try:
            prompts = await asyncio.gather(*tasks)
        finally:
            await cancel(*tasks)
        params = SamplingParams(truncate_prompt_tokens=kept if scorer.compares else None)
        return GenerationRequest(prompts, params, cache_salt=body.cache_salt or "", task=scorer.task)

    async def _prompt(self, service: Service, body: Scoring, scorer: Scorer, asked: Asked) -> Prompt:
        if isinstance(asked, Prompt):
            return asked
        if isinstance(asked, str):
            [prompt] = await prompts_of(service, [asked], body.truncate_prompt_tokens)
            return prompt
        with service.bodies.share() as share:
            return await service.preparation.prepare(
                await with_files(service, self._owner, asked, share),
                cache_salt=body.cache_salt or "",
                mm_processor_kwargs=body.processor_kwargs,
                **scorer.chat_options,
            )

    async def scores(self, generation: Generation, *, bounded: bool = False) -> list[float]:
        """Return one score for each document. bounded: from 0 to 1."""
        scorer = self._scorer
        assert scorer is not None
        await generation.finished()
        results = generation.results()
        if sum(one.size for one in results) <= _FEW_VALUES:
            return scorer.scores(results, self._num_queries, bounded=bounded)
        return await asyncio.to_thread(scorer.scores, results, self._num_queries, bounded=bounded)

    def reword(self, error: InvalidRequestError) -> None:
        if error.param is None or error.param.startswith(("messages", "prompt")):
            error.param = self.content_field


class ScoreDialect(_ScoringDialect[ScoreRequest]):
    kind = ScoreRequest
    id_prefix = "score-"

    async def complete(self, body: ScoreRequest, generation: Generation) -> ScoreList:
        data = [ScoreData(index, score) for index, score in enumerate(await self.scores(generation))]
        return ScoreList(generation.id, generation.created, generation.model, data, usage_of(generation))


class RerankDialect(_ScoringDialect[RerankRequest]):
    kind = RerankRequest
    id_prefix = "rerank-"

    def documents(self, preparer: RequestPreparer, body: RerankRequest) -> list[Side]:
        most = body.max_tokens_per_doc
        sides = super().documents(preparer, body)
        if most is None:
            return sides
        return [first_tokens(preparer, side, most) if isinstance(side, str) else side for side in sides]

    async def complete(self, body: RerankRequest, generation: Generation) -> Ranking | CohereRanking:
        ranked = await self._ranked(body, generation)
        if body.return_documents:
            for one in ranked:
                text = self._texts[one.index]
                one.document = None if text is None else RankedDocument(text)
        return Ranking(generation.id, generation.model, ranked, usage_of(generation))

    async def _ranked(self, body: RerankRequest, generation: Generation, *, bounded: bool = False) -> list[Ranked]:
        scores = await self.scores(generation, bounded=bounded)
        ranked = [Ranked(index, score) for index, score in enumerate(scores)]
        return sorted(ranked, key=lambda one: one.relevance_score, reverse=True)[: body.top_n]


class CohereDialect(RerankDialect):
    async def complete(self, body: RerankRequest, generation: Generation) -> CohereRanking:
        ranked = await self._ranked(body, generation, bounded=True)
        meta = {"api_version": {"version": "2"}, "tokens": {"input_tokens": usage_of(generation).prompt_tokens}}
        return CohereRanking(generation.id, ranked, meta)


async def score(request: Request) -> Response:
    """Return the score of each document for a query."""
    return await answer(request, ScoreDialect(owner_of(request)))


async def rerank(request: Request) -> Response:
    """Return the documents that fit a query, the best first."""
    return await answer(request, RerankDialect(owner_of(request)))


async def rerank_for_cohere(request: Request) -> Response:
    """Return the same in the form of Cohere's second API."""
    return await answer(request, CohereDialect(owner_of(request)))
