"""Which models are loaded and unloaded, and which requests wait."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.clock import Clock
from vlmserve.scaleout.ondemand.shelf import Admit, Load, Shelf, Unload

PATIENCE = 10.0


def shelf_of(budget: int, **sizes: int) -> tuple[Shelf, Clock]:
    clock = Clock()
    shelf = Shelf(budget, PATIENCE, clock)
    for name, size in sizes.items():
        shelf.add(name, size)
    return shelf, clock


def ask(shelf: Shelf, name: str) -> bool:
    """Whether a request for the model is admitted, once it has loaded if memory allows."""
    slot = shelf.slots[name]
    if shelf.arrive(slot):
        return True
    for action in shelf.plan():
        if isinstance(action, Load):
            shelf.loaded(action.slot, action.slot.size)
    return any(action == Admit(slot) for action in shelf.plan())


def serve(shelf: Shelf, clock: Clock, *names: str) -> None:
    for name in names:
        assert ask(shelf, name)
        shelf.leave(shelf.slots[name])
        clock.now += 1


def test_least_recently_used_model_makes_room():
    shelf, clock = shelf_of(2, a=1, b=1, c=1)
    serve(shelf, clock, "a", "b", "a")
    assert not shelf.arrive(shelf.slots["c"])
    assert shelf.plan() == [Unload(shelf.slots["b"])]
    assert shelf.plan() == []
    shelf.gone(shelf.slots["b"])
    assert shelf.plan() == [Load(shelf.slots["c"])]


def test_only_as_many_models_as_needed_make_room():
    shelf, clock = shelf_of(4, a=1, b=1, c=2, d=2)
    serve(shelf, clock, "a", "b", "c")
    assert not shelf.arrive(shelf.slots["d"])
    assert shelf.plan() == [Unload(shelf.slots["a"]), Unload(shelf.slots["b"])]


def test_busy_model_drains_after_patience():
    shelf, clock = shelf_of(1, a=1, b=1)
    assert ask(shelf, "a")
    assert not ask(shelf, "b")
    assert ask(shelf, "a")
    assert shelf.next_plan() == PATIENCE
    clock.now += PATIENCE
    assert shelf.plan() == []
    assert not shelf.arrive(shelf.slots["a"])
    for _ in range(2):
        shelf.leave(shelf.slots["a"])
    assert shelf.plan() == [Unload(shelf.slots["a"])]
    shelf.gone(shelf.slots["a"])
    assert shelf.plan() == [Load(shelf.slots["b"])]


def test_draining_ends_with_its_reason():
    shelf, clock = shelf_of(1, a=1, b=1)
    assert ask(shelf, "a")
    assert not ask(shelf, "b")
    clock.now += PATIENCE
    shelf.plan()
    assert not shelf.arrive(shelf.slots["a"])
    shelf.give_up(shelf.slots["b"])
    assert shelf.plan() == [Admit(shelf.slots["a"])]


def test_small_load_overtakes_one_without_memory():
    shelf, _ = shelf_of(3, a=2, b=3, c=1)
    assert ask(shelf, "a")
    assert not ask(shelf, "b")
    assert ask(shelf, "c")


def test_patient_load_is_not_overtaken():
    shelf, clock = shelf_of(3, a=2, b=3, c=1)
    assert ask(shelf, "a")
    assert not ask(shelf, "b")
    clock.now += PATIENCE
    assert not ask(shelf, "c")


def test_claimed_memory_is_not_given_away():
    shelf, clock = shelf_of(3, a=2, b=3, c=1)
    serve(shelf, clock, "a")
    assert not shelf.arrive(shelf.slots["b"])
    assert not shelf.arrive(shelf.slots["c"])
    assert shelf.plan() == [Unload(shelf.slots["a"])]
    shelf.gone(shelf.slots["a"])
    assert shelf.plan() == [Load(shelf.slots["b"])]


def test_growth_over_the_budget_unloads_idle_models():
    shelf, clock = shelf_of(4, a=2, b=2)
    serve(shelf, clock, "a", "b")
    shelf.slots["b"].size = 3
    assert shelf.plan() == [Unload(shelf.slots["a"])]


def test_model_that_outgrows_the_budget_loads_again():
    shelf, clock = shelf_of(4, a=2, b=2)
    serve(shelf, clock, "a", "b")
    shelf.resize(shelf.slots["a"], 5)
    assert shelf.plan() == [Unload(shelf.slots["a"])]
    shelf.gone(shelf.slots["a"])
    assert not shelf.arrive(shelf.slots["a"])
    assert shelf.plan() == [Unload(shelf.slots["b"])]
    shelf.gone(shelf.slots["b"])
    assert shelf.plan() == [Load(shelf.slots["a"])]


class Machine(RuleBasedStateMachine):
    """Random requests, loads, failures and crashes."""

    @initialize(sizes=st.lists(st.integers(1, 5), min_size=2, max_size=6))
    def begin(self, sizes: list[int]) -> None:
        self.shelf, self.clock = shelf_of(7, **{f"m{n}": size for n, size in enumerate(sizes)})

    slots = st.integers(0, 5)

    def slot(self, number: int):
        every = list(self.shelf.slots.values())
        return every[number % len(every)]

    def plan(self) -> None:
        for action in self.shelf.plan():
            if isinstance(action, Unload):
                assert not action.slot.users
            if isinstance(action, Load):
                assert action.slot.waiting

    @rule(number=slots)
    def arrive(self, number: int) -> None:
        slot = self.slot(number)
        is_ready = slot.state == "loaded" and not slot.is_draining
        assert self.shelf.arrive(slot) == is_ready
        self.plan()

    @rule(number=slots)
    def leave(self, number: int) -> None:
        slot = self.slot(number)
        if slot.users:
            self.shelf.leave(slot)
            self.plan()

    @rule(number=slots)
    def give_up(self, number: int) -> None:
        slot = self.slot(number)
        if slot.waiting:
            self.shelf.give_up(slot)
            self.plan()

    @rule(number=slots, fails=st.booleans())
    def end_change(self, number: int, fails: bool) -> None:
        slot = self.slot(number)
        if slot.state == "loading" and not fails:
            self.shelf.loaded(slot, slot.size)
        elif slot.state in ("loading", "unloading"):
            slot.waiting = 0 if slot.state == "loading" else slot.waiting
            self.shelf.gone(slot)
        self.plan()

    @rule(number=slots)
    def crash(self, number: int) -> None:
        slot = self.slot(number)
        if slot.state == "loaded":
            self.shelf.gone(slot)
            self.plan()

    @rule(seconds=st.sampled_from([1.0, PATIENCE]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.plan()

    @invariant()
    def budget_holds(self) -> None:
        if hasattr(self, "shelf"):
            assert self.shelf.used <= self.shelf.budget

    @invariant()
    def loaded_models_admit_requests(self) -> None:
        if hasattr(self, "shelf"):
            assert not any(slot.waiting for slot in self.shelf.slots.values() if slot.takes_requests)

    @precondition(lambda self: hasattr(self, "shelf"))
    @rule()
    def all_requests_end(self) -> None:
        for _ in range(100):
            self.clock.now += PATIENCE
            for slot in self.shelf.slots.values():
                if slot.state == "loading":
                    self.shelf.loaded(slot, slot.size)
                elif slot.state == "unloading":
                    self.shelf.gone(slot)
                while slot.users:
                    self.shelf.leave(slot)
            self.plan()
            if not any(slot.waiting for slot in self.shelf.slots.values()):
                return
        raise AssertionError("requests wait for ever")


Machine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
test_invariants_hold = Machine.TestCase
