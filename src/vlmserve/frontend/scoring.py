"""Scores of documents for a query: by a reranker's yes or no, or by the similarity of vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from vlmserve.errors import InvalidRequestError
from vlmserve.tasks import Embed, Score, Task

if TYPE_CHECKING:
    from vlmserve.frontend.requests import RequestPreparer

Side: TypeAlias = str | Sequence[Mapping[str, Any]]
"""A query or a document: text, or parts of a message."""

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The default of Qwen3-Reranker."""
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_ANSWERS = ("no", "yes")
_USUAL_CHARACTERS = 8
"""Characters of a token: how much of a text is tokenized at first to find its first tokens."""


class Scorer:
    """Says what to ask the engine about pairs, and what its results mean.

    An embedding model compares vectors: the score is their cosine. Any other model judges each pair in the prompt of
    Qwen3-Reranker and Qwen3-VL-Reranker: the score is the probability of "yes" among "yes" and "no".
    """

    def __init__(self, preparer: RequestPreparer) -> None:
        """Raises InvalidRequestError for a model that can do neither."""
        self._preparer = preparer
        self.compares = preparer.vectors.is_declared
        """True for an embedding model."""
        self.task: Task
        if self.compares:
            self.task = preparer.vectors.embed(normalize=True)
            return
        ids = [preparer.encode(word, add_special_tokens=False) for word in _ANSWERS]
        if not preparer.can_chat or any(len(one) != 1 for one in ids):
            raise InvalidRequestError(
                "this model cannot judge pairs: it needs a chat template, and yes and no as tokens; serve a reranker "
                "or an embedding model",
                param="model",
            )
        self.task = Score(tuple(one[0] for one in ids))

    @property
    def template_settings(self) -> dict[str, Any]:
        """Settings for the chat template of each conversation: a judgement has no reasoning."""
        known = "enable_thinking" in self._preparer.template_settings
        return {"enable_thinking": False} if known else {}

    def prompts(
        self, queries: Sequence[Side], documents: Sequence[Side], instruction: str | None = None
    ) -> list[str | list[dict[str, Any]]]:
        """Texts and conversations to ask about. One query stands for as many as there are documents.

        Raises InvalidRequestError unless there is one query, or one for each document.
        """
        if len(queries) not in (1, len(documents)):
            raise InvalidRequestError(
                f"give one query, or one for each document; got {len(queries)} for {len(documents)}", param="queries"
            )
        if self.compares:
            return [
                side if isinstance(side, str) else [{"role": "user", "content": list(side)}]
                for side in (*queries, *documents)
            ]
        whole = [*queries] * len(documents) if len(queries) == 1 else queries
        instruction = instruction or INSTRUCTION
        return [self._judgement(*pair, instruction) for pair in zip(whole, documents, strict=True)]

    def _judgement(self, query: Side, document: Side, instruction: str) -> list[dict[str, Any]]:
        content: str | list[Mapping[str, Any]]
        if self._preparer.media.supports_images:
            texts = [f"<Instruct>: {instruction}", "<Query>:", "\n<Document>:"]
            asked, of_query, of_document = [{"type": "text", "text": text} for text in texts]
            content = [asked, of_query, *_parts(query), of_document, *_parts(document)]
        else:
            content = f"<Instruct>: {instruction}\n<Query>: {_text(query)}\n<Document>: {_text(document)}"
        return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": content}]

    def scores(self, results: Sequence[bytes], num_queries: int) -> list[float]:
        """Return one score for each document. results: data of the `TaskResult` of each prompt."""
        if not results:
            return []
        values = np.array([np.frombuffer(one, "<f4") for one in results], np.float64)
        if isinstance(self.task, Embed):
            scores = (values[:num_queries] * values[num_queries:]).sum(1)
        else:
            scores = 1 / (1 + np.exp(values[:, 0] - values[:, 1]))
        listed: list[float] = scores.tolist()
        return listed


def first_tokens(preparer: RequestPreparer, text: str, count: int) -> str:
    """Return the text of the first `count` tokens, in a time that depends on `count`, not on the text."""
    size = count * _USUAL_CHARACTERS
    while True:
        token_ids = preparer.encode(text[:size], add_special_tokens=False)
        if len(token_ids) > count:
            return preparer.decode(token_ids[:count])
        if size >= len(text):
            return text
        size *= 2


def _parts(side: Side) -> list[Mapping[str, Any]]:
    return [{"type": "text", "text": side}] if isinstance(side, str) else list(side)


def _text(side: Side) -> str:
    if isinstance(side, str):
        return side
    if any(part.get("type") != "text" for part in side):
        raise InvalidRequestError("this model takes no images; send text only", param="documents")
    return "".join(str(part["text"]) for part in side)
