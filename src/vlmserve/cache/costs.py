"""Whether it is cheaper to load a block from host memory or to compute it again."""

from __future__ import annotations

from collections.abc import Sequence

from vlmserve.steps import BlockCopy

SMOOTHING = 0.2
LEAST_TOKENS = 64
"""Steps with fewer prompt tokens are not measured: their time is that of reading weights, not of tokens."""
TRIAL_INTERVAL = 64
"""After so many refusals one block is saved all the same, so that the cost of copies is measured again."""


class CostModel:
    """Saving a block pays if copying it out and back takes less time than computing its tokens again.

    Both prices are measured while serving, as moving averages: seconds for each prompt token of a step that has many,
    and seconds for each block copied to the host or back. Encoding images again is not counted, which would speak for
    saving even more; until both prices are known, blocks are saved.
    """

    def __init__(self, block_size: float) -> None:
        """block_size: tokens whose computation a block saves."""
        self._block_size = block_size
        self.seconds_per_token: float | None = None
        self.seconds_per_copy: float | None = None
        self._refusals = 0

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step computed that many prompt tokens in that time."""
        if num_tokens >= LEAST_TOKENS:
            self.seconds_per_token = smooth(self.seconds_per_token, seconds / num_tokens)

    def copied(self, block_copies: Sequence[BlockCopy], seconds: float) -> None:
        """A step made these copies in that time, which says nothing if some stayed on the device."""
        if block_copies and all(copy.kind in ("save", "load") for copy in block_copies):
            self.seconds_per_copy = smooth(self.seconds_per_copy, seconds / len(block_copies))

    def worth_saving(self) -> bool:
        """Whether an evicted block should go to host memory; to be asked once for each."""
        if self.seconds_per_token is None or self.seconds_per_copy is None:
            return True
        if 2 * self.seconds_per_copy < self._block_size * self.seconds_per_token:
            return True
        self._refusals += 1
        return self._refusals % TRIAL_INTERVAL == 0


def smooth(average: float | None, value: float) -> float:
    """A moving average with another value; None: it is the first one."""
    return value if average is None else (1 - SMOOTHING) * average + SMOOTHING * value
