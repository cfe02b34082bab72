"""The order of work, the token budget, preemption, images, and how requests end."""

from __future__ import annotations

import pytest

from tests.scheduler.made_up import END, image, plan, request, run, scheduler
from vlmserve.types import Thoughts


def test_decodes_precede_prompt_chunks():
    s = scheduler(budget=10)
    s.add(request("a", 8))
    run(s)
    s.add(request("b", 20))
    assert plan(run(s)[0]) == [("a", 1), ("b", 9)]
    assert plan(run(s)[0]) == [("a", 1), ("b", 9)]
    assert plan(run(s)[0]) == [("b", 2)]


def test_requests_are_served_in_order_of_arrival():
    s = scheduler(num_blocks=4, budget=100)
    s.add(request("big", 12))
    s.add(request("bigger", 16))
    s.add(request("small", 1))
    assert plan(run(s)[0]) == [("big", 12)], "a small one must not overtake a big one that waits for blocks"


@pytest.mark.parametrize(("seqs", "num_tokens"), [(1, 32), (2, 24), (3, 16)])
def test_prompts_leave_tokens_to_admissible_requests(seqs, num_tokens):
    s = scheduler(budget=32, seqs=seqs)
    s.add(request("long", 200))
    for number in range(12):
        s.add(request(f"short {number}", 8, token=number))
    assert plan(run(s)[0])[0] == ("long", num_tokens)


@pytest.mark.parametrize(("thoughts", "is_ahead"), [(None, True), (Thoughts(7, 8), False)])
def test_budgets_of_reasoning_hold_back_reasoning_only(thoughts, is_ahead):
    s = scheduler()
    s.add(request("a", 4, thoughts=thoughts, thinking_token_budget=5))
    assert (s.schedule_ahead(s.schedule()) is not None) == is_ahead


def test_the_last_admitted_is_preempted():
    s = scheduler(num_blocks=5, budget=100)
    first, second = request("first", 4, max_tokens=9), request("second", 4, max_tokens=9)
    s.add(first)
    s.add(second)
    run(s)
    while s.num_preemptions == 0:
        run(s)
    assert second.num_computed == 0
    assert not second.tables
    assert list(s.waiting) == [second]
    generated = list(second.token_ids)
    while len(first.token_ids) < 4 + 9:
        run(s)
    step, _ = run(s)
    assert plan(step) == [("second", len(generated))]
    assert [(again.new_block_ids, again.resumed) for again in step.cached_requests] == [
        ((tuple(second.tables[0].blocks),), True)
    ], "the runner knows it, but for its blocks"


def test_an_end_token_ends_and_frees_everything():
    s = scheduler()
    s.add(request("a", 5))
    _, (output,) = run(s, token=END)
    assert (output.token_ids, output.finish_reason, output.stop_token_id) == ([], "stop", END)
    assert s.pool.num_used == 0
    assert len(s) == 0


def test_stop_token_ids_stop_despite_ignore_eos():
    s = scheduler()
    s.add(request("a", 5, ignore_eos=True, stop_token_ids=(5,)))
    assert run(s, token=END)[1][0].token_ids == [END]
    assert run(s, token=5)[1][0].finish_reason == "stop"


def test_a_chunk_ends_before_an_image_not_encoded():
    s = scheduler(max_encoded_images=1)
    s.add(request("a", 20, images=[(image(1, 4), 2), (image(2, 4), 10)]))
    step, _ = run(s)
    assert plan(step) == [("a", 10)]
    assert [one.key[0] for one in step.images_to_encode] == [1]
    step, _ = run(s)
    assert plan(step) == [("a", 10)]
    assert [one.key[0] for one in step.images_to_encode] == [2]


def test_equal_images_of_several_requests_are_encoded_once():
    s = scheduler()
    s.add(request("a", 10, images=[(image(1, 4), 2)]))
    s.add(request("b", 10, images=[(image(1, 4), 4)]))
    step, _ = run(s)
    assert len(step.images_to_encode) == 1


def test_a_cut_image_stays_pinned():
    s = scheduler(budget=7)
    s.add(request("a", 14, images=[(image(1, 6), 5)]))
    run(s)
    assert s.images.cache.num_pinned == 1
    run(s)
    assert s.images.cache.num_pinned == 0


def test_a_repeated_image_is_encoded_once():
    s = scheduler(budget=7)
    s.add(request("a", 20, images=[(image(1, 4), 1), (image(1, 4), 12)]))
    run(s)
    step, _ = run(s)
    assert step.images_to_encode == []


def test_a_repeated_image_keeps_no_other_out():
    s = scheduler(encoder_bytes=8)
    s.add(request("a", 13, images=[(image(1, 4), 0), (image(2, 5), 4), (image(1, 4), 9)]))
    encoded = []
    for _ in range(3):
        encoded += [one.key[0] for one in run(s)[0].images_to_encode]
    assert encoded == [1, 2, 1]


def test_aborting_frees_everything_at_once():
    s = scheduler(budget=7)
    s.add(request("a", 14, images=[(image(1, 6), 5)]))
    s.add(request("b", 14))
    run(s)
    s.abort(["a", "b", "nobody"])
    assert (s.pool.num_used, s.images.cache.num_pinned, len(s)) == (0, 0, 0)
    assert s.schedule().requests == []


def test_running_requests_stay_in_arrival_order():
    s = scheduler(num_blocks=6, budget=100)
    names = [f"{number}" for number in range(6)]
    for name in names:
        s.add(request(name, 4, max_tokens=9))
    finished = []
    while len(s):
        running = [one.request_id for one in s.running]
        assert running == sorted(running)
        finished += [output.request_id for output in run(s)[1] if output.finish_reason]
    assert finished == names
    assert s.num_preemptions > 0


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_max_tokens_is_exact(max_tokens):
    s = scheduler()
    s.add(request("a", 3, max_tokens=max_tokens))
    tokens = []
    while len(s):
        tokens += run(s)[1][0].token_ids
    assert len(tokens) == max_tokens
