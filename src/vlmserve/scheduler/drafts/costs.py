"""How long steps take by their rows, and how many drafts that makes worthwhile."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

MAX_DRAFTS = 32
"""Maximum drafts of a request in one step."""
_SHARE = 0.02
"""Share of the time of steps that drafts may cost where all of them are wrong."""
_FIRST_STEPS, _MOST_STEPS = 2.0, 8.0
"""Steps of one row whose time drafts may cost at start, and at any time."""


class StepCosts:
    """Seconds of a step by its rows, between and beyond measured numbers of rows on straight lines."""

    def __init__(self, measured: Sequence[tuple[int, float]]) -> None:
        """measured: rows, from 1 on in order, and seconds; at least two of them."""
        self._rows = [rows for rows, _ in measured]
        # More rows take no less time. Something else has slowed down a step that took longer than one with more rows.
        self._seconds = [min(seconds for _, seconds in measured[number:]) for number in range(len(measured))]

    def seconds(self, rows: int) -> float:
        last = min(max(1, bisect_right(self._rows, rows)), len(self._rows) - 1)
        (left, right), (low, high) = self._rows[last - 1 : last + 1], self._seconds[last - 1 : last + 1]
        return low + (high - low) * (rows - left) / (right - left)


class Account:
    """Seconds that drafts may cost: a share of all steps, and what right drafts have saved."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._step = costs.seconds(1)
        self._left = _FIRST_STEPS * self._step
        self._rows, self._value = 1, self._step

    def begin_step(self, num_decodes: int, num_prompt_tokens: int) -> None:
        """Note the rows of the next step without drafts."""
        self._rows = num_decodes + num_prompt_tokens
        seconds = self._costs.seconds(max(1, num_decodes))
        self._value = seconds / max(1, num_decodes)
        self._add(_SHARE * seconds if num_decodes else 0.0)

    def _add(self, seconds: float) -> None:
        self._left = min(self._left + seconds, _MOST_STEPS * self._step)

    def best_count(self, rate: float, most: int) -> int:
        """Return how many drafts save the most time, each of them right with the probability `rate` if all before it
        are."""
        before = self._costs.seconds(self._rows)
        reached, expected, best, best_gain = 1.0, 0.0, 0, _SHARE * self._value
        for count in range(1, most + 1):
            reached *= rate
            expected += reached
            cost = self._costs.seconds(self._rows + count) - before
            if cost > self._left:
                break
            gain = expected * self._value - cost
            if gain > best_gain:
                best, best_gain = count, gain
        return best

    def pay(self, count: int) -> None:
        """Add rows of drafts to the step."""
        before = self._costs.seconds(self._rows)
        self._rows += count
        self._left -= self._costs.seconds(self._rows) - before

    def earn(self, num_accepted: int) -> None:
        """Note right drafts. Each one saves its request a step."""
        self._add(num_accepted * self._value)
