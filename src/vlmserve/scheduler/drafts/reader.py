"""Follows an answer through tokens that it may repeat."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from vlmserve.scheduler.drafts.corpus import GRAM, LONGEST_MATCH, SEPARATOR, Corpus
from vlmserve.scheduler.drafts.layer import LayerUse

Source: TypeAlias = Literal["repeat", "grammar", "prediction", "own", "image", "schema", "mtp"]
"""repeat: earlier answers to the same prompt. grammar: text that the grammar forces. prediction: the client's predicted
text. own: the request's prompt and answer. image: earlier answers to the same images. schema: earlier answers with the
same grammar. mtp: the model's layer for multi-token prediction."""
Kind: TypeAlias = tuple[Source, int]
"""Source and match class. The class of "mtp" is the draft's index."""
NEAR = 16
"""Tokens to search after a wrong draft."""
BACK = 256
"""Tokens to search before a wrong draft."""
_FORMS: tuple[Source, ...] = ("own", "schema")
"""Sources that repeat forms with other values."""
_LENGTHS = (0, 2, 5, 11)
"""Longest match of each class except the last."""
NUM_CLASSES = len(_LENGTHS) + 1


class Reader:
    def __init__(
        self, source: Source, corpus: Corpus, num_read: int, place: int | None = None, length: int = 0
    ) -> None:
        """num_read: tokens of the request before `place`. length: how many match."""
        self.source: Source = source
        self._corpus = corpus
        self._num_read, self._place, self._length = num_read, place, length
        self._parted = place or 0
        """Place of the last wrong draft after a match."""

    @property
    def match_class(self) -> int:
        return bisect_right(_LENGTHS, self._length - 1)

    def read(self, token_ids: Sequence[int]) -> None:
        own = self._corpus.token_ids
        for number in range(self._num_read, len(token_ids)):
            if self._place is not None:
                self._pass(token_ids[number], own)
        self._num_read = len(token_ids)
        if self._length < GRAM:
            match = self._corpus.find(token_ids)
            if match is not None:
                self._place, self._length = match

    def _pass(self, token: int, own: Sequence[int]) -> None:
        """After a wrong draft, search nearby, because values of a form's fields differ."""
        place = self._place
        assert place is not None
        if place < len(own) and own[place] == token:
            self._place, self._length = place + 1, min(self._length + 1, LONGEST_MATCH)
            return
        if self._length >= GRAM:
            self._parted = place
        self._length = 0
        if self.source == "own" or place >= len(own) or own[place] == SEPARATOR:
            self._place = None
            return
        first = max(self._parted, place - BACK)
        near = own[first : place + NEAR]
        if token in near:
            self._place, self._length = first + near.index(token) + 1, 1
        else:
            self._place = place + 1

    def tokens(self, count: int) -> list[int]:
        if self._place is None:
            return []
        return self._corpus.tokens_from(self._place, count, repeats=self.source == "own")

    def rates(self, token_ids: Sequence[int], usual: float) -> list[float]:
        """Return the probability that each of `tokens` is right if all earlier ones are.

        usual: probability for the source and match class. Sources that are no forms repeat whole answers, so all their
        tokens have it.
        """
        if self._place is None or self.source not in _FORMS:
            return [usual] * len(token_ids)
        return self._corpus.rates_from(self._place, token_ids, usual)


class Rate:
    """Right and wrong drafts, weighted towards recent ones."""

    __slots__ = ("_most", "right", "wrong")

    def __init__(self, right: float, wrong: float, most: float) -> None:
        """most: total above which the counts are halved."""
        self.right, self.wrong, self._most = right, wrong, most

    def add(self, right: int, wrong: int) -> None:
        self.right += right
        self.wrong += wrong
        if self.right + self.wrong > self._most:
            self.right, self.wrong = self.right / 2, self.wrong / 2


@dataclass(slots=True)
class Drafting:
    keys: dict[Source, bytes]
    """Keys to store its answer under, by source."""
    readers: list[Reader]
    rates: dict[Kind, Rate] = field(default_factory=dict)
    """By source and match class."""
    proposed: list[tuple[Kind, int]] = field(default_factory=list)
    """Drafts in flight: their kinds, in order, and the number of each."""
    predicted: list[int] = field(default_factory=list)
    """Drafts that the model made after its first `num_known` tokens."""
    num_known: int = 0
    layer: LayerUse = field(default_factory=LayerUse)
    num_accepted: int = 0
    num_rejected: int = 0
