"""Shards of disk entries that a rank reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import torch

from vlmserve.cache.fetches import NUM_READERS
from vlmserve.cache.tiers import DiskTier
from vlmserve.layers.parallel import Ranks
from vlmserve.steps import Bytes, DiskEntry, DiskLoad, SchedulerOutput

_READ, _MISSING, _IN_PROGRESS = range(3)
"""States of an entry. Each rank's entry is at least in the highest state of all ranks."""
_PATIENCE = 0.01
"""Seconds that a step without other work waits for loads."""


class RankLoads:
    """Every rank begins and drops the same loads, and learns which ended on all of them."""

    def __init__(self, ranks: Ranks, device: torch.device, tier: DiskTier | None, *, reads: bool = True) -> None:
        """tier: None if the folder is unusable. reads: False for rank 0, which has read its shards."""
        self._ranks, self._device, self._tier, self._reads = ranks, device, tier, reads
        self._readers = ThreadPoolExecutor(NUM_READERS, "disk-reader")
        self._awaited: dict[int, list[bytes]] = {}
        self._reading: dict[int, Future[dict[bytes, Bytes]]] = {}

    def begin(self, loads: Iterable[DiskLoad]) -> None:
        for load in loads:
            self._awaited[load.number] = load.keys
            if self._reads:
                self._reading[load.number] = self._readers.submit(self._read, load.keys)

    def own(self, entries: Sequence[DiskEntry]) -> list[DiskEntry]:
        """Return the entries with this rank's contents."""
        found = [reading.result() for reading in self._reading.values() if reading.done()] if entries else []
        return [DiskEntry(key, next(one[key] for one in found if key in one)) for key, _ in entries]

    def end(self, step: SchedulerOutput) -> dict[int, set[bytes]]:
        """Return the keys that all ranks have read, by number of a load that ended. Ranks call it together."""
        for number in step.disk_loads_to_drop:
            self._awaited.pop(number, None)
            if (reading := self._reading.pop(number, None)) is not None:
                reading.cancel()
        if not self._awaited:
            return {}
        if not step.makes_progress:
            wait([self._reading[number] for number in self._awaited if self._reads], _PATIENCE, FIRST_COMPLETED)
        own = [state for number, keys in self._awaited.items() for state in self._states(number, keys)]
        states = iter(self._ranks.largest(torch.tensor(own, device=self._device)).tolist())
        ended = {}
        for number, keys in [*self._awaited.items()]:
            of_keys = {key: next(states) for key in keys}
            if _IN_PROGRESS not in of_keys.values():
                del self._awaited[number]
                ended[number] = {key for key, state in of_keys.items() if state == _READ}
        return ended

    def _states(self, number: int, keys: Sequence[bytes]) -> list[int]:
        if not self._reads:
            return [_READ] * len(keys)
        if not self._reading[number].done():
            return [_IN_PROGRESS] * len(keys)
        found = self._reading[number].result()
        return [_READ if key in found else _MISSING for key in keys]

    def _read(self, keys: Iterable[bytes]) -> dict[bytes, Bytes]:
        if self._tier is None:
            return {}
        contents = {key: self._tier.read(key, None) for key in keys}
        return {key: content for key, content in contents.items() if content is not None}
