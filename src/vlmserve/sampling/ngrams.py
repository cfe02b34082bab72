"""A ban of token sequences that an answer would repeat, as models do that read text off an image without end."""

from __future__ import annotations

from collections.abc import Sequence


class RepeatedNgrams:
    """Which tokens would repeat an n-gram of the latest tokens.

    tokens: the prompt, and what there is of the answer; a negative one is no token and never comes. size: of an n-gram,
    at least 2. window: only n-grams that begin among so many of the latest tokens count; -1: all.

    The rule is transformers' ``no_repeat_ngram_size``, which has no window.
    """

    __slots__ = ("_size", "_starts", "_tokens", "_window")

    def __init__(self, tokens: Sequence[int], size: int, window: int) -> None:
        self._size = size
        self._window = window
        self._tokens: list[int] = []
        self._starts: dict[int, list[int]] = {}
        """Of n-grams, by the hash of all but their last token."""
        for token_id in tokens:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        tokens, prefix_len = self._tokens, self._size - 1
        tokens.append(token_id)
        start = len(tokens) - self._size
        if start >= 0:
            self._starts.setdefault(hash(tuple(tokens[start : start + prefix_len])), []).append(start)

    def repeating(self) -> frozenset[int]:
        """The tokens that would make the latest ones an n-gram that was there before."""
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
