"""Tokens that would complete a word that an answer must not have."""

from __future__ import annotations

from collections.abc import Sequence


class BadWords:
    """The tokens that complete a bad word. words: the token ids of each word, of which none is empty."""

    __slots__ = ("_longer", "_single", "longest")

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self.longest = max(map(len, words), default=0)
        """Tokens of the longest word; no more of an answer's end decide."""
        self._single = frozenset(word[0] for word in words if len(word) == 1)
        self._longer: dict[int, list[tuple[list[int], int]]] = {}
        """Words of several tokens, by their last token but one."""
        for *prefix, last in words:
            if prefix:
                self._longer.setdefault(prefix[-1], []).append((prefix, last))

    def completing(self, answer: Sequence[int]) -> frozenset[int]:
        """The tokens that complete a bad word after `answer`."""
        longer = self._longer.get(answer[-1], ()) if answer else ()
        return self._single.union(last for prefix, last in longer if answer[-len(prefix) :] == prefix)
