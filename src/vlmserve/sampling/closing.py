"""Completes an answer by its grammar with few tokens. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher

_QUOTE = '"'
_BRACKETS = ("}", "]")
_VALUES = (_QUOTE, "null", "n", "t", "f")
_DIGITS = tuple("0123456789")
_OPENERS = (":", ",", "[", "{")
"""Tried last."""
_ORDERS = ((*_BRACKETS, *_VALUES, *_DIGITS, *_OPENERS), (_QUOTE, *_BRACKETS, *_VALUES, *_OPENERS))
"""Orders in which texts are tried. The second helps if a string's pattern misleads the first."""


class ClosingTokens:
    def __init__(
        self,
        preferred: Sequence[Sequence[int]],
        in_strings: Sequence[int],
        lengths: npt.NDArray[np.int32],
        size: int,
    ) -> None:
        self._preferred = preferred
        self._in_strings = in_strings
        self._lengths = lengths
        self._size = size

    @classmethod
    def of(cls, tokens: Sequence[bytes], special: Sequence[int], size: int) -> Self:
        """tokens: bytes of each token id. special: ids without text."""
        ids: dict[bytes, int] = {}
        for id_, token in enumerate(tokens[:size]):
            ids.setdefault(token, id_)
        lengths = np.array([_length(token) for token in tokens[:size]], np.int32)
        lengths[[id_ for id_ in special if id_ < size]] = 0
        preferred = [[ids[text.encode()] for text in order if text.encode() in ids] for order in _ORDERS]
        in_strings = [ids[text.encode()] for text in (_QUOTE, *_BRACKETS) if text.encode() in ids]
        return cls(preferred, in_strings, lengths, size)

    def path(self, matcher: LLMatcher, longest: int, known: list[int] | None = None) -> list[int] | None:
        """Return at most `longest` tokens that complete the answer, or None.

        Tries forced tokens, closing brackets, short values, then the longest allowed token. known: the result one token
        earlier, which often still fits.
        """
        if known is not None and len(known) <= longest:
            after = matcher.deep_copy()
            if after.validate_tokens(known) == len(known) and after.consume_tokens(known) and after.is_accepting():
                return known
        for order in self._preferred:
            path = self._follow(matcher.deep_copy(), order, longest)
            if path is not None:
                return path
        return None

    def _follow(self, matcher: LLMatcher, order: Sequence[int], longest: int) -> list[int] | None:
        path: list[int] = []
        while not matcher.is_accepting():
            forced = [token for token in matcher.compute_ff_tokens() if token < self._size]
            step = forced or self._choose(matcher, order)
            if not step or len(path) + len(step) > longest or not matcher.consume_tokens(step):
                return None
            path += step
        return path

    def _choose(self, matcher: LLMatcher, order: Sequence[int]) -> list[int]:
        packed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            return []

        def is_allowed(token: int) -> bool:
            return bool(packed[token >> 3] >> (token & 7) & 1)

        if self._in_strings and all(map(is_allowed, self._in_strings)):
            return [self._in_strings[0]]  # both brackets and a quote are allowed inside a string
        for token in order:
            if is_allowed(token):
                return [token]
        bits = np.unpackbits(packed, count=self._size, bitorder="little")
        best = int((bits * self._lengths).argmax())
        return [best] if bits[best] and self._lengths[best] else []


def _length(token: bytes) -> int:
    """Twice the characters, 1 for a partial character, 0 for spaces."""
    try:
        text = token.decode()
    except UnicodeDecodeError:
        return 1
    return 2 * len(text) if text.strip() else 0
