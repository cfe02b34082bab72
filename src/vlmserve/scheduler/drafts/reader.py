"""Follows an answer through tokens that it may repeat."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from vlmserve.scheduler.drafts.corpus import GRAM, LONGEST_MATCH, SEPARATOR, Corpus

Source: TypeAlias = Literal["repeat", "prediction", "own", "image", "schema"]
"""repeat: earlier answers to the identical prompt. prediction: text that the client predicts. own: prompt and answer
themselves. image: earlier answers to the same images. schema: earlier answers of the same grammar."""
NEAR = 16
"""Tokens after a wrong draft among which the answer may go on."""
BACK = 256
"""Tokens before a wrong draft among which the answer may go on."""
_LENGTHS = (0, 2, 5, 11)
"""Longest match of each class of matches but the last."""
NUM_CLASSES = len(_LENGTHS) + 1


class Reader:
    """A place in a corpus: the answer repeats the tokens from there on, if it goes on as before."""

    def __init__(
        self, source: Source, corpus: Corpus, num_read: int, place: int | None = None, length: int = 0
    ) -> None:
        """num_read: tokens of the request that come before `place`. length: how many of them are known to match."""
        self.source: Source = source
        self._corpus = corpus
        self._num_read, self._place, self._length = num_read, place, length
        self._parted = place or 0
        """Place of the last wrong draft after a match."""

    @property
    def match_class(self) -> int:
        """The class of its match by length: matches of a class are equally often right."""
        return bisect_right(_LENGTHS, self._length - 1)

    def read(self, token_ids: Sequence[int]) -> None:
        """Read the new tokens of a request."""
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
        """Go over one token of the answer. After a wrong draft, go on near it: fields of a form differ in values."""
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
        """Return at most `count` tokens that may come next."""
        if self._place is None:
            return []
        return self._corpus.tokens_from(self._place, count, repeats=self.source == "own")


class Rate:
    """How many drafts of one kind were right and wrong; older ones count less."""

    __slots__ = ("_most", "right", "wrong")

    def __init__(self, right: float, wrong: float, most: float) -> None:
        """most: counts are halved when they exceed this together."""
        self.right, self.wrong, self._most = right, wrong, most

    def add(self, right: int, wrong: int) -> None:
        self.right += right
        self.wrong += wrong
        if self.right + self.wrong > self._most:
            self.right, self.wrong = self.right / 2, self.wrong / 2


@dataclass(slots=True)
class Drafting:
    """A request's sources of drafts, and how often they were right."""

    keys: dict[Source, bytes]
    """Under which its answer is kept, by source."""
    readers: list[Reader]
    rates: dict[tuple[Source, int], Rate] = field(default_factory=dict)
    """By source and class of match."""
    proposed: tuple[Source, int] | None = None
    """Source and class of the match of the last proposal."""
    num_accepted: int = 0
    num_rejected: int = 0
