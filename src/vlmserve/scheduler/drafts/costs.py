"""Estimates step times, and how many drafts are worthwhile."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

MAX_DRAFTS = 32
_SHARE = 0.02
"""Maximum cost of wrong drafts and searches, as a share of the time of steps."""
_SHARE_OF_CROWDS = 0.005
"""The same for steps of several requests, whose times are measured less closely."""
_VALUE_IN_CROWDS = 0.5
"""Share of an accepted draft's time that counts in steps of several requests: the engine's own work is not measured."""
_RESERVE = 0.5
"""Balance that searches of several requests leave for drafts, in steps of one row."""
_FIRST_STEPS, _MOST_STEPS = 2.0, 8.0
"""Initial and maximum balance of `Account`, in steps of one row."""


class StepCosts:
    """Seconds of a step by its rows, linearly interpolated."""

    def __init__(self, measured: Sequence[tuple[int, float]]) -> None:
        """measured: at least two pairs of rows, ascending from 1, and seconds."""
        self._rows = [rows for rows, _ in measured]
        # more rows take no less time, so slower steps with fewer rows were disturbed
        self._seconds = [min(seconds for _, seconds in measured[number:]) for number in range(len(measured))]

    def seconds(self, rows: int) -> float:
        last = min(max(1, bisect_right(self._rows, rows)), len(self._rows) - 1)
        (left, right), (low, high) = self._rows[last - 1 : last + 1], self._seconds[last - 1 : last + 1]
        return low + (high - low) * (rows - left) / (right - left)


class Account:
    """Seconds that drafts and searches for them may cost: a share of all steps, plus the time saved by drafts."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._step = costs.seconds(1)
        self._left = _FIRST_STEPS * self._step
        self._rows, self._value = 1, self._step
        self._reserve = 0.0

    @property
    def affords_search(self) -> bool:
        return self._left > self._reserve

    def begin_step(self, num_decodes: int, num_prompt_tokens: int) -> None:
        self._rows = num_decodes + num_prompt_tokens
        seconds = self._costs.seconds(max(1, num_decodes))
        self._value = seconds / max(1, num_decodes)
        share, self._reserve = _SHARE, 0.0
        if num_decodes > 1:
            share, self._reserve = _SHARE_OF_CROWDS, _RESERVE * self._step
            self._value *= _VALUE_IN_CROWDS
        self._add(share * seconds if num_decodes else 0.0)

    def _add(self, seconds: float) -> None:
        self._left = min(self._left + seconds, _MOST_STEPS * self._step)

    def best_count(self, rates: Sequence[float]) -> int:
        return self.best(rates)[0]

    def best(self, rates: Sequence[float], seconds_each: float = 0.0) -> tuple[int, float]:
        """Return the number of drafts that saves most, and the expected seconds that they save.

        rates: probability of each draft to be right if all earlier ones are. seconds_each: to make a draft.
        """
        before = self._costs.seconds(self._rows)
        reached, expected, best, best_gain = 1.0, 0.0, 0, _SHARE * self._value
        for count, rate in enumerate(rates, start=1):
            reached *= rate
            expected += reached
            cost = self._costs.seconds(self._rows + count) - before + count * seconds_each
            if cost > self._left:
                break
            gain = expected * self._value - cost
            if gain > best_gain:
                best, best_gain = count, gain
        return best, best_gain if best else 0.0

    def share(self, seconds: float, num_decodes: int) -> float:
        """A request's share of what a draft for each of several requests takes. seconds: for one."""
        return seconds * self._costs.seconds(num_decodes) / self._step / num_decodes

    def pay(self, count: int) -> None:
        before = self._costs.seconds(self._rows)
        self._rows += count
        self._left -= self._costs.seconds(self._rows) - before

    def spend(self, seconds: float) -> None:
        """Pay for a search."""
        self._left -= seconds

    def earn(self, num_accepted: int) -> None:
        self._add(num_accepted * self._value)
