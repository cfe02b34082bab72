"""Which models are in memory: the policy, without processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

State = Literal["unloaded", "loading", "loaded", "unloading"]


@dataclass(eq=False)
class Slot:
    """size: bytes that the model takes or is expected to take."""

    name: str
    size: int
    state: State = "unloaded"
    users: int = 0
    """Requests that use it."""
    running: int = 0
    """Requests that other processes sent to it, by its latest report."""
    waiting: int = 0
    """Requests that wait for it."""
    waits_since: float = 0.0
    """When the longest waiting request came."""
    last_use: float = 0.0
    loaded_at: float = 0.0
    is_draining: bool = False
    """True: it takes no more requests, and is unloaded after the running ones."""

    @property
    def takes_requests(self) -> bool:
        return self.state == "loaded" and not self.is_draining

    @property
    def is_idle(self) -> bool:
        return self.state == "loaded" and not self.users and not self.running


class Load(NamedTuple):
    slot: Slot


class Unload(NamedTuple):
    slot: Slot


class Admit(NamedTuple):
    slot: Slot


Action = Load | Unload | Admit


class Shelf:
    """Keeps the models within `budget` bytes. `plan` decides; the caller acts and reports back.

    patience: seconds that a request waits for memory, and that a busy model stays loaded, before the model takes no
    more requests. clock: seconds.
    """

    def __init__(self, budget: int, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget = budget
        self.patience = patience
        self.slots: dict[str, Slot] = {}
        self._clock = clock

    @property
    def used(self) -> int:
        return sum(slot.size for slot in self.slots.values() if slot.state != "unloaded")

    def add(self, name: str, size: int) -> Slot:
        slot = self.slots[name] = Slot(name, size)
        return slot

    def arrive(self, slot: Slot) -> bool:
        """Returns whether a request may use the model at once; otherwise it waits."""
        if slot.takes_requests:
            self._use(slot, 1)
            return True
        if not slot.waiting:
            slot.waits_since = self._clock()
        slot.waiting += 1
        return False

    def give_up(self, slot: Slot) -> None:
        slot.waiting -= 1

    def leave(self, slot: Slot) -> None:
        self._use(slot, -1)

    def report(self, slot: Slot, running: int, idle_seconds: float) -> None:
        """Note the use of a model by requests that do not `arrive`. idle_seconds: since the latest one."""
        if slot.state == "loaded":
            slot.running = running
            slot.last_use = max(slot.last_use, self._clock() - idle_seconds)

    def loaded(self, slot: Slot, size: int) -> None:
        """`plan` admits waiting requests. size: in bytes."""
        slot.state = "loaded"
        self.resize(slot, size)
        slot.loaded_at = slot.last_use = self._clock()

    def resize(self, slot: Slot, size: int) -> None:
        """Correct a model's size. One that takes more than the whole budget counts as all of it, so it loads again."""
        slot.size = min(size, self.budget)

    def gone(self, slot: Slot) -> None:
        """The model was unloaded, has crashed, or could not be loaded."""
        slot.state, slot.users, slot.running, slot.is_draining = "unloaded", 0, 0, False

    def plan(self) -> list[Action]:
        """Decide what happens; the states are changed already.

        Models load in the order of their longest waiting requests. A load unloads idle models, least recently used
        first. While busy models keep the next load waiting, smaller loads overtake it for `patience` seconds. Then
        models that have been loaded as long take no more requests.
        """
        admitted = [self._admit(slot) for slot in self.slots.values() if slot.takes_requests and slot.waiting]
        actions = [*admitted, *self._changes()]
        # A model that need not drain after all admits requests.
        late = [self._admit(slot) for slot in self.slots.values() if slot.takes_requests and slot.waiting]
        return [*actions, *late]

    def next_plan(self) -> float | None:
        """Seconds until `plan` may decide otherwise although nothing happens."""
        wanted = self._wanted()
        busy = [slot for slot in self.slots.values() if slot.state == "loaded"] if wanted else []
        times = [*(slot.waits_since for slot in wanted), *(slot.loaded_at for slot in busy)]
        waits = [time + self.patience - self._clock() for time in times]
        return min((wait for wait in waits if wait > 0), default=None)

    def _changes(self) -> Iterator[Load | Unload]:
        drained: set[str] = set()
        room = self.budget - self.used
        """Bytes that are free, or claimed by an earlier load if negative."""
        coming = sum(slot.size for slot in self.slots.values() if slot.state == "unloading")
        if room < 0 and (idle := self._idle(-room - coming)):
            # A model takes more than expected.
            coming += sum(slot.size for slot in idle)
            yield from map(self._unload, idle)
        for slot in self._wanted():
            if slot.size <= room:
                room -= slot.size
                yield self._load(slot)
                continue
            lacking = slot.size - room - coming
            idle = self._idle(lacking)
            freed = sum(one.size for one in idle)
            if freed >= lacking:
                coming += freed
                yield from map(self._unload, idle)
            elif self._clock() - slot.waits_since < self.patience:
                continue
            else:
                yield from map(self._unload, idle)
                drained |= {one.name for one in self._busiest(lacking - freed)}
            # Later ones get only what this one leaves.
            room -= slot.size
            if drained:
                break
        for slot in self.slots.values():
            slot.is_draining = slot.name in drained

    def _wanted(self) -> list[Slot]:
        wanted = [slot for slot in self.slots.values() if slot.waiting and slot.state == "unloaded"]
        return sorted(wanted, key=lambda slot: slot.waits_since)

    def _idle(self, lacking: int) -> list[Slot]:
        """Enough idle models, or all of them."""
        idle = [slot for slot in self.slots.values() if slot.is_idle]
        return list(_enough(sorted(idle, key=lambda slot: slot.last_use), lacking))

    def _busiest(self, lacking: int) -> list[Slot]:
        """Enough busy models: draining ones first, then the longest loaded."""
        latest = self._clock() - self.patience
        busy = [slot for slot in self.slots.values() if slot.state == "loaded" and slot.loaded_at <= latest]
        return list(_enough(sorted(busy, key=lambda slot: (not slot.is_draining, slot.loaded_at)), lacking))

    def _use(self, slot: Slot, change: int) -> None:
        slot.users += change
        slot.last_use = self._clock()

    def _load(self, slot: Slot) -> Load:
        slot.state = "loading"
        return Load(slot)

    def _admit(self, slot: Slot) -> Admit:
        self._use(slot, slot.waiting)
        slot.waiting = 0
        return Admit(slot)

    def _unload(self, slot: Slot) -> Unload:
        slot.state, slot.is_draining = "unloading", False
        return Unload(slot)


def _enough(slots: Iterable[Slot], lacking: int) -> Iterator[Slot]:
    for slot in slots:
        if lacking <= 0:
            return
        lacking -= slot.size
        yield slot
