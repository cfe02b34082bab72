"""Estimates step times, and how many drafts are worthwhile."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vlmserve.scheduler.drafts.curve import Curve
from vlmserve.scheduler.drafts.layer import Layer

MAX_DRAFTS = 32
_SHARE = 0.02
"""Maximum cost of wrong drafts and searches, as a share of the time of steps."""
_SHARE_OF_CROWDS = 0.005
"""The same for steps of several requests, whose times are measured less closely."""
_VALUE_IN_CROWDS = 0.5
"""Share of an accepted draft's time that counts in steps of several requests: the engine's own work is not measured."""
_RESERVE = 0.5
"""Balance that searches of several requests leave for drafts, in steps of one row."""
_PART_OF_LAYER = 0.25
"""Part of the share that rows of the model's own layer may take, if there is one."""
_FIRST_STEPS, _MOST_STEPS = 2.0, 8.0
"""Initial and maximum balance of `Account`, in steps of one row."""


class StepCosts:
    """Times of steps that the engine waits for, and of decodes that are planned ahead."""

    def __init__(self, measured: Sequence[tuple[int, float]], ahead: Sequence[tuple[int, float]] | None = None) -> None:
        """measured: seconds by rows of a step with drafts. ahead: seconds by decodes of steps planned ahead."""
        self._verifying = Curve(measured)
        self._ahead = None if ahead is None else Curve(ahead)
        self.exposed = 0.0
        """Seconds of the runner that a step takes longer if it is not planned ahead."""
        if self._ahead is not None:
            self.exposed = max(0.0, self.seconds(1) - self._ahead.seconds(1))

    @property
    def max_rows(self) -> float:
        """Steps of more rows are not estimated: graphs make them differ."""
        return math.inf if self._ahead is None else self._verifying.counts[-1]

    def seconds(self, rows: int) -> float:
        return self._verifying.seconds(rows)

    def seconds_without(self, num_decodes: int, num_prompt_tokens: int, *, is_ahead: bool) -> float:
        """Return the time of a step without drafts. is_ahead: the next step is planned before it ends."""
        if self._ahead is None or num_prompt_tokens:
            return self.seconds(max(1, num_decodes + num_prompt_tokens))
        return self._ahead.seconds(max(1, num_decodes)) + (0.0 if is_ahead else self.exposed)


class Account:
    """Seconds that drafts and searches for them may cost: a share of all steps, plus the time saved by drafts."""

    def __init__(self, costs: StepCosts, layer: Layer | None = None) -> None:
        """layer: gets a part of the share."""
        self._costs, self._layer = costs, layer
        self._step = costs.seconds_without(1, 0, is_ahead=True)
        self._left = _FIRST_STEPS * self._step
        self._rows, self._value = 1, self._step
        self._seconds = self._step
        """Time of the current step with its drafts."""
        self._host = 0.0
        """Seconds of the engine in each step that the device would wait for. 0: it waits either way."""
        self._reserve = 0.0

    @property
    def affords_search(self) -> bool:
        return self._left > self._reserve

    def begin_step(
        self,
        num_decodes: int,
        num_prompt_tokens: int,
        *,
        is_ahead: bool = False,
        host: float = 0.0,
        is_counted: bool = False,
    ) -> None:
        """is_ahead: without drafts, the next step is planned before this one ends. host: seconds of the engine.
        is_counted: the balance has this step's share.
        """
        self._rows, self._host = num_decodes + num_prompt_tokens, host if is_ahead else 0.0
        self._seconds = self._costs.seconds_without(num_decodes, num_prompt_tokens, is_ahead=is_ahead)
        of_decodes = self._costs.seconds_without(num_decodes, 0, is_ahead=is_ahead)
        self._value = of_decodes / max(1, num_decodes)
        share, self._reserve = _SHARE, 0.0
        if num_decodes > 1:
            share, self._reserve = _SHARE_OF_CROWDS, _RESERVE * self._step
            self._value *= _VALUE_IN_CROWDS
        seconds = share * of_decodes if num_decodes and not is_counted else 0.0
        if self._layer is not None:
            self._layer.add(_PART_OF_LAYER * seconds)
            seconds *= 1 - _PART_OF_LAYER
        self._add(seconds)

    def _add(self, seconds: float) -> None:
        self._left = min(self._left + seconds, _MOST_STEPS * self._step)

    def _seconds_with(self, count: int) -> float:
        return self._costs.seconds(self._rows + count) + self._host

    def best(self, rates: Sequence[float], seconds_each: float = 0.0) -> tuple[int, float]:
        """Return the number of drafts that saves most, and the expected seconds that they save.

        rates: probability of each draft to be right if all earlier ones are. seconds_each: to make a draft.
        """
        reached, expected, best, best_gain = 1.0, 0.0, 0, _SHARE * self._value
        for count, rate in enumerate(rates, start=1):
            reached *= rate
            expected += reached
            cost = self._seconds_with(count) - self._seconds + count * seconds_each
            if cost > self._left or self._rows + count > self._costs.max_rows:
                break
            gain = expected * self._value - cost
            if gain > best_gain:
                best, best_gain = count, gain
        return best, best_gain if best else 0.0

    def share(self, seconds: float, num_decodes: int) -> float:
        """A request's share of what a draft for each of several requests takes. seconds: for one."""
        return seconds * self._costs.seconds(num_decodes) / self._step / num_decodes

    def pay(self, count: int) -> None:
        before, self._seconds = self._seconds, self._seconds_with(count)
        self._rows += count
        self._left -= self._seconds - before

    def pay_wait(self, rates: Sequence[float], num_unknown: int) -> bool:
        """Wait for tokens in flight if drafts after them probably save more, within the balance.

        rates: of the tokens in flight, `num_unknown`, and of drafts after them.
        """
        wait = self._costs.exposed + self._host
        if wait > self._left or len(rates) <= num_unknown:
            return False
        _, gain = self.best(rates[num_unknown:])
        if gain * math.prod(rates[:num_unknown]) <= wait:
            return False
        self._left -= wait
        return True

    def spend(self, seconds: float) -> None:
        """Pay for a search."""
        self._left -= seconds

    def earn(self, num_accepted: int) -> None:
        self._add(num_accepted * self._value)
