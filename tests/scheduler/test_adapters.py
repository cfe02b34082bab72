"""Slots for adapters: who waits, who overtakes, and that nobody waits for ever."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from vlmserve.scheduler.resources.adapters import AdapterPlaces
from vlmserve.steps import AdapterLoad, SchedulerOutput


class Memory:
    """All adapters but one."""

    def __init__(self, missing: bytes = b"") -> None:
        self._missing = missing

    def begin_step(self) -> None:
        pass

    def is_loaded(self, digest: bytes) -> bool:
        return digest != self._missing


def loads(slots: AdapterPlaces) -> list[AdapterLoad]:
    """What the next step loads."""
    step = SchedulerOutput(blocks_to_zero=[0])
    slots.end_step(step)
    return step.adapter_loads


def request(number: int, adapter: str) -> SimpleNamespace:
    return SimpleNamespace(request_id=str(number), adapter=adapter.encode())


def test_only_requests_without_a_slot_wait():
    slots = AdapterPlaces(1, Memory())
    first, other, base, same = request(0, "a"), request(1, "b"), request(2, ""), request(3, "a")
    slots.begin_step([], None)
    assert slots.ready(first)
    slots.acquire(first, [])
    assert slots.ready(same), "nobody waits for its slot"
    assert not slots.ready(other)
    assert slots.ready(base)
    assert not slots.ready(same), "or it might keep the slot for ever"
    slots.release(first)
    slots.begin_step([], None)
    assert slots.ready(other)
    slots.acquire(other, [])
    assert [load.digest for load in loads(slots)] == [b"b"], "what never ran need not be loaded"


def test_an_unloaded_adapter_takes_no_slot():
    slots = AdapterPlaces(1, Memory(missing=b"b"))
    first = request(0, "a")
    slots.acquire(first, [])
    slots.begin_step([], None)
    assert not slots.ready(request(1, "b"))
    assert slots.ready(request(2, "a"))


@given(st.integers(1, 3), st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=40))
def test_running_requests_have_their_adapters_in_slots(num_slots, wanted):
    """wanted: an adapter and how many steps it runs for; 0 is the base model."""
    slots = AdapterPlaces(num_slots, Memory())
    waiting = [request(number, str(adapter or "")) for number, (adapter, _) in enumerate(wanted)]
    left = {str(number): steps for number, (_, steps) in enumerate(wanted)}
    running, held = [], {}
    for _ in range(5 * len(wanted) + 1):
        slots.begin_step([], None)
        for one in waiting[:]:
            if slots.ready(one):
                waiting.remove(one)
                slots.acquire(one, [])
                running.append(one)
        for load in loads(slots):
            held[load.slot] = load.digest
        assert len(held) <= num_slots
        assert all(one.adapter in held.values() for one in running if one.adapter)
        assert slots.num_active == len({one.adapter for one in running if one.adapter})
        for one in running[:]:
            left[one.request_id] -= 1
            if not left[one.request_id]:
                running.remove(one)
                slots.release(one)
    assert not waiting
    assert not running
    assert slots.num_active == 0
