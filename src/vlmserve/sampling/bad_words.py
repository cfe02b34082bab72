"""Bans tokens that complete a bad word."""

from __future__ import annotations

from collections.abc import Sequence


class BadWords:
    """words: token ids of each word, at least one."""

    __slots__ = ("_longer", "_single", "longest")

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self.longest = max(map(len, words), default=0)
        """Tokens of the longest word; `completing` needs no more of the answer."""
        self._single = frozenset(word[0] for word in words if len(word) == 1)
        self._longer: dict[int, list[tuple[list[int], int]]] = {}
        """Prefix and last token of each longer word, by the last token of the prefix."""
        for *prefix, last in words:
            if prefix:
                self._longer.setdefault(prefix[-1], []).append((prefix, last))

    def completing(self, answer: Sequence[int]) -> frozenset[int]:
        longer = self._longer.get(answer[-1], ()) if answer else ()
        return self._single.union(last for prefix, last in longer if answer[-len(prefix) :] == prefix)
