from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable

MAX_EVICTED = 1 << 15
"""Keys that a pool remembers, about 7 MB."""


class EvictedKeys:
    """Seconds of `time.monotonic` by key; the oldest keys are forgotten."""

    def __init__(self, most: int = MAX_EVICTED) -> None:
        self._most = most
        self._times: OrderedDict[bytes, float] = OrderedDict()

    def add(self, keys: Iterable[bytes]) -> None:
        now = time.monotonic()
        for key in keys:
            self._times[key] = now
            self._times.move_to_end(key)
        while len(self._times) > self._most:
            self._times.popitem(last=False)

    def discard(self, key: bytes) -> None:
        self._times.pop(key, None)

    def get(self, key: bytes) -> float | None:
        return self._times.get(key)
