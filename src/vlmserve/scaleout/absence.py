"""Requests wait some seconds for a new worker when a model's last worker leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import NamedTuple

PATIENCE = 10.0
"""Seconds that requests wait for another worker."""


class _Absence(NamedTuple):
    names: frozenset[str]
    until: float


class Absences:
    """The models of a gateway that lack a worker. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._absent: dict[str, _Absence] = {}
        self._served: set[str] = set()

    def note(self, model: str, names: Collection[str], *, is_served: bool) -> None:
        """names: the model's aliases and adapters."""
        if is_served:
            self._served.add(model)
            self._absent.pop(model, None)
        elif model not in self._absent:
            self._served.discard(model)
            self._absent[model] = _Absence(frozenset(names) | {model}, self._clock() + PATIENCE)

    def left(self, name: object) -> float:
        """Seconds that a request may still wait. A request without a name waits only while no model has a worker."""
        if not isinstance(name, str):
            lasts = () if self._served else [absence.until for absence in self._absent.values()]
        else:
            lasts = [absence.until for absence in self._absent.values() if name in absence.names]
        return max(0.0, max(lasts, default=0.0) - self._clock())
