"""No slot is leaked, released twice, or found under another key."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vlmserve.cache.states import StatePool, restore, stored_key
from vlmserve.steps import BlockCopy, DiskEntry

KEYS = [bytes([number]) * 32 for number in range(6)]


def checkpoint(pool: StatePool, number: int, *, spare: bool = False) -> int:
    """An unheld checkpoint under a key."""
    [slot] = pool.take(1)
    pool.register(slot, KEYS[number], KEYS[0], number)
    pool.release(slot, spare=spare)
    return slot


def test_padding_slot_is_never_taken():
    pool = StatePool(2)
    assert [pool.take(1), pool.take(1), pool.take(1)] == [[1], [2], []]
    assert (pool.num_used, pool.num_free) == (2, 0)


def test_oldest_checkpoint_is_evicted_first():
    pool = StatePool(3)
    slots = [checkpoint(pool, number) for number in range(1, 4)]
    pool.touch(KEYS[1])
    assert pool.take(1) == [slots[1]]
    assert pool.checkpoints.after(KEYS[0]) == [3, 1]


def test_spare_checkpoints_are_evicted_first():
    pool = StatePool(3)
    slots = [checkpoint(pool, number, spare=number > 1) for number in range(1, 4)]
    pool.touch(KEYS[2])
    assert pool.take(3) == [slots[2], slots[0], slots[1]], "a found one is not spare"


def test_states_read_from_disk_become_checkpoints():
    pool = StatePool(3)
    found = checkpoint(pool, 1)
    content = np.zeros(4, np.uint8)
    pool.stored = {stored_key(KEYS[2]): content}
    restore(pool, [KEYS[1], KEYS[2]], [KEYS[0], KEYS[0]], 5)
    assert pool.get(KEYS[1]) == found, "taking a slot evicted it"
    slot = pool.get(KEYS[2])
    assert pool.copies == [BlockCopy("fill", 0, slot)]
    assert pool.contents == [DiskEntry(stored_key(KEYS[2]), content)]
    assert pool.checkpoints.after(KEYS[0]) == [5, 1]
    assert pool.num_used == 0
    restore(pool, [KEYS[2]], [KEYS[0]], 5)
    assert len(pool.copies) == 1, "memory has it"


def test_restored_states_take_the_last_slot():
    pool = StatePool(1)
    pool.stored = {stored_key(KEYS[1]): np.zeros(4, np.uint8)}
    restore(pool, [KEYS[1]], [KEYS[0]], 5)
    assert pool.begin([KEYS[1]], 1) == ([1], [1])


def test_held_checkpoints_are_not_evicted():
    pool = StatePool(2)
    slot = checkpoint(pool, 1)
    assert pool.begin([KEYS[1]], 1) == ([2], [slot])
    assert pool.take(1) == []
    pool.release(slot)
    assert pool.take(1) == [slot]
    assert pool.get(KEYS[1]) is None


def test_states_go_on_in_the_last_slots():
    pool = StatePool(2)
    first, second = checkpoint(pool, 1), checkpoint(pool, 2)
    assert pool.begin([KEYS[1], KEYS[2]], 2) == ([first, second], [first, second])
    assert (KEYS[1] in pool.checkpoints, pool.num_free) == (False, 0)


def test_too_few_slots_take_none():
    pool = StatePool(2)
    assert pool.take(3) == []
    assert pool.num_free == 2


def test_evicted_checkpoint_is_loaded_into_working_slot():
    pool = StatePool(1, num_host_slots=1)
    checkpoint(pool, 1)
    checkpoint(pool, 2)
    assert (pool.get(KEYS[1]), KEYS[1] in pool.checkpoints, pool.checkpoints.after(KEYS[0])) == (None, True, [2, 1])
    assert pool.begin([KEYS[1]], 1) == ([1], [1])
    assert pool.copies == [("save", 1, 0), ("load", 0, 1)]
    assert KEYS[2] not in pool.checkpoints, "the only host slot was in use"
    pool.forget(KEYS[1])
    assert (KEYS[1] in pool.checkpoints, pool.num_on_host) == (False, 0)


def test_releasing_a_free_slot_fails():
    pool = StatePool(1)
    with pytest.raises(ValueError, match="free"):
        pool.release(checkpoint(pool, 1))


class Pools(RuleBasedStateMachine):
    """Against what each slot would hold."""

    @initialize(num_slots=st.integers(1, 4), num_host_slots=st.integers(0, 2))
    def start(self, num_slots: int, num_host_slots: int) -> None:
        self.pool = StatePool(num_slots, num_host_slots)
        self.holders: dict[int, int] = {}
        self.content: dict[int, bytes] = {}
        # What each slot and each host slot really holds.
        self.written: dict[int, bytes] = {}
        self.on_host: dict[int, bytes] = {}

    def copy(self) -> None:
        """Do what the runner would."""
        for kind, source, target in self.pool.copies:
            if kind == "save":
                self.on_host[target] = self.written[source]
            else:
                self.written[target] = self.on_host[source]
        self.pool.copies.clear()

    def taken(self, slots: list[int]) -> None:
        for slot in slots:
            assert slot not in self.holders
            self.holders[slot] = 1
            self.content.pop(slot, None)

    @rule(count=st.integers(1, 2))
    def take(self, count: int) -> None:
        slots = self.pool.take(count)
        assert len(slots) == (count if count <= self.pool.num_slots - len(self.holders) else 0)
        self.taken(slots)
        self.copy()

    @rule(numbers=st.lists(st.integers(1, 5), max_size=2, unique=True), count=st.integers(1, 2))
    def begin(self, numbers: list[int], count: int) -> None:
        keys = [KEYS[number] for number in numbers]
        count = len(keys) or count
        if not all(key in self.pool.checkpoints for key in keys) or self.pool.num_free < count:
            return
        slots, sources = self.pool.begin(keys, count)
        self.copy()
        assert [self.written[slot] for slot in sources] == keys
        for slot in {*sources} - {*slots}:
            self.holders[slot] = self.holders.get(slot, 0) + 1
        self.taken(slots)

    @precondition(lambda self: self.holders)
    @rule(number=st.integers(1, 5), data=st.data())
    def register(self, number: int, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.holders)))
        if slot not in self.content:
            self.pool.register(slot, KEYS[number], KEYS[number % 2], number)
            self.written[slot] = KEYS[number]
            if KEYS[number] not in self.content.values():
                self.content[slot] = KEYS[number]

    @precondition(lambda self: self.holders)
    @rule(spare=st.booleans(), data=st.data())
    def release(self, spare: bool, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.holders)))
        self.pool.release(slot, spare=spare)
        self.holders[slot] -= 1
        if not self.holders[slot]:
            del self.holders[slot]

    @rule(number=st.integers(1, 5))
    def forget(self, number: int) -> None:
        self.pool.forget(KEYS[number])
        self.content = {slot: key for slot, key in self.content.items() if key != KEYS[number]}
        assert KEYS[number] not in self.pool.checkpoints

    @rule(number=st.integers(1, 5))
    def touch(self, number: int) -> None:
        self.pool.touch(KEYS[number])

    @invariant()
    def slots_add_up(self) -> None:
        pool = self.pool
        assert pool.num_used == len(self.holders)
        assert pool.num_used + pool.num_free == pool.num_slots
        assert pool.num_cached == len(self.content)
        for number in range(1, 6):
            assert pool.get(KEYS[number]) == next((s for s, key in self.content.items() if key == KEYS[number]), None)
        for parent in (0, 1):
            numbers = [number for number in range(1, 6) if KEYS[number] in pool.checkpoints]
            assert {*self.content.values()} <= {KEYS[number] for number in numbers}
            assert len(numbers) <= pool.num_cached + pool.num_on_host
            assert pool.checkpoints.after(KEYS[parent]) == sorted((n for n in numbers if n % 2 == parent), reverse=True)


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
