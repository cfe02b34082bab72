"""Requests of lower priority, which have a larger number, give way to all others and lose nothing by it."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from tests.scheduler.made_up import plan, request, run, scheduler


def names(requests):
    return [one.request_id for one in requests]


def test_waiting_requests_are_ordered_by_priority():
    s = scheduler(seqs=1)
    s.add(request("running", 4))
    run(s)
    for name, priority in (("c", 1), ("a", 0), ("d", 1), ("b", 0), ("e", 2)):
        s.add(request(name, 4, priority=priority))
    assert names(s.waiting) == ["a", "b", "c", "d", "e"]


def test_requests_preempt_those_of_lower_priority():
    s = scheduler(seqs=2)
    first, second = (request(name, 4, priority=1, max_tokens=6) for name in ("first", "second"))
    s.add(first)
    s.add(second)
    run(s)
    s.add(request("live", 4))
    assert plan(run(s)[0]) == [("first", 1), ("live", 4)]
    assert names(s.waiting) == ["second"]
    assert names(s.running) == ["live", "first"]
    s.add(request("later", 4, priority=1))
    assert names(s.waiting) == ["second", "later"], "who was preempted goes on before those that came later"
    finished = []
    while len(s):
        finished += [output.request_id for output in run(s)[1] if output.finish_reason]
    assert finished == ["live", "first", "second", "later"]


def test_blocks_are_taken_from_requests_of_lower_priority():
    s = scheduler(num_blocks=8, budget=100)
    s.add(request("row", 16, priority=1, max_tokens=9))
    run(s)
    assert plan(run(s)[0]) == [("row", 1)]
    s.add(request("live", 16))
    assert plan(run(s)[0]) == [("live", 16)]
    assert names(s.waiting) == ["row"]


def test_prompts_precede_those_of_lower_priority():
    s = scheduler(budget=10)
    s.add(request("row", 25, priority=1))
    assert plan(run(s)[0]) == [("row", 10)]
    s.add(request("live", 8))
    assert sorted(plan(run(s)[0])) == [("live", 8), ("row", 2)]
    assert plan(run(s)[0])[0] == ("live", 1)


def test_equal_priorities_do_not_preempt():
    s = scheduler(seqs=1)
    s.add(request("a", 4, priority=1))
    run(s)
    s.add(request("b", 4, priority=1))
    run(s)
    assert s.num_preemptions == 0


def test_no_step_ahead_while_requests_need_room():
    s = scheduler(seqs=1)
    s.add(request("row", 4, priority=1, max_tokens=9))
    run(s)
    step = s.schedule()
    s.add(request("row 2", 4, priority=1))
    assert s.schedule_ahead(step) is not None
    s.add(request("live", 4))
    assert s.schedule_ahead(step) is None


@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 8), st.integers(0, 2), st.integers(0, 5)), min_size=1, max_size=12
    ),
    st.booleans(),
    st.integers(1, 4),
)
@example([(16, 6, 1, 0), (1, 1, 0, 2), (5, 5, 1, 0), (1, 1, 0, 2), (13, 1, 0, 2)], False, 3)
def test_nobody_overtakes_a_higher_priority(arrivals, prefix_caching, seqs):
    s = scheduler(num_blocks=14, budget=12, seqs=seqs, prefix_caching=prefix_caching)
    todo = [
        (pause, request(f"{number}", length, token=number, max_tokens=most, priority=priority))
        for number, (length, most, priority, pause) in enumerate(arrivals)
    ]
    wanted = {one.request_id: one.params.max_tokens for _, one in todo}
    got = dict.fromkeys(wanted, 0)
    while todo or len(s):
        while todo and (todo[0][0] == 0 or not len(s)):
            s.add(todo.pop(0)[1])
        if todo:
            todo[0] = (todo[0][0] - 1, todo[0][1])
        before = set(names(s.running))
        best = min(one.priority for one in [*s.waiting, *s.running])
        waited = {one.request_id: one.priority for one in s.waiting}
        step, outputs = run(s)
        assert step.requests
        admitted = {one.request_id for one in step.requests} - before
        still = [priority for name, priority in waited.items() if name not in admitted and name in names(s.waiting)]
        for name in admitted & waited.keys():
            assert waited[name] <= min(still, default=waited[name])
        scheduled = {one.request_id for one in step.requests}
        assert best in [arrivals[int(name)][2] for name in scheduled], "the highest priority goes on in every step"
        for queue in (s.running, s.waiting):
            order = [one.priority for one in queue]
            assert order == sorted(order)
        for output in outputs:
            got[output.request_id] += len(output.token_ids)
    assert got == wanted
    assert s.pool.num_used == 0
