"""Decide how many workers a cluster needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

_MOST_GROWTH = 2.0
"""Maximum growth in one step, as a multiple of the current workers."""
_IDLE = 0.25
"""Scale in if waits are below this fraction of the allowed wait, and usage is below it too."""


def workers_wanted(queued_seconds: Sequence[float], usage: Sequence[float], most_seconds: float) -> int:
    """The number of workers that keeps requests waiting at most `most_seconds` for prefill.

    usage: running requests / capacity of each worker. One worker at a time is removed, and only if the rest would be
    nearly idle: removing a worker loses its cache.
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
