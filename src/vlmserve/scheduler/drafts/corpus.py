"""Tokens that an answer may repeat, found by the tokens before them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import cycle, islice
from typing import NamedTuple

GRAM = 3
"""Tokens in a key of the index."""
LONGEST_MATCH = 16
"""Equal tokens before a place that are counted, in tokens."""
SEPARATOR = -1
"""Stands between two answers. It is no token, so no draft goes beyond it."""
_BITS = 21
"""Bits of a token id in a key of the index. Vocabularies have at most 2**18 tokens or so."""
_MASK = (1 << _BITS) - 1


class Match(NamedTuple):
    place: int
    """Number of the token that follows."""
    length: int
    """Equal tokens before it, at most `LONGEST_MATCH`."""


class Corpus:
    """Tokens with an index of their n-grams, which is built when it is first asked."""

    def __init__(self, token_ids: list[int], *, first: int = 0) -> None:
        """token_ids: kept, not copied; they may grow. first: tokens before it are not indexed."""
        self.token_ids = token_ids
        self._index: dict[int, int] = {}
        self._indexed = first + GRAM

    def find(self, token_ids: Sequence[int]) -> Match | None:
        """Return the latest place after the last tokens of `token_ids`."""
        if len(token_ids) < GRAM:
            return None
        self._extend_index()
        place = self._index.get(_key(*token_ids[-GRAM:]))
        if place is None:
            return None
        own, length = self.token_ids, GRAM
        most = min(LONGEST_MATCH, place, len(token_ids))
        while length < most and own[place - 1 - length] == token_ids[-1 - length]:
            length += 1
        return Match(place, length)

    def _extend_index(self) -> None:
        own, index = self.token_ids, self._index
        for place in range(self._indexed, len(own)):
            index[_key(*own[place - GRAM : place])] = place
        self._indexed = max(self._indexed, len(own))

    def tokens_from(self, place: int, count: int, *, repeats: bool = False) -> list[int]:
        """Return at most `count` tokens, up to the next separator. repeats: go round after the last token."""
        tokens = self.token_ids[place : place + count]
        if SEPARATOR in tokens:
            return tokens[: tokens.index(SEPARATOR)]
        return list(islice(cycle(tokens), count)) if repeats and tokens else tokens


def _key(first: int, second: int, third: int) -> int:
    return ((first & _MASK) << _BITS | (second & _MASK)) << _BITS | (third & _MASK)


class Answers:
    """Earlier answers, by key. The least recently used ones are forgotten."""

    def __init__(self, max_tokens: int, max_tokens_of_key: int) -> None:
        self._most, self._most_of_key = max_tokens, max_tokens_of_key
        self._kept: OrderedDict[bytes, Corpus] = OrderedDict()
        self.num_tokens = 0

    def get(self, key: bytes) -> Corpus | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def append(self, key: bytes, token_ids: Sequence[int]) -> None:
        """Keep one more answer, and forget earlier ones of this key where they are too long together."""
        added = [*token_ids[: self._most_of_key - 1], SEPARATOR]
        known = self.get(key)
        if known is not None and known.token_ids[-len(added) :] == added:
            return
        if known is not None and len(known.token_ids) + len(added) <= self._most_of_key:
            known.token_ids += added
        else:
            self.num_tokens -= 0 if known is None else len(known.token_ids)
            self._kept[key] = Corpus(added)
        self.num_tokens += len(added)
        self._evict()

    def _evict(self) -> None:
        while self.num_tokens > self._most:
            _, evicted = self._kept.popitem(last=False)
            self.num_tokens -= len(evicted.token_ids)
