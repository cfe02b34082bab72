"""Beams that run out of room or fail."""

from __future__ import annotations

from tests.scheduler.made_up import add_search, extend, plan, sampled, scheduler
from vlmserve.steps import RequestFailure


def test_a_waiting_beam_that_gets_long_finds_no_short_prefix():
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
    own = [beam.block_table[-1] for beam in s.running]
    output = sampled(s, step, 7)
    output.failures = dict.fromkeys(output.token_ids, RequestFailure("not_finite"))
    [failed] = s.update(step, output)
    assert (failed.request_id, failed.finish_reason, len(s), s.pool.num_used) == ("a", "error", 0, 0)
    assert sorted(s.schedule().blocks_to_zero) == sorted(own)
