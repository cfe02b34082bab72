"""Requests that decode with drafts: several tokens in a step, of which only the accepted ones count."""

from __future__ import annotations

import pytest

from tests.scheduler.made_up import BLOCK, END, plan, request, run, scheduler


def drafting(drafts, **options):
    made_up = scheduler(**options)
    made_up.propose_drafts = lambda request: drafts
    return made_up


@pytest.mark.parametrize(("drafts", "new"), [([7, 7, 7], 4), ([7, 8, 7], 2), ([8, 7, 7], 1), ([], 1)])
def test_right_drafts_and_one_token_are_new(drafts, new):
    s = drafting(drafts)
    s.add(request("a", 6, max_tokens=50))
    run(s)
    step, (output,) = run(s)
    assert plan(step) == [("a", 1 + len(drafts))]
    assert step.draft_token_ids == ({"a": drafts} if drafts else {})
    assert output.token_ids == [7] * new
    assert s.requests["a"].num_computed == len(s.requests["a"].token_ids) - 1 == 6 + new


def test_only_blocks_of_accepted_tokens_are_found():
    s = drafting([8, 8, 8, 8], prefix_caching=True)
    s.add(request("a", 2 * BLOCK - 2, max_tokens=50))
    run(s)
    run(s)
    assert s.requests["a"].token_ids == [1] * 6 + [7, 7]
    assert s.pool.num_cached == 2, "one block of the prompt, and its tail"


def test_end_tokens_end_answers_before_drafts():
    s = drafting([END, 5, 5])
    s.add(request("a", 6, max_tokens=50))
    run(s)
    _, (output,) = run(s, token=END)
    assert (output.token_ids, output.finish_reason, output.stop_token_id) == ([], "stop", END)
    assert (s.pool.num_used, len(s)) == (0, 0)


@pytest.mark.parametrize(("max_tokens", "counts"), [(2, [1]), (3, [2]), (4, [3]), (9, [5, 3])])
def test_drafts_stay_within_the_longest_answer(max_tokens, counts):
    s = drafting([7, 7, 7, 7])
    s.add(request("a", 6, max_tokens=max_tokens))
    new = [*run(s)[1][0].token_ids]
    for count in counts:
        step, (output,) = run(s)
        assert plan(step) == [("a", count)]
        new += output.token_ids
    assert (len(new), len(s)) == (max_tokens, 0)


def test_drafts_leave_every_other_request_its_token():
    s = drafting([7] * 9, budget=5)
    for name in "abc":
        s.add(request(name, 1, max_tokens=50))
    run(s)
    assert sorted(plan(run(s)[0])) == [("a", 3), ("b", 1), ("c", 1)]


def test_drafts_take_no_block_others_need():
    s = drafting([7] * 9, num_blocks=6)
    for name in "ab":
        s.add(request(name, 4, max_tokens=50))
    run(s)
    step, _ = run(s)
    assert plan(step) == [("a", 8), ("b", 4)], "of two blocks beside those that they need, one may be for drafts"
    assert s.num_preemptions == 0


def test_requests_get_long_by_their_last_token():
    """The tokens before that are computed as those of short ones, and drafts do not change the way."""
    s = drafting([7] * 6)
    s.add(request("a", 6, max_tokens=50, max_short_len=10))
    run(s)
    step, _ = run(s)
    assert plan(step) == [("a", 1 + 3)]
    assert len(s.requests["a"].token_ids) == 11
    assert (s.requests["a"].is_long, s.requests["a"].num_computed, list(s.running)) == (True, 0, [])
    step, _ = run(s)
    assert plan(step) == [("a", 11)]
    assert step.cached_requests[0].resumed
    assert plan(run(s)[0]) == [("a", 7)]
