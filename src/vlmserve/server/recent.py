"""Latencies of the last minutes, in bounded memory."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from typing import Literal, get_args

import msgspec

Latency = Literal["ttft", "tpot", "e2e"]
"""Seconds to the first token, of each further one, and to the end."""

_SLOT = 5.0
"""Seconds whose latencies are counted together."""
WINDOWS = (60, 300)
"""Seconds, whole slots, over which percentiles are shown."""
_NUM_SLOTS = int(WINDOWS[-1] / _SLOT)
_LEAST = 1e-5
_STEP = 1.1
"""A bucket's upper bound is this many times its lower one, so that a percentile is within 5 % of the true one."""
_NUM_BUCKETS = math.ceil(math.log(1e4 / _LEAST, _STEP))


class Percentiles(msgspec.Struct, frozen=True):
    """Of `count` latencies, in seconds; null if there are none."""

    count: int
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class _Slot:
    """The latencies of a few seconds: how many there are in each bucket."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.counts: dict[Latency, dict[int, int]] = {kind: {} for kind in get_args(Latency)}


class RecentLatencies:
    """Counts latencies by when they were noted. clock: seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.slots: list[_Slot] = [_Slot(-1) for _ in range(_NUM_SLOTS)]

    def note(self, kind: Latency, seconds: float) -> None:
        """Something took so long just now."""
        number = self._now()
        slot = self.slots[number % _NUM_SLOTS]
        if slot.number != number:
            slot = self.slots[number % _NUM_SLOTS] = _Slot(number)
        bucket = min(_NUM_BUCKETS, max(0, math.ceil(math.log(max(seconds, _LEAST) / _LEAST, _STEP))))
        counts = slot.counts[kind]
        counts[bucket] = counts.get(bucket, 0) + 1

    def percentiles(self, kind: Latency, window: int) -> Percentiles:
        """Of what was noted in the last `window` seconds, give or take a slot; at most the longest of `WINDOWS`."""
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
    """The middle of the bucket that the latency of that rank is in."""
    reached = list(accumulate(count for _, count in counts))
    bucket, _ = counts[bisect_left(reached, math.ceil(share * total))]
    return float(_LEAST * _STEP ** (bucket - 0.5))
