"""Scores documents for a query by a reranker's yes or no, or by vector similarity."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from vlmserve.errors import InvalidRequestError
from vlmserve.families.retrievers import Retriever
from vlmserve.frontend.conversations import thinking_settings
from vlmserve.prompt.untrusted import Quotation
from vlmserve.tasks import Embed, Score, Task
from vlmserve.types import Prompt

if TYPE_CHECKING:
    from vlmserve.frontend.requests import RequestPreparer

Side: TypeAlias = str | Sequence[Mapping[str, Any]]
"""A query or a document: text, or parts of a message."""
Asked: TypeAlias = str | Prompt | list[dict[str, Any]]
Result: TypeAlias = npt.NDArray[np.float32]
"""The values of a `TaskResult`, in the shape of its task."""
Item = TypeVar("Item")

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Qwen3-Reranker's default."""
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_ANSWERS = ("no", "yes")
_MOST_CLASSES = 2
_USUAL_CHARACTERS = 8
"""Characters per token, a first guess when cutting a text to its first tokens."""


class Scorer(ABC):
    task: Task
    compares = False
    """Queries and documents have separate prompts."""

    @property
    def chat_options(self) -> Mapping[str, Any]:
        return {}

    def prompts(
        self, queries: Sequence[Side], documents: Sequence[Side], instruction: str | None = None
    ) -> list[Asked]:
        """A single query serves all documents.

        Raises InvalidRequestError unless there is one query, or one for each document.
        """
        if len(queries) not in (1, len(documents)):
            raise InvalidRequestError(
                f"give one query, or one for each document; got {len(queries)} for {len(documents)}", param="queries"
            )
        return self._asked(queries, documents, instruction)

    @abstractmethod
    def _asked(self, queries: Sequence[Side], documents: Sequence[Side], instruction: str | None) -> list[Asked]: ...

    def scores(self, results: Iterable[Result], num_queries: int, *, bounded: bool = False) -> list[float]:
        """Return one score for each document.

        results: one for each prompt, consumed one by one. bounded: scale scores to [0, 1].
        """
        take = self.tally(num_queries, bounded=bounded)
        return [score for one in results for score in take(one)]

    @abstractmethod
    def tally(self, num_queries: int, *, bounded: bool = False) -> Callable[[Result], list[float]]:
        """Return a function from each result, in order, to a document's scores; empty for a query."""


class VectorScorer(Scorer):
    task: Embed
    compares = True

    def __init__(self, preparer: RequestPreparer) -> None:
        self._preparer = preparer
        self.task = preparer.vectors.embed(normalize=True)

    @property
    def chat_options(self) -> Mapping[str, Any]:
        return self._preparer.vectors.message_options or {}

    def _asked(self, queries: Sequence[Side], documents: Sequence[Side], instruction: str | None) -> list[Asked]:
        return [*map(self._query, queries), *map(_vector_of, documents)]

    def _query(self, query: Side) -> Asked:
        return _vector_of(query)

    def tally(self, num_queries: int, *, bounded: bool = False) -> Callable[[Result], list[float]]:
        queries: list[Result] = []
        numbers = count()

        def take(result: Result) -> list[float]:
            if len(queries) < num_queries:
                queries.append(result)
                return []
            query = queries[next(numbers) % num_queries]
            score = self._similarity(query, result)
            return [min(1.0, max(0.0, score / self._most(query))) if bounded else score]

        return take

    def _similarity(self, query: Result, document: Result) -> float:
        return float(query.astype(np.float64) @ document.astype(np.float64))

    def _most(self, query: Result) -> int:
        return 1


class LateScorer(VectorScorer):
    """Late interaction (https://arxiv.org/abs/2004.12832) compares token vectors.

    The score sums each query vector's highest cosine with a vector of the document.
    """

    def _query(self, query: Side) -> Asked:
        retriever = self._preparer.vectors.retriever
        if retriever is None or not isinstance(query, str):
            return super()._query(query)
        return self._written(retriever, query)

    def _written(self, retriever: Retriever, query: str) -> Prompt:
        tokenizer = self._preparer.tokenizer
        quotation = Quotation(tokenizer.control_tokens)
        text = retriever.written_query(quotation.quote(query), tokenizer.special_tokens)
        return self._preparer.tokens(tokenizer.encode_quoted(text, quotation))

    def _similarity(self, query: Result, document: Result) -> float:
        return float((query @ document.T).max(1).sum(dtype=np.float64))

    def _most(self, query: Result) -> int:
        return len(query)


