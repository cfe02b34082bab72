"""Latencies of recent minutes, in bounded memory."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from typing import Literal, get_args

import msgspec

Latency = Literal["ttft", "tpot", "e2e"]
"""Time to first token, time per output token, and time to the end."""

_SLOT = 5.0
"""Seconds in a time slot."""
WINDOWS = (60, 300)
"""Windows of percentiles in seconds, multiples of a slot."""
_NUM_SLOTS = int(WINDOWS[-1] / _SLOT)
_LEAST = 1e-5
_STEP = 1.1
"""Ratio of a bucket's bounds; percentiles are within 5% of the exact ones."""
_NUM_BUCKETS = math.ceil(math.log(1e4 / _LEAST, _STEP))


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles of `count` latencies in seconds; null without latencies."""

    count: int
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class _Slot:
    def __init__(self, number: int) -> None:
        self.number = number
        self.counts: dict[Latency, dict[int, int]] = {kind: {} for kind in get_args(Latency)}


class RecentLatencies:
    """Counts latencies over time. clock: monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.slots: list[_Slot] = [_Slot(-1) for _ in range(_NUM_SLOTS)]

    def note(self, kind: Latency, seconds: float) -> None:
        number = self._now()
        slot = self.slots[number % _NUM_SLOTS]
        if slot.number != number:
            slot = self.slots[number % _NUM_SLOTS] = _Slot(number)
        bucket = min(_NUM_BUCKETS, max(0, math.ceil(math.log(max(seconds, _LEAST) / _LEAST, _STEP))))
        counts = slot.counts[kind]
        counts[bucket] = counts.get(bucket, 0) + 1

    def percentiles(self, kind: Latency, window: int) -> Percentiles:
        """window: seconds, up to the longest of `WINDOWS`, give or take a slot."""
        oldest = self._now() - int(window / _SLOT)
        counts: dict[int, int] = {}
        for slot in self.slots:
            if slot.number > oldest:
                for bucket, count in slot.counts[kind].items():
                    counts[bucket] = counts.get(bucket, 0) + count
        ordered = sorted(counts.items())
        total = sum(counts.values())
        if total == 0:
            return Percentiles(0)
        return Percentiles(total, *(_percentile(ordered, total, share) for share in (0.5, 0.9, 0.99)))

    def _now(self) -> int:
        return int(self._clock() / _SLOT)


def _percentile(counts: list[tuple[int, int]], total: int, share: float) -> float:
    reached = list(accumulate(count for _, count in counts))
    bucket, _ = counts[bisect_left(reached, math.ceil(share * total))]
    return float(_LEAST * _STEP ** (bucket - 0.5))
