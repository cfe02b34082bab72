"""The highest rate that passes: doubling until one fails, then halving what lies between."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import msgspec

MAX_TRIALS = 24
LOWEST_RATE = 0.01


class Trial(msgspec.Struct, frozen=True):
    """One rate that was tried. rate: requests a second; share: of those that kept all objectives; times: milliseconds.

    why: what ended it early, and whether the client may be why it failed.
    """

    rate: float
    passed: bool
    share: float
    num_requests: int
    output_tokens_per_s: float = 0.0
    ttft_p99: float | None = None
    tpot_p99: float | None = None
    why: str = ""


async def find_rate(
    attempt: Callable[[float], Awaitable[Trial]],
    *,
    start: float,
    precision: float,
    most: int = MAX_TRIALS,
    stop: Callable[[], bool] = lambda: False,
) -> list[Trial]:
    """All trials, in their order; `best` says what they found.

    start: the first rate. precision: how far the lowest rate that failed may be above the highest that passed, as a
    share of it. stop: asked after each trial whether to end with what there is.
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
