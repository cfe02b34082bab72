"""Searches the highest passing rate: doubles until one fails, then bisects."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import msgspec

MAX_TRIALS = 24
LOWEST_RATE = 0.01


class Trial(msgspec.Struct, frozen=True):
    rate: float
    """Requests per second."""
    passed: bool
    share: float
    """Fraction of requests that met all objectives."""
    num_requests: int
    output_tokens_per_s: float = 0.0
    ttft_p99: float | None = None
    """Milliseconds."""
    tpot_p99: float | None = None
    """Milliseconds."""
    why: str = ""
    """Why it ended early, and whether a slow client may have made it fail."""


async def find_rate(
    attempt: Callable[[float], Awaitable[Trial]],
    *,
    start: float,
    precision: float,
    most: int = MAX_TRIALS,
    stop: Callable[[], bool] = lambda: False,
) -> list[Trial]:
    """Return all trials in order; `best` picks the result.

    precision: stop when the lowest failed rate exceeds the highest passed one by at most this fraction. stop: asked
    after each trial.
    """
    trials: list[Trial] = []
    passed, failed = 0.0, math.inf
    rate = start
    while len(trials) < most and rate >= LOWEST_RATE:
        trial = await attempt(rate)
        trials.append(trial)
        if stop():
            break
        if trial.passed:
            passed = max(passed, rate)
        else:
            failed = min(failed, rate)
        if math.isinf(failed):
            rate = passed * 2
        elif passed == 0:
            rate = failed / 2
        elif failed <= passed * (1 + precision):
            break
        else:
            rate = math.sqrt(passed * failed)
    return trials


def best(trials: list[Trial]) -> Trial | None:
    return max((trial for trial in trials if trial.passed), key=lambda trial: trial.rate, default=None)