class JudgeScorer(Scorer):
    """A chat model judges each pair in the prompt of Qwen3-Reranker and Qwen3-VL-Reranker.

    The score is the probability of "yes" among "yes" and "no".
    """

    def __init__(self, preparer: RequestPreparer) -> None:
        self._preparer = preparer
        ids = [preparer.encode(word, add_special_tokens=False) for word in _ANSWERS]
        if not preparer.can_chat or any(len(one) != 1 for one in ids):
            raise InvalidRequestError(
                "this model cannot judge pairs: it needs a chat template, and yes and no as tokens; serve a reranker "
                "or an embedding model",
                param="model",
            )
        self.task = Score(tuple(map(tuple, ids)))

    @property
    def chat_options(self) -> Mapping[str, Any]:
        """Judgements have no reasoning."""
        return {"template_settings": thinking_settings(False, self._preparer.template_settings)}

    def _asked(self, queries: Sequence[Side], documents: Sequence[Side], instruction: str | None) -> list[Asked]:
        instruction = instruction or INSTRUCTION
        pairs = zip(_repeated(queries, documents), documents, strict=True)
        return [self._judgement(*pair, instruction) for pair in pairs]

    def _judgement(self, query: Side, document: Side, instruction: str) -> list[dict[str, Any]]:
        content: str | list[Mapping[str, Any]]
        if self._preparer.media.supports_images:
            texts = [f"<Instruct>: {instruction}", "<Query>:", "\n<Document>:"]
            asked, of_query, of_document = [{"type": "text", "text": text} for text in texts]
            content = [asked, of_query, *_parts(query), of_document, *_parts(document)]
        else:
            content = f"<Instruct>: {instruction}\n<Query>: {_text(query)}\n<Document>: {_text(document)}"
        return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": content}]

    def tally(self, num_queries: int, *, bounded: bool = False) -> Callable[[Result], list[float]]:
        return lambda result: [float(1 / (1 + np.exp(np.float64(result[0]) - np.float64(result[1]))))]


class ClassScorer(Scorer):
    """A classifier reads the query and the document as a pair.

    The score is its value with one class, the second class's probability with two.
    """

    def __init__(self, preparer: RequestPreparer) -> None:
        self._preparer, self._classes = preparer, preparer.vectors.classify()
        self.task = self._classes.task
        if (count := len(self._classes.labels)) > _MOST_CLASSES:
            raise InvalidRequestError(
                f"this model has {count} classes; scores need one or two: use /classify", param="model"
            )

    def _asked(self, queries: Sequence[Side], documents: Sequence[Side], instruction: str | None) -> list[Asked]:
        return [self._pair(*pair) for pair in zip(_repeated(queries, documents), documents, strict=True)]

    def _pair(self, query: Side, document: Side) -> Prompt:
        return self._preparer.tokens(self._preparer.encode(_text(query), _text(document)))

    def tally(self, num_queries: int, *, bounded: bool = False) -> Callable[[Result], list[float]]:
        def take(result: Result) -> list[float]:
            score = float(self._classes.probabilities(result)[-1])
            return [float(1 / (1 + np.exp(-score))) if bounded and self._classes.activation == "identity" else score]

        return take


def make_scorer(preparer: RequestPreparer) -> Scorer:
    """Choose a model's scorer. Raises InvalidRequestError for a model that cannot score."""
    if preparer.vectors.classes is not None:
        return ClassScorer(preparer)
    if not preparer.vectors.is_declared:
        return JudgeScorer(preparer)
    return LateScorer(preparer) if preparer.vectors.task.pooling == "all" else VectorScorer(preparer)


def shortened(
    scorer: Scorer,
    preparer: RequestPreparer,
    queries: Sequence[Side],
    documents: Sequence[Side],
    instruction: str | None,
    most: int | None,
) -> Sequence[Side]:
    """Cut text documents so that pairs have about `most` tokens; None: keep all, -1: the model's maximum.

    Raises InvalidRequestError if a query leaves no room or contains images.
    """
    if most is None or scorer.compares:
        return documents
    most = (preparer.max_prompt_len or 0) if most == -1 else most
    rooms: dict[str, int] = {}
    cut: list[Side] = []
    for query, document in zip(_repeated(queries, documents), documents, strict=True):
        if not isinstance(document, str):
            cut.append(document)
            continue
        text = _text(query)
        if text not in rooms:
            [asked] = scorer.prompts([text], [""], instruction)
            empty = asked if isinstance(asked, Prompt) else preparer.chat(asked, **scorer.chat_options)
            rooms[text] = most - len(empty.token_ids)
        if rooms[text] < 1:
            raise InvalidRequestError(
                f"truncate_prompt_tokens: {most} tokens leave none for documents; raise it",
                param="truncate_prompt_tokens",
            )
        cut.append(first_tokens(preparer, document, rooms[text]))
    return cut


def first_tokens(preparer: RequestPreparer, text: str, count: int) -> str:
    """The time depends on `count`, not on the text's length."""
    size = count * _USUAL_CHARACTERS
    while True:
        token_ids = preparer.encode(text[:size], add_special_tokens=False)
        if len(token_ids) > count:
            return preparer.decode(token_ids[:count])
        if size >= len(text):
            return text
        size *= 2


def _repeated(queries: Sequence[Item], documents: Sequence[Any]) -> Sequence[Item]:
    return [*queries] * len(documents) if len(queries) == 1 else queries


def _vector_of(side: Side) -> Asked:
    return side if isinstance(side, str) else [{"role": "user", "content": list(side)}]


def _parts(side: Side) -> list[Mapping[str, Any]]:
    return [{"type": "text", "text": side}] if isinstance(side, str) else list(side)


def _text(side: Side) -> str:
    if isinstance(side, str):
        return side
    if any(part.get("type") != "text" for part in side):
        raise InvalidRequestError("this model takes no images; send text only", param="documents")
    return "".join(str(part["text"]) for part in side)
