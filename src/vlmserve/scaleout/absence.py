"""Models without a worker: for some seconds after the last one has left, requests wait for the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import NamedTuple

PATIENCE = 10.0
"""Seconds for which another worker is expected."""


class _Absence(NamedTuple):
    names: frozenset[str]
    until: float


class Absences:
    """Of a gateway's models. clock: seconds, as `time.monotonic`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._absent: dict[str, _Absence] = {}
        self._served: set[str] = set()

    def note(self, model: str, names: Collection[str], *, is_served: bool) -> None:
        """Whether some worker takes requests for a model now. names: under which requests reach it and its adapters."""
        if is_served:
            self._served.add(model)
            self._absent.pop(model, None)
        elif model not in self._absent:
            self._served.discard(model)
            self._absent[model] = _Absence(frozenset(names) | {model}, self._clock() + PATIENCE)

    def left(self, name: object) -> float:
        """Seconds for which a request that names a model or an adapter may still wait for a worker; 0 if it has one, or
        if none is expected. What is no name stands for any model: then it waits only if there is no worker at all."""
        if not isinstance(name, str):
            lasts = () if self._served else [absence.until for absence in self._absent.values()]
        else:
            lasts = [absence.until for absence in self._absent.values() if name in absence.names]
        return max(0.0, max(lasts, default=0.0) - self._clock())
