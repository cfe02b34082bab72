"""Seconds by a count, as measured."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class Curve:
    """Seconds by a count, linearly interpolated and extrapolated."""

    def __init__(self, measured: Sequence[tuple[int, float]]) -> None:
        """measured: at least one pair of a count, ascending from 1, and seconds."""
        self.counts = [count for count, _ in measured]
        # more rows take no less time, so slower steps with fewer rows were disturbed
        self._seconds = [min(seconds for _, seconds in measured[number:]) for number in range(len(measured))]

    def seconds(self, count: int) -> float:
        if len(self.counts) == 1:
            return self._seconds[0]
        last = min(max(1, bisect_right(self.counts, count)), len(self.counts) - 1)
        (left, right), (low, high) = self.counts[last - 1 : last + 1], self._seconds[last - 1 : last + 1]
        return low + (high - low) * (count - left) / (right - left)
