"""Compares loading a block from host memory with recomputing it."""

from __future__ import annotations

from collections.abc import Sequence

from vlmserve.steps import BlockCopy

SMOOTHING = 0.2
LEAST_TOKENS = 64
"""Steps with fewer prompt tokens are not measured, because reading weights dominates their time."""
TRIAL_INTERVAL = 64
"""Rejected blocks per trial save, which measures the cost of copies again."""


class CostModel:
    """A block is saved if copying it out and back takes less time than recomputing it (moving averages)."""

    def __init__(self, block_size: float) -> None:
        self._block_size = block_size
        self.seconds_per_token: float | None = None
        self.seconds_per_copy: float | None = None
        self._refusals = 0

    def computed(self, num_tokens: int, seconds: float) -> None:
        if num_tokens >= LEAST_TOKENS:
            self.seconds_per_token = smooth(self.seconds_per_token, seconds / num_tokens)

    def copied(self, block_copies: Sequence[BlockCopy], seconds: float) -> None:
        """Ignores copies within the device."""
        if block_copies and all(copy.kind in ("save", "load") for copy in block_copies):
            self.seconds_per_copy = smooth(self.seconds_per_copy, seconds / len(block_copies))

    def worth_saving(self) -> bool:
        """Call once per evicted block."""
        if self.seconds_per_token is None or self.seconds_per_copy is None:
            return True
        if 2 * self.seconds_per_copy < self._block_size * self.seconds_per_token:
            return True
        self._refusals += 1
        return self._refusals % TRIAL_INTERVAL == 0


def smooth(average: float | None, value: float) -> float:
    return value if average is None else (1 - SMOOTHING) * average + SMOOTHING * value
