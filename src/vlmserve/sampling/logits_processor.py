"""Logit biases and penalties of a request."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vlmserve.types import SamplingParams

_IDS, _TIMES, _IN_ANSWER = range(3)


class TokenCounts:
    """window: number of latest tokens to count; -1: all."""

    __slots__ = ("_latest", "_places", "_table", "_window")

    def __init__(self, prompt: Sequence[int], window: int) -> None:
        latest = prompt if window < 0 else prompt[max(0, len(prompt) - window) :]
        ids, times = np.unique(np.asarray(latest, np.int64), return_counts=True)
        self._table = np.zeros((3, len(ids) + 64), np.int64)
        self._table[_IDS, : len(ids)] = ids
        self._table[_TIMES, : len(ids)] = times
        self._places = {token_id: place for place, token_id in enumerate(ids.tolist())}
        self._window = window
        # only a window needs the order
        self._latest = deque((token_id, False) for token_id in latest) if window >= 0 else None

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The distinct counted tokens. A view, valid until the next `append`."""
        return self._table[_IDS, : len(self._places)]

    @property
    def in_answer(self) -> npt.NDArray[np.int64]:
        return self._table[_IN_ANSWER, : len(self._places)]

    def append(self, token_id: int) -> None:
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = len(self._places)
            if place == self._table.shape[1]:
                self._table = np.concatenate((self._table, np.zeros_like(self._table)), axis=1)
            self._table[:, place] = token_id, 0, 0
        self._table[_TIMES:, place] += 1
        if self._latest is not None:
            self._latest.append((token_id, True))
            if len(self._latest) > self._window:
                self._forget(*self._latest.popleft())

    def _forget(self, token_id: int, in_answer: bool) -> None:
        """The table's last token takes the place of one without counts."""
        place = self._places[token_id]
        self._table[_TIMES, place] -= 1
        self._table[_IN_ANSWER, place] -= in_answer
        if self._table[_TIMES, place] == 0:
            last = len(self._places) - 1
            self._table[:, place] = self._table[:, last]
            self._places[int(self._table[_IDS, last])] = place
            del self._places[token_id]


class LogitsProcessor:
    """prompt: its tokens, without image tokens."""

    __slots__ = ("bias_ids", "biases", "counts", "params")

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self.params = params
        self.counts = TokenCounts(prompt, params.repeat_last_n) if params.penalizes else None
        """None without a penalty."""
        self.bias_ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        self.biases = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))

    def append(self, token_id: int) -> None:
        if self.counts is not None:
            self.counts.append(token_id)

    @property
    def subtracted(self) -> npt.NDArray[np.float32]:
        """Frequency and presence penalties of `counts.ids`."""
        assert self.counts is not None
        times = self.counts.in_answer
        taken = self.params.frequency_penalty * times + self.params.presence_penalty * (times > 0)
        return np.asarray(taken, np.float32)
