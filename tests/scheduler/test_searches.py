"""Beams that run out of room or fail."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.made_up import END, add_search, extend, plan, request, request_states, sampled, scheduler
from tests.scheduler.test_bookkeeping import Contents
from vlmserve.scheduler.beams import Beams
from vlmserve.steps import RequestFailure
from vlmserve.types import BeamAnswer, BeamSearch


def test_long_waiting_beam_finds_no_short_prefix():
    s = scheduler(num_blocks=2, prefix_caching=True)
    add_search(s, "a", 7, 2, 2, max_short_len=7)
    extend(s, s.schedule())
    assert len(s.waiting) == 2
    assert plan(s.schedule()) == [("a#2", 8)], "the prompt's block is of the other RoPE frequencies"


def test_all_failed_beams_have_their_blocks_cleared():
    s = scheduler()
    add_search(s, "a", 5, 2, 4)
    extend(s, s.schedule())
    step = s.schedule()
    own = [beam.tables[0].blocks[-1] for beam in s.running]
    output = sampled(s, step, 7)
    output.failures = dict.fromkeys(output.token_ids, RequestFailure("not_finite"))
    [failed] = s.update(step, output)
    assert (failed.request_id, failed.finish_reason, len(s), s.pool.num_used) == ("a", "error", 0, 0)
    assert sorted(s.schedule().blocks_to_zero) == sorted(own)


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(1, 14), st.integers(1, 3), st.integers(1, 5), st.integers(0, 1)),
            st.none(),
        ),
        max_size=20,
    ),
    st.integers(6, 12),
    st.integers(1, 5),
    st.sampled_from([None, 6, 12]),
    st.sampled_from([(None,), (None,), (5,), (None, 5, 5)]),
)
def test_beams_attend_to_their_own_tokens(operations, num_blocks, seqs, max_short_len, windows):
    """Searches with a length, a width, a number of tokens and a priority, and steps between them."""
    s = scheduler(num_blocks * len(windows), 12, seqs, prefix_caching=True, windows=windows)
    states, contents = request_states(max_short_len=max_short_len), Contents()

    def step() -> None:
        planned = s.schedule()
        batch = states.update(planned) if planned.has_work else []
        roots = {one.request_id: [chain.keys[0] for chain in one.chains] for one in s.running}
        contents.run(planned, batch, roots, windows)
        extend(s, planned)
        assert len(s.running) <= seqs

    for number, search in enumerate(operations):
        if search is None:
            step()
        else:
            *sizes, priority = search
            add_search(s, str(number), *sizes, max_short_len=max_short_len, priority=priority)
    for _ in range(1000):
        if len(s):
            step()
    assert (len(s), s.pool.num_used) == (0, 0)


def test_beams_end_after_their_minimum():
    search = Beams(BeamSearch(1), frozenset({END}), 10, 2)
    for _ in range(3):
        search.advance([[(END, -0.1), (7, -1.0)]])
    assert search.done
    assert [list(ended.token_ids) for ended in search.ended] == [[7, 7, END]]
    assert [list(beam.token_ids) for beam in search.running] == [[7, 7, 7]]
    assert search.answers() == [BeamAnswer([7, 7], "stop", END)]


def test_request_is_answered_beside_failed_beams():
    s = scheduler()
    add_search(s, "a", 5, 2, 4)
    extend(s, s.schedule())
    s.add(request("b", 5))
    step = s.schedule()
    output = sampled(s, step, 7)
    output.failures = {name: RequestFailure("not_finite") for name in output.token_ids if name != "b"}
    assert sorted(one.request_id for one in s.update(step, output)) == ["a", "b"]


def test_early_stopping_ends_with_enough_answers():
    search = Beams(BeamSearch(1, early_stopping=True), frozenset({END}), 10)
    search.advance([[(END, -1.0), (7, -0.1)]])
    assert not search.done
    search.advance([[(END, -0.1), (7, -1.0)]])
    assert search.done
    assert search.answers() == [BeamAnswer([7], "stop", END)]
