"""Bans repeated n-grams: models that transcribe images may repeat text endlessly."""

from __future__ import annotations

from collections.abc import Sequence


class RepeatedNgrams:
    """Transformers' ``no_repeat_ngram_size`` with a window.

    tokens: negative ids are placeholders. size: of an n-gram, at least 2. window: latest tokens where n-grams begin;
    -1: all.
    """

    __slots__ = ("_size", "_starts", "_tokens", "_window")

    def __init__(self, tokens: Sequence[int], size: int, window: int) -> None:
        self._size = size
        self._window = window
        self._tokens: list[int] = []
        self._starts: dict[int, list[int]] = {}
        """Starts of n-grams, by the hash of all tokens but the last."""
        for token_id in tokens:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        tokens, prefix_len = self._tokens, self._size - 1
        tokens.append(token_id)
        start = len(tokens) - self._size
        if start >= 0:
            self._starts.setdefault(hash(tuple(tokens[start : start + prefix_len])), []).append(start)

    def repeating(self) -> frozenset[int]:
        tokens, prefix_len = self._tokens, self._size - 1
        if len(tokens) < self._size:
            return frozenset()
        latest = tokens[-prefix_len:]
        first = 0 if self._window < 0 else len(tokens) - self._window
        return frozenset(
            tokens[start + prefix_len]
            for start in self._starts.get(hash(tuple(latest)), ())
            if start >= first and tokens[start + prefix_len] >= 0 and tokens[start : start + prefix_len] == latest
        )
