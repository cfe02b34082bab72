"""Finds tokens that an answer may repeat by the tokens before them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import cycle, islice
from typing import NamedTuple

GRAM = 3
"""Tokens in an index key."""
CONTEXT = 2
"""Tokens whose followers are counted."""
LONGEST_MATCH = 16
"""Maximum tokens of a match."""
SEPARATOR = -1
"""Separates answers. It is no token, so drafts end there."""
_TRUSTED = 1.0
"""Followers that count as much as the usual rate."""
_BITS = 21
"""Bits of a token id in an index key. Vocabularies have up to about 2**18 tokens."""
_MASK = (1 << _BITS) - 1


class Follower:
    """A token after some context, and how often it was the same as the time before."""

    __slots__ = ("right", "token", "wrong")

    def __init__(self, token: int) -> None:
        self.token = token
        self.right = self.wrong = 0

    def rate(self, usual: float) -> float:
        return (self.right + _TRUSTED * usual) / (self.right + self.wrong + _TRUSTED)


class Match(NamedTuple):
    place: int
    """Index of the next token."""
    length: int


class Corpus:
    """Tokens with an n-gram index, built on first use.

    It can also count how often the same token followed the same `CONTEXT` tokens. In forms, names of fields stay the
    same, and values differ.
    """

    def __init__(self, token_ids: list[int], *, first: int = 0) -> None:
        """token_ids: shared with the caller; may grow. first: tokens before it are not indexed."""
        self.token_ids = token_ids
        self._index: dict[int, int] = {}
        self._indexed = first + GRAM
        self._followers: dict[int, Follower] = {}
        self._counted = first + GRAM

    def find(self, token_ids: Sequence[int]) -> Match | None:
        """Return the latest place after the same tokens."""
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

    def _count_followers(self) -> None:
        own, followers = self.token_ids, self._followers
        for place in range(self._counted, len(own)):
            token, key = own[place], _key(0, own[place - 2], own[place - 1])
            known = followers.get(key)
            if known is None:
                followers[key] = Follower(token)
            elif known.token == token:
                known.right += 1
            else:
                known.wrong += 1
                known.token = token
        self._counted = max(self._counted, len(own))

    def rates_from(self, place: int, token_ids: Sequence[int], usual: float) -> list[float]:
        """Return the probability that each token is right if all earlier ones are.

        token_ids: the tokens that `tokens_from` returns for the place. usual: probability of a token whose context is
        new.
        """
        self._count_followers()
        followers, rates = self._followers, []
        first, second = self.token_ids[place - 2 : place] if place >= CONTEXT else (SEPARATOR, SEPARATOR)
        for token in token_ids:
            known = followers.get(_key(0, first, second))
            rates.append(usual if known is None else known.rate(usual))
            first, second = second, token
        return rates

    def tokens_from(self, place: int, count: int, *, repeats: bool = False) -> list[int]:
        """Stop at the next separator. repeats: wrap around at the end."""
        tokens = self.token_ids[place : place + count]
        if SEPARATOR in tokens:
            return tokens[: tokens.index(SEPARATOR)]
        return list(islice(cycle(tokens), count)) if repeats and tokens else tokens


def _key(first: int, second: int, third: int) -> int:
    return ((first & _MASK) << _BITS | (second & _MASK)) << _BITS | (third & _MASK)


class Answers:
    """Earlier answers by key, with LRU eviction."""

    def __init__(self, max_tokens: int, max_tokens_of_key: int) -> None:
        self._most, self._most_of_key = max_tokens, max_tokens_of_key
        self._kept: OrderedDict[bytes, Corpus] = OrderedDict()
        self.num_tokens = 0

    def get(self, key: bytes) -> Corpus | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def append(self, key: bytes, token_ids: Sequence[int]) -> None:
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
