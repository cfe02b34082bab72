"""How much of its time a step may spend on images while requests generate."""

from __future__ import annotations

from vlmserve.cache.costs import smooth

FIRST_STEP_SECONDS = 0.01
"""What a step is taken to take until one was measured in which requests generate and nothing else is computed."""

SEVERAL_SECONDS = 0.02
"""What a step may spend on images at least if several requests wait for theirs. A reader does not notice that a token
comes so much later, and all of those requests have their first tokens sooner."""


class EncoderBudget:
    """As many multiplications of the vision tower as take `share` times as long as the rest of a step.

    If several requests wait for images, it is as many as take `SEVERAL_SECONDS`, if that is more. Both the tower's rate
    and the time of a step are measured while serving, as moving averages. share: infinity is no bound.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self.seconds_per_product: float | None = None
        self.step_seconds: float | None = None

    def encoded(self, products: int, seconds: float) -> None:
        """The tower made so many multiplications in that time."""
        if products:
            self.seconds_per_product = smooth(self.seconds_per_product, seconds / products)

    def generated(self, seconds: float) -> None:
        """A step in which requests generated, and no prompt was computed, took that long but for its images."""
        self.step_seconds = smooth(self.step_seconds, seconds)

    def __call__(self, num_waiting: int) -> float:
        """Multiplications for a step in which requests generate, at least 1.

        num_waiting: running requests with images whose prompts are not computed.
        """
        if not self.seconds_per_product:
            return float("inf")
        seconds = self._share * (self.step_seconds or FIRST_STEP_SECONDS)
        if num_waiting > 1:
            seconds = max(seconds, SEVERAL_SECONDS)
        return max(1.0, seconds / self.seconds_per_product)
