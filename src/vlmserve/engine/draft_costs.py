"""How long steps of few rows take on this machine, stored for later starts."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from vlmserve.remembered import Remembered

Curve = list[tuple[int, float]]
"""Ascending rows, and seconds of a step."""

MOST_LOADS = 3
"""Loads that measure; the lowest times count, because other processes only make steps slower."""
LONG_SECONDS = 0.5
"""Seconds of all steps of a curve beyond which later loads do not measure again: a start would take as much longer."""
MAX_AGE = 7 * 86400.0
"""Seconds after which a curve is measured anew."""


class Measured(msgspec.Struct, frozen=True):
    since: float
    """Time of the first load that measured."""
    loads: int
    curve: Curve


COSTS = Remembered("draft-costs.json", Measured)


def known_costs(key: str, measure: Callable[[], Curve]) -> Curve:
    """The stored curve, or the lowest times of this load and of earlier ones.

    key: names the model, its settings and the machine.
    """
    now, known = time.time(), COSTS.facts.get(key)
    if known is None or not 0 <= now - known.since <= MAX_AGE:
        known = Measured(now, 0, [])
    elif known.loads >= MOST_LOADS or sum(seconds for _, seconds in known.curve) > LONG_SECONDS:
        return known.curve
    fastest = dict(known.curve)
    for rows, seconds in measure():
        fastest[rows] = min(seconds, fastest.get(rows, seconds))
    curve = sorted(fastest.items())
    COSTS.put(key, Measured(known.since, known.loads + 1, curve))
    return curve
