"""No slot is leaked, released twice, or found under another key."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vlmserve.cache.states import StatePool

KEYS = [bytes([number]) * 32 for number in range(6)]


def checkpoint(pool: StatePool, number: int, *, spare: bool = False) -> int:
    """An unheld checkpoint under a key."""
    slot = pool.take()
    assert slot is not None
    pool.register(slot, KEYS[number], KEYS[0], number)
    pool.release(slot, spare=spare)
    return slot


def test_padding_slot_is_never_taken():
    pool = StatePool(2)
    assert [pool.take(), pool.take(), pool.take()] == [1, 2, None]
    assert (pool.num_used, pool.num_free) == (2, 0)


def test_oldest_checkpoint_is_evicted_first():
    pool = StatePool(3)
    slots = [checkpoint(pool, number) for number in range(1, 4)]
    pool.touch(KEYS[1])
    assert pool.take() == slots[1]
    assert pool.extras(KEYS[0]) == [3, 1]


def test_spare_checkpoints_are_evicted_first():
    pool = StatePool(3)
    slots = [checkpoint(pool, number, spare=number > 1) for number in range(1, 4)]
    pool.touch(KEYS[2])
    assert [pool.take() for _ in range(3)] == [slots[2], slots[0], slots[1]], "a found one is not spare"


def test_held_checkpoints_are_not_evicted():
    pool = StatePool(1)
    slot = checkpoint(pool, 1)
    pool.hold(slot)
    assert pool.take() is None
    pool.release(slot)
    assert pool.take() == slot
    assert pool.get(KEYS[1]) is None


def test_releasing_a_free_slot_fails():
    pool = StatePool(1)
    with pytest.raises(ValueError, match="free"):
        pool.release(checkpoint(pool, 1))


class Pools(RuleBasedStateMachine):
    """Against what each slot would hold."""

    @initialize(num_slots=st.integers(1, 4))
    def begin(self, num_slots: int) -> None:
        self.pool = StatePool(num_slots)
        self.holders: dict[int, int] = {}
        self.content: dict[int, bytes] = {}

    @rule()
    def take(self) -> None:
        slot = self.pool.take()
        assert (slot is None) == (len(self.holders) == self.pool.num_slots)
        if slot is not None:
            assert slot not in self.holders
            self.holders[slot] = 1
            self.content.pop(slot, None)

    @precondition(lambda self: self.holders)
    @rule(number=st.integers(1, 5), data=st.data())
    def register(self, number: int, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.holders)))
        if slot not in self.content:
            self.pool.register(slot, KEYS[number], KEYS[number % 2], number)
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
    def hold(self, number: int) -> None:
        if (slot := self.pool.get(KEYS[number])) is not None:
            self.pool.hold(slot)
            self.holders[slot] = self.holders.get(slot, 0) + 1

    @rule(number=st.integers(1, 5))
    def forget(self, number: int) -> None:
        self.pool.forget(KEYS[number])
        self.content = {slot: key for slot, key in self.content.items() if key != KEYS[number]}

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
            numbers = [KEYS.index(key) for key in self.content.values()]
            assert pool.extras(KEYS[parent]) == sorted((n for n in numbers if n % 2 == parent), reverse=True)


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
