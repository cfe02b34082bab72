"""Which adapters have a slot of the model, and which requests may run with them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from vlmserve.scheduler.request import Request
from vlmserve.steps import AdapterLoad


class AdapterSource(Protocol):
    """The adapters in memory."""

    def begin_step(self) -> None:
        """Another step is planned."""
        ...

    def is_loaded(self, digest: bytes) -> bool:
        """Whether an adapter is in memory; asks for it to be loaded if it is not."""
        ...


class AdapterScheduler:
    """Slots of adapters, by digest. An adapter keeps its slot while a running request needs it, and until another one
    needs the slot.

    A request whose adapter has no slot waits, and others overtake it. For its sake, the adapter with the fewest running
    requests gets no more of those that came later, so that it gives up its slot at last.
    """

    def __init__(self, num_slots: int, source: AdapterSource) -> None:
        self._source = source
        self._free = list(range(num_slots))[::-1]
        self._slots: dict[bytes, int] = {}
        self._users: dict[bytes, set[str]] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        # Adapters that get no more requests in this step, and those that wait for their slots.
        self._draining: dict[bytes, bytes] = {}
        self._loads: list[AdapterLoad] = []

    @property
    def num_active(self) -> int:
        """Adapters that running requests have."""
        return len(self._users)

    @property
    def resident(self) -> frozenset[bytes]:
        """Adapters that have a slot."""
        return frozenset(self._slots)

    def begin_step(self) -> None:
        """Plan another step: waiting requests are asked about in order of arrival."""
        self._draining = {}
        self._source.begin_step()

    def is_pending(self, digest: bytes) -> bool:
        """Whether the next step that runs loads an adapter."""
        return any(load.digest == digest for load in self._loads)

    def take_loads(self) -> list[AdapterLoad]:
        """What the next step that runs has to load."""
        loads, self._loads = self._loads, []
        return loads

    def may_run(self, request: Request) -> bool:
        """Whether a waiting request's adapter has a slot, or can have one now."""
        digest = request.adapter
        if not digest:
            return True
        if digest in self._slots:
            return digest not in self._draining
        if digest in self._draining.values() or not self._source.is_loaded(digest):
            return False
        if self._free or self._idle:
            return True
        candidates = self._users.keys() - self._draining.keys()
        if candidates:
            victim = min(candidates, key=lambda held: (len(self._users[held]), self._slots[held]))
            self._draining[victim] = digest
        return False

    def acquire(self, request: Request) -> None:
        """A request that `may_run` runs: its adapter has a slot from the next step on."""
        digest = request.adapter
        if not digest:
            return
        if digest not in self._slots:
            if self._free:
                slot = self._free.pop()
            else:
                evicted, _ = self._idle.popitem(last=False)
                slot = self._slots.pop(evicted)
                self._loads = [load for load in self._loads if load.slot != slot]
            self._slots[digest] = slot
            self._loads.append(AdapterLoad(slot, digest))
        self._idle.pop(digest, None)
        self._users.setdefault(digest, set()).add(request.request_id)

    def release(self, request: Request) -> None:
        """A request runs no more; one that did not run stays as it is."""
        users = self._users.get(request.adapter)
        if users is None or request.request_id not in users:
            return
        users.remove(request.request_id)
        if not users:
            del self._users[request.adapter]
            self._idle[request.adapter] = None
