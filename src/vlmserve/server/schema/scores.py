"""vLLM's ``/v1/score``, Jina's ``/v1/rerank`` and Cohere's ``/v2/rerank``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

import msgspec
from pydantic import BeforeValidator, Field, model_validator

from vlmserve.frontend.scoring import Side
from vlmserve.server.schema.asking import IGNORED_FIELDS, ModelRequest
from vlmserve.server.schema.base import MAX_COUNT, RequestModel
from vlmserve.server.schema.content import Part, PromptRequest
from vlmserve.server.schema.embeddings import EmbeddingUsage

MAX_DOCUMENTS = 1024


class ScoredContent(RequestModel):
    """A text, an image, or parts of a message."""

    text: str | None = None
    image: str | None = Field(None, description="An http(s) or data URL, or base64.")
    content: Annotated[list[Part], Field(min_length=1)] | None = Field(None, description="Parts, in vLLM's form.")

    @model_validator(mode="after")
    def _has_something(self) -> Self:
        if not (self.text or self.image or self.content):
            raise ValueError("Give text, image or content")
        return self

    @property
    def side(self) -> Side:
        if self.content is None and self.image is None:
            return self.text or ""
        parts: list[Mapping[str, Any]] = [part.model_dump(exclude_none=True) for part in self.content or ()]
        if self.image is not None:
            url = self.image if ":" in self.image else f"data:image;base64,{self.image}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        if self.text:
            parts.append({"type": "text", "text": self.text})
        return parts


Scored = Annotated[ScoredContent, BeforeValidator(lambda value: {"text": value} if isinstance(value, str) else value)]
"""Content to score; a string is a text."""
_Queries = Annotated[
    list[Scored],
    Field(min_length=1, max_length=MAX_DOCUMENTS),
    BeforeValidator(lambda value: value if isinstance(value, list) else [value]),
]


class _ScoringRequest(PromptRequest, ModelRequest):
    instruction: str | None = Field(None, min_length=1, description="The reranker's task. Default: web search.")


class ScoreRequest(_ScoringRequest):
    """The body of ``POST /v1/score``: one query, or one for each document."""

    content_fields: ClassVar[tuple[str, ...]] = ("queries", "documents")
    renamed_fields: ClassVar[Mapping[str, str]] = {
        "text_1": "queries",
        "data_1": "queries",
        "text_2": "documents",
        "data_2": "documents",
    }

    queries: _Queries
    documents: _Queries


class RerankRequest(_ScoringRequest):
    """The body of ``POST /v1/rerank`` and ``/v2/rerank``."""

    content_fields: ClassVar[tuple[str, ...]] = ("query", "documents")
    ignored_fields: ClassVar[frozenset[str]] = IGNORED_FIELDS | {"priority"}

    query: Scored
    documents: Annotated[list[Scored], Field(min_length=1, max_length=MAX_DOCUMENTS)]
    top_n: int | None = Field(None, ge=1, le=MAX_COUNT, description="Results to return, the best first. Default: all.")
    return_documents: bool = Field(True, description="Repeat the texts of documents in results; Jina's form only.")
    max_tokens_per_doc: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="Leading tokens of each text to read. Default: all."
    )

    @property
    def queries(self) -> list[ScoredContent]:
        return [self.query]


class ScoreData(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class ScoreList(msgspec.Struct):
    """The response of ``/v1/score``, in the order of the documents."""

    id: str
    created: int
    model: str
    data: list[ScoreData]
    usage: EmbeddingUsage
    object: str = "list"


class RankedDocument(msgspec.Struct):
    text: str


class Ranked(msgspec.Struct, omit_defaults=True):
    """One document. index: in the request."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class Ranking(msgspec.Struct):
    """The response of ``/v1/rerank``, the best document first."""

    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage


class CohereRanking(msgspec.Struct):
    """The response of ``/v2/rerank``, the best document first, with scores from 0 to 1."""

    id: str
    results: list[Ranked]
    meta: dict[str, Any]
