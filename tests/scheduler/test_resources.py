"""The questions that the scheduler asks resources, on trial with a resource that no model has yet: states in slots.

A state follows a request's tokens. It is computed up to multiples of a chunk size, forks with beams, may have to be
fetched before a request starts, may be lost, and there are few slots.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.made_up import (
    FixedLimits,
    add_search,
    extend,
    finish,
    image,
    plan,
    request,
    run,
    sampled,
    scheduler,
)
from vlmserve.scheduler.resources.resource import Failed, Resource, Resources
from vlmserve.steps import RequestFailure

CHUNK = 8


class States(Resource):
    """Slots of states.

    fetched: steps until a new request's state is there. lost: requests whose states never are.
    """

    in_decodes = True

    def __init__(self, num_slots: int, *, fetched: int = 0, lost: frozenset[str] = frozenset()) -> None:
        self.num_slots, self._fetched, self._lost = num_slots, fetched, lost
        """With fewer than are in use, the rest has to be given up."""
        self.asked: dict[str, int] = {}
        self.slots: dict[str, int] = {}
        """Tokens that each state has seen."""
        self.settled: list[tuple[str, int, int]] = []
        self.discarded: list[str] = []
        self.calls: list[str] = []
        self.may_follow = True

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self.slots)

    def begin_step(self, running, limits):
        self.calls.append("begin")

    def end_step(self, step):
        self.calls.append("end")

    def ready(self, request):
        self.asked[request.request_id] = self.asked.get(request.request_id, 0) + 1
        return self.asked[request.request_id] > self._fetched and request.request_id not in self._lost

    def missing(self, request):
        return 1

    def room(self, running):
        return self.num_free

    def acquire(self, request, running):
        if self.num_free <= 0:
            return False
        # As if there were a checkpoint wherever memory finds a prefix.
        self.slots[request.request_id] = request.num_computed
        return True

    def grow(self, request, num_tokens, spare=()):
        assert request.request_id in self.slots
        return num_tokens if self.num_free >= 0 else 0

    def extend(self, request, start, end):
        following = min(start // CHUNK * CHUNK + CHUNK, request.num_prompt_tokens)
        return end if self.limit(request, start, end) > start else following

    def limit(self, request, start, end):
        assert request.request_id in self.slots
        return end if end >= request.num_prompt_tokens else max(start, end // CHUNK * CHUNK)

    def settle(self, step, request, start, end, wanted):
        assert start <= end <= wanted
        self.settled.append((request.request_id, start, end))

    def advance(self, request, num_computed):
        assert self.slots[request.request_id] == request.num_computed, "every token is applied once"
        self.slots[request.request_id] = num_computed

    def may_plan_ahead(self, following):
        return self.may_follow

    def fork(self, parent, child, *, first):
        if first:
            self.slots[child.request_id] = self.slots.pop(parent.request_id)
        elif self.num_free > 0:
            self.slots[child.request_id] = parent.num_computed
        return child.request_id in self.slots

    def discard(self, request, *, out_of_memory):
        self.discarded.append(request.request_id)

    def release(self, request, *, resumes=False):
        self.slots.pop(request.request_id, None)

    def failed(self, waiting):
        return [Failed(one, "its state is lost", "prompt") for one in waiting if one.request_id in self._lost]

    def wait(self, seconds):
        self.calls.append(f"wait {seconds}")
        return bool(self._lost)


def names(requests) -> list[str]:
    return [one.request_id for one in requests]


def test_a_request_waits_for_a_slot_in_order():
    states = States(1)
    s = scheduler(others=[states])
    for name in "abc":
        s.add(request(name, 4, max_tokens=2))
    assert plan(run(s)[0]) == [("a", 4)]
    assert plan(run(s)[0]) == [("a", 1)]
    assert s.pool.num_used == 0, "blocks that b took before it found no slot are free"
    assert plan(run(s)[0]) == [("b", 4)]
    finish(s)
    assert not states.slots


def test_resources_that_were_taken_are_released():
    class Full(States):
        def acquire(self, request, running):
            return False

        def release(self, request, *, resumes=False):
            raise AssertionError("it has nothing of the request")

    states = States(1)
    assert not Resources([Full(1), states]).acquire(request("a", 4), [])
    assert not states.slots


@pytest.mark.parametrize(("seqs", "resumes"), [(1, True), (2, False)])
def test_parents_resume_where_a_child_waits(seqs, resumes):
    released = []

    class Noting(States):
        def release(self, request, *, resumes=False):
            released.append((request.request_id, resumes))
            super().release(request, resumes=resumes)

    s = scheduler(seqs=seqs, others=[Noting(3)])
    add_search(s, "a", 5, 2, 4)
    extend(s, s.schedule())
    assert released == [("a", resumes)]


def test_a_request_that_is_not_ready_is_overtaken():
    states = States(3, fetched=2)
    s = scheduler(others=[states])
    s.add(request("a", 4, max_tokens=9))
    assert [plan(run(s)[0]) for _ in range(3)] == [[], [], [("a", 4)]]
    s.add(request("b", 4))
    run(s)
    s.add(request("c", 4))
    states.asked["c"] = 2
    assert plan(run(s)[0]) == [("a", 1), ("c", 4)]
    assert names(s.waiting) == ["b"]


def test_a_request_that_cannot_be_ready_fails():
    states = States(3, lost=frozenset({"a"}))
    s = scheduler(others=[states])
    s.add(request("a", 4))
    s.add(request("b", 4))
    assert plan(run(s)[0]) == [("b", 4)]
    [failed] = s.end_failed()
    assert (failed.request_id, failed.finish_reason, failed.error) == ("a", "error", "its state is lost")
    assert "a" not in s
    assert s.end_failed() == []


def test_idle_engine_waits_for_the_next_ready_resource():
    lost = States(1, lost=frozenset({"a"}))
    for resources, answers in (([States(1), lost], True), ([States(1)], False)):
        assert Resources(resources).wait(0.5) == answers
        assert [one.calls for one in resources] == [["wait 0.5"]] * len(resources)


def test_a_decode_without_room_preempts_the_last_request():
    states = States(3)
    s = scheduler(others=[states], budget=100)
    for name in "abc":
        s.add(request(name, 4))
    assert plan(run(s)[0]) == [("a", 4), ("b", 4), ("c", 4)]
    states.num_slots = 2
    assert plan(s.schedule()) == [("a", 1), ("b", 1)]
    assert (names(s.running), names(s.waiting)) == (["a", "b"], ["c"])
    assert states.slots == {"a": 4, "b": 4}


def test_lower_priority_request_gives_up_its_slot():
    s = scheduler(others=[States(2)])
    for name in ("row 1", "row 2"):
        s.add(request(name, 4, priority=1, max_tokens=9))
    run(s)
    s.add(request("live", 4))
    assert plan(run(s)[0]) == [("row 1", 1), ("live", 4)]
    assert names(s.waiting) == ["row 2"]


def test_lower_priority_request_keeps_its_slot_until_needed():
    s = scheduler(others=[States(1, fetched=9)], seqs=1)
    s.add(request("row", 4, priority=1, max_tokens=9))
    for _ in range(10):
        run(s)
    s.add(request("live", 4))
    assert plan(run(s)[0]) == [("row", 1)]


def test_chunks_end_where_all_resources_agree():
    """The image is encoded in three steps, and states are computed up to multiples of 8."""
    states = States(1)
    s = scheduler(others=[states])
    s.limits = FixedLimits(others=15)
    s.add(request("a", 30, images=[(image(1, 4), 12)]))
    steps = [run(s)[0] for _ in range(4)]
    assert [plan(step) for step in steps] == [[("a", 8)], [], [("a", 22)], [("a", 1)]]
    assert [[one.products for one in step.encodings] for step in steps] == [[15], [15], [None], []]
    assert states.settled[:3] == [("a", 0, 8), ("a", 8, 8), ("a", 8, 30)]


def test_images_after_a_chunk_wait_for_later_steps():
    s = scheduler(others=[States(1)], budget=16)
    s.add(request("a", 40, images=[(image(1, 4), 4), (image(2, 4), 17)]))
    step, _ = run(s)
    assert plan(step) == [("a", 16)]
    assert [one.key[0] for one in step.images_to_encode] == [1]


def test_bidirectional_span_is_checked_as_a_whole():
    states = States(1)
    s = scheduler(others=[states], budget=10)
    s.add(request("a", 40, images=[(image(1, 16), 8)], bidirectional="images"))
    assert [plan(run(s)[0]) for _ in range(3)] == [[("a", 8)], [("a", 16)], [("a", 8)]]
    assert states.settled[1] == ("a", 8, 24), "more than the budget"


def test_resource_that_ignores_decodes_is_not_asked():
    states = States(1)
    states.in_decodes = False
    s = scheduler(others=[states])
    s.add(request("a", 4, max_tokens=5))
    run(s)
    assert states.slots == {"a": 4}
    run(s)
    assert states.slots == {"a": 4}
    assert [name for name, *_ in states.settled] == ["a"]


def test_a_resource_may_forbid_planning_ahead():
    states = States(1)
    s = scheduler(others=[states])
    s.add(request("a", 4, max_tokens=9))
    run(s)
    step = s.schedule()
    states.may_follow = False
    assert s.schedule_ahead(step) is None
    states.may_follow = True
    assert s.schedule_ahead(step) is not None


def test_a_failed_request_discards_what_it_computed():
    states = States(2)
    s = scheduler(others=[states])
    for name in "ab":
        s.add(request(name, 4))
    step = s.schedule()
    output = sampled(s, step, 7)
    output.failures = {"a": RequestFailure("not_finite"), "b": RequestFailure("grammar", "no token fits")}
    output.token_ids = {"a": [], "b": []}
    assert [one.finish_reason for one in s.update(step, output)] == ["error", "error"]
    assert states.discarded == ["a"], "what a request computed is fine if only its grammar failed"


def test_a_beam_without_room_for_its_state_waits():
    states = States(2)
    s = scheduler(others=[states])
    add_search(s, "search", 5, 3, 4)
    extend(s, s.schedule())
    assert len(s.running) == len(states.slots) == 2
    assert len(s.waiting) == 1
    assert s.pool.num_used == 1 + 2, "the beam that waits holds no blocks"


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 30), st.integers(1, 9), st.integers(0, 1)),
            st.tuples(st.just("search"), st.integers(1, 20), st.integers(1, 5), st.integers(1, 3)),
            st.tuples(st.just("abort"), st.integers(0, 9), st.none(), st.none()),
            st.tuples(st.just("slots"), st.integers(1, 4), st.none(), st.none()),
            st.tuples(st.just("step"), st.none(), st.none(), st.none()),
        ),
        max_size=40,
    ),
    st.integers(0, 2),
    st.integers(1, 5),
    st.booleans(),
)
def test_states_see_every_token_and_requests_end(operations, fetched, seqs, prefix_caching):
    states = States(3, fetched=fetched, lost=frozenset({"lost"}))
    s = scheduler(num_blocks=20, budget=12, seqs=seqs, prefix_caching=prefix_caching, others=[states])
    s.add(request("lost", 3))
    unanswered = {"lost"}

    def step() -> None:
        planned = s.schedule()
        ended = [*extend(s, planned), *s.end_failed()]
        unanswered.difference_update(one.request_id for one in ended if one.finish_reason is not None)
        assert states.slots.keys() == set(names(s.running))

    for number, (operation, size, most, other) in enumerate(operations):
        if operation == "add":
            s.add(request(str(number), size, max_tokens=most, priority=other))
        elif operation == "search":
            add_search(s, str(number), size, other, most)
        elif operation == "abort":
            s.abort([str(size)])
            unanswered.discard(str(size))
        elif operation == "slots":
            states.num_slots = size
        else:
            step()
        if operation in ("add", "search"):
            unanswered.add(str(number))
    for _ in range(500):
        if unanswered:
            step()
    assert not unanswered
    assert (len(s), s.pool.num_used, states.slots) == (0, 0, {})
