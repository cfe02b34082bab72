"""Reads disk entries whose shards several ranks have."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple

from vlmserve.cache.fetches import NUM_READERS, Fetches, Plan
from vlmserve.cache.tiers import DiskTier
from vlmserve.steps import Bytes, DiskLoad, ModelRunnerOutput, SchedulerOutput


class _Awaited(NamedTuple):
    owner: str
    found: Mapping[bytes, Bytes]
    """Contents that rank 0 has read."""
    shards: frozenset[bytes]
    """Keys that the other ranks read."""


class RankFetches(Fetches):
    """Waits until the other ranks have read their shards. An entry that any rank lacks is missing."""

    def __init__(self, tier: DiskTier) -> None:
        super().__init__(tier)
        self._whole: dict[str, frozenset[bytes]] = {}
        self._numbers: dict[str, int] = {}
        """Numbers of loads by owner, until the owner needs no block or state."""
        self._awaited: dict[int, _Awaited] = {}
        self._num_loads = 0
        self._begun: list[DiskLoad] = []
        self._dropped: list[int] = []

    @property
    def may_begin(self) -> bool:
        return super().may_begin and len(self._awaited) < NUM_READERS

    def begin(self, owner: str, plan: Plan) -> None:
        self._whole[owner] = plan.whole
        super().begin(owner, plan)

    def is_done(self, owner: str) -> bool:
        return super().is_done(owner) and self._numbers.get(owner) not in self._awaited

    def _add(self, owner: str, found: Mapping[bytes, Bytes]) -> None:
        shards = frozenset(found) - self._whole.pop(owner)
        if not shards:
            super()._add(owner, found)
            return
        self._num_loads += 1
        self._numbers[owner] = self._num_loads
        self._awaited[self._num_loads] = _Awaited(owner, found, shards)
        self._begun.append(DiskLoad(self._num_loads, [key for key in found if key in shards]))

    def keep(self, owner: str, needed: Container[bytes]) -> None:
        """needed: keys of images."""
        super().keep(owner, needed)
        self._drop(owner)

    def _drop(self, owner: str) -> None:
        if (number := self._numbers.pop(owner, None)) is not None:
            self._awaited.pop(number, None)
            self._dropped.append(number)

    def release(self, owner: str) -> None:
        self._whole.pop(owner, None)
        super().release(owner)

    def end_step(self, step: SchedulerOutput) -> None:
        step.awaits_disk_loads = bool(self._awaited)
        if step.has_work:
            step.disk_loads, self._begun = self._begun, []
            step.disk_loads_to_drop, self._dropped = self._dropped, []

    def ran(self, output: ModelRunnerOutput) -> None:
        for number, read in output.disk_loads.items():
            awaited = self._awaited.pop(number, None)
            if awaited is None:
                continue  # the request has just ended
            if not read:
                self._drop(awaited.owner)  # one rank may hold what another lacks
            lacking = awaited.shards - read
            super()._add(awaited.owner, {key: one for key, one in awaited.found.items() if key not in lacking})
