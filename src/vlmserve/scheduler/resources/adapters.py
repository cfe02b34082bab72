from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.resource import Failed, Resource
from vlmserve.scheduler.step_limits import StepLimits
from vlmserve.steps import AdapterLoad, SchedulerOutput


class AdapterSource(Protocol):
    def begin_step(self) -> None: ...

    def is_loaded(self, digest: bytes) -> bool:
        """If not, start loading it."""
        ...

    def take_failures(self) -> dict[bytes, str]:
        """Return each failure once."""
        ...

    def wait(self, seconds: float) -> bool:
        """Return False immediately if no adapter is being read."""
        ...


class AdapterPlaces(Resource):
    """An adapter keeps its slot until no running request needs it and another adapter does.

    Others overtake requests without a slot. Meanwhile, the adapter with the fewest running requests gets no new ones.
    """

    def __init__(self, num_slots: int, source: AdapterSource) -> None:
        self._source = source
        self._free = list(range(num_slots))[::-1]
        self._slots: dict[bytes, int] = {}
        self._users: dict[bytes, set[str]] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        # adapters without new requests in this step, and the waiting adapters
        self._draining: dict[bytes, bytes] = {}
        self._loads: list[AdapterLoad] = []
        self._planning = False

    @property
    def num_active(self) -> int:
        return len(self._users)

    def is_pending(self, digest: bytes) -> bool:
        return any(load.digest == digest for load in self._loads)

    def begin_step(self, running: Sequence[Request], limits: StepLimits | None) -> None:
        self._draining = {}
        if not self._planning:
            self._source.begin_step()
        self._planning = True

    def end_step(self, step: SchedulerOutput) -> None:
        self._planning = False
        if step.has_work:
            step.adapter_loads, self._loads = self._loads, []

    def ready(self, request: Request) -> bool:
        """Call in order of arrival."""
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

    def acquire(self, request: Request, running: Sequence[Request]) -> bool:
        self._hold(request)
        return True

    def fork(self, parent: Request, child: Request, *, first: bool) -> bool:
        self._hold(child)
        return True

    def _hold(self, request: Request) -> None:
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

    def release(self, request: Request, *, resumes: bool = False) -> None:
        users = self._users.get(request.adapter)
        if users is None or request.request_id not in users:
            return
        users.remove(request.request_id)
        if not users:
            del self._users[request.adapter]
            self._idle[request.adapter] = None

    def failed(self, waiting: Iterable[Request]) -> list[Failed]:
        failures = self._source.take_failures()
        return [Failed(one, failures[one.adapter], "model") for one in waiting if one.adapter in failures]

    def wait(self, seconds: float) -> bool:
        return self._source.wait(seconds)
