"""How many workers there should be."""

from __future__ import annotations

import math
from collections.abc import Sequence

_MOST_GROWTH = 2.0
"""Times the workers that there are."""
_IDLE = 0.25
"""Of the seconds that requests may wait; below that, and with so few running, there are too many workers."""


def workers_wanted(queued_seconds: Sequence[float], usage: Sequence[float], most_seconds: float) -> int:
    """How many workers keep requests waiting for at most `most_seconds` of prefill.

    queued_seconds, usage: of each worker that there is now; usage is running requests over capacity. One fewer only
    when the rest would still be nearly idle, so that caches are not thrown away for a quiet moment.
    """
    count = len(queued_seconds)
    if not count:
        return 1
    waiting = sum(queued_seconds) / count
    if waiting > most_seconds:
        return math.ceil(count * min(_MOST_GROWTH, waiting / most_seconds))
    if count > 1 and sum(queued_seconds) / (count - 1) < _IDLE * most_seconds and sum(usage) / (count - 1) < _IDLE:
        return count - 1
    return count
