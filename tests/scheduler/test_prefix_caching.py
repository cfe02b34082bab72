"""What is found of earlier requests, and who shares blocks with whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vlmserve.scheduler.request as request_module
from tests.scheduler.made_up import BLOCK, finish, image, plan, request, run, scheduler
from vlmserve.cache.keys import block_key
from vlmserve.scheduler.resources.memory import take_shared_keys
from vlmserve.steps import ModelRunnerOutput, RequestFailure


def test_a_known_prompt_is_found_without_its_last():
    s = scheduler(prefix_caching=True)
    s.add(request("a", 8))
    finish(s)
    s.add(request("b", 8))
    step, (output,) = run(s)
    assert plan(step) == [("b", 1)], "the last token is computed again, for its logits"
    assert output.cached_tokens == 7
    assert (s.memory.cached_tokens, s.memory.queried_tokens) == (7, 16)


def test_generated_tokens_are_found_in_the_next_turn():
    s = scheduler(prefix_caching=True)
    s.add(request("a", 6, token=7, max_tokens=7))
    finish(s)
    s.add(request("b", 20, token=7))
    run(s)
    assert s.running[0].num_cached == 12, "13 tokens were known, the last one never had its keys computed"


def test_aborted_requests_leave_blocks_to_be_found():
    s = scheduler(prefix_caching=True, budget=8)
    s.add(request("a", 20))
    run(s)
    s.abort(["a"])
    s.add(request("b", 20))
    run(s)
    assert s.running[0].num_cached == 8


def test_running_requests_share_full_blocks():
    s = scheduler(prefix_caching=True)
    s.add(request("a", 11))
    run(s)
    s.add(request("b", 11))
    step, _ = run(s)
    a, b = s.running
    assert a.tables[0].blocks[:2] == b.tables[0].blocks[:2]
    assert step.block_copies == [("copy", a.tables[0].blocks[2], b.tables[0].blocks[2])]
    assert plan(step) == [("a", 1), ("b", 1)]


def test_equal_requests_wait_for_the_first():
    s = scheduler(prefix_caching=True)
    for name in "abc":
        s.add(request(name, 11, images=[(image(1, 4), 2)]))
    step, _ = run(s)
    assert plan(step) == [("a", 11)]
    assert len(step.images_to_encode) == 1
    step, _ = run(s)
    assert sorted(plan(step)) == [("a", 1), ("b", 1), ("c", 1)]
    assert step.images_to_encode == []
    assert s.pool.num_used == 2 + 3


def test_requests_wait_for_no_small_common_prefix():
    s = scheduler(prefix_caching=True)
    s.add(request("a", 6))
    longer = request("b", 30)
    longer.token_ids[4:] = [2] * 26
    s.add(longer)
    assert plan(run(s)[0]) == [("a", 6), ("b", 30)]


def test_requests_wait_for_half_of_what_they_miss():
    s = scheduler(prefix_caching=True)
    s.add(request("first", 9, max_tokens=1))
    finish(s)
    for name, end in (("a", 4), ("b", 2)):
        one = request(name, 24)
        one.token_ids[8:] = [3] * 8 + [end] * 8
        s.add(one)
    assert plan(run(s)[0]) == [("a", 16)]


def test_tokens_of_partly_filled_blocks_count_as_found():
    s = scheduler(prefix_caching=True)
    s.add(request("first", 7, max_tokens=1))
    finish(s)
    for name, end in (("a", 4), ("b", 2)):
        one = request(name, 11)
        one.num_shared = 6
        one.token_ids[6:] = [3] * 2 + [end] * 3
        s.add(one)
    assert plan(run(s)[0]) == [("a", 5), ("b", 5)]


@given(
    st.integers(1, 30),
    st.lists(st.tuples(st.integers(2, 40), st.integers(0, 40), st.integers(1, 2), st.integers(1, 2)), min_size=2),
    st.sampled_from([None, "images", "prefix", "prompt"]),
    st.booleans(),
)
def test_taken_keys_equal_computed_keys(num_shared, prompts, bidirectional, mixed):
    """Prompts with a length, the place of a differing token, a first token and an image."""
    earlier = None
    for length, place, first, number in prompts:
        images = [(image(number, 6), 3)] if length > 9 else []
        one, alone = (request("a", length, images=images, bidirectional=bidirectional, mixed=mixed) for _ in range(2))
        for each in (one, alone):
            each.num_shared = min(num_shared, length)
            each.token_ids[place : place + 1] = [5] * (place < length)
            each.token_ids[0] = first
        if earlier is not None:
            take_shared_keys(one, earlier, BLOCK)
        for taken, computed in zip(one.chains, alone.chains, strict=True):
            for known, each in ((taken, one), (computed, alone)):
                each.keys_of_full_blocks(known, length // BLOCK, BLOCK)
                each.tail_key(known, each.num_shared, BLOCK)
            assert (taken.keys, taken.tails) == (computed.keys, computed.tails)
        earlier = one


def test_taking_keys_keeps_own_tails():
    first, second = (request(name, BLOCK - 1) for name in "ab")
    for each in (first, second):
        each.num_shared = 1
        each.tail_key(each.chains[0], BLOCK - 1, BLOCK)
    shared = first.tail_key(first.chains[0], 1, BLOCK)
    own = second.chains[0].tails.copy()
    take_shared_keys(second, first, BLOCK)
    assert second.chains[0].tails == {**own, 1: shared}


def test_shared_keys_are_computed_once(monkeypatch):
    computed = []
    monkeypatch.setattr(
        request_module, "block_key", lambda *args, **ahead: computed.append(args) or block_key(*args, **ahead)
    )
    s = scheduler(prefix_caching=True, budget=500)
    s.add(request("first", 100, max_tokens=1))
    finish(s)
    before = len(computed)
    for end in range(2, 12):
        one = request(str(end), 102)
        one.num_shared = 100
        one.token_ids[100:] = [end] * 2
        s.add(one)
    run(s)
    assert len(computed) - before <= 100 // BLOCK + 2 * 10


def test_waiters_of_aborted_requests_compute_themselves():
    s = scheduler(prefix_caching=True, budget=8)
    s.add(request("a", 30))
    s.add(request("b", 30))
    run(s)
    s.abort(["a"])
    assert plan(run(s)[0]) == [("b", 8)]
    assert s.running[0].num_cached == 8


def test_later_requests_pass_a_waiting_one():
    s = scheduler(prefix_caching=True)
    for name, token in (("a", 1), ("b", 1), ("c", 2)):
        s.add(request(name, 20, token=token))
    assert plan(run(s)[0]) == [("a", 20), ("c", 20)]
    assert ("b", 1) in plan(run(s)[0])


def test_evicted_blocks_return_from_the_host():
    s = scheduler(num_blocks=4, host_blocks=10, prefix_caching=True)
    s.add(request("a", 11, max_tokens=1))
    finish(s)
    s.add(request("b", 15, token=2, max_tokens=1))
    step, _ = run(s)
    assert [copy.kind for copy in step.block_copies] == ["save"] * 3
    s.add(request("c", 11, max_tokens=1))
    step, (output,) = run(s)
    assert [copy.kind for copy in step.block_copies] == ["save"] * 3 + ["load"] * 3
    assert output.cached_tokens == 10
    assert plan(step) == [("c", 1)]


@pytest.mark.parametrize("num_blocks", [4, 100], ids=["on the host", "on the device"])
def test_failed_requests_forget_what_they_found(num_blocks):
    s = scheduler(num_blocks=num_blocks, host_blocks=10, prefix_caching=True)
    s.add(request("a", 11, max_tokens=1))
    finish(s)
    s.add(request("b", 15, token=2, max_tokens=1))
    finish(s)
    s.add(request("c", 11))
    step = s.schedule()
    assert plan(step) == [("c", 1)]
    s.update(step, ModelRunnerOutput(token_ids={"c": []}, failures={"c": RequestFailure("not_finite")}))
    s.add(request("d", 11, max_tokens=1))
    step, (output,) = run(s)
    assert (output.cached_tokens, plan(step)) == (0, [("d", 11)])


def test_preempted_requests_return_from_the_host():
    s = scheduler(num_blocks=6, host_blocks=20, prefix_caching=True)
    s.add(request("a", 4, max_tokens=16))
    s.add(request("b", 4, token=2, max_tokens=16))
    computed = 0
    while len(s):
        step, _ = run(s)
        computed += sum(scheduled.num_tokens for scheduled in step.requests)
    assert s.num_preemptions > 0
    assert s.memory.cache.num_loaded > 0
    assert computed == 2 * (4 + 15), "every token was computed once"


def test_a_waiting_requests_keys_are_computed_once(monkeypatch):
    lengths = []

    def counting(parent, token_ids, images, **ahead):
        lengths.append(len(token_ids))
        return block_key(parent, token_ids, images, **ahead)

    monkeypatch.setattr("vlmserve.scheduler.request.block_key", counting)
    s = scheduler(num_blocks=6, prefix_caching=True)
    s.add(request("a", 16, max_tokens=5))
    s.add(request("waits", 15, token=2))
    run(s)
    lengths.clear()
    for _ in range(3):
        run(s)
    assert [one.request_id for one in s.waiting] == ["waits"]
    assert lengths == []


@pytest.mark.parametrize(
    "other",
    [
        {"salt": "tenant"},
        {"token": 2},
        {"images": [(image(2, 4), 2)]},
        {"images": [(image(1, 4), 3)]},
        {"images": []},
    ],
)
def test_other_salts_tokens_images_and_offsets_share_nothing(other):
    s = scheduler(prefix_caching=True)
    s.add(request("a", 12, images=[(image(1, 4), 2)]))
    finish(s)
    s.add(request("b", 12, **{"images": [(image(1, 4), 2)], **other}))
    run(s)
    assert s.running[0].num_cached == 0


def test_an_image_behind_cached_blocks_is_not_encoded():
    s = scheduler(prefix_caching=True, encoder_bytes=4)
    s.add(request("a", 12, images=[(image(1, 4), 2)]))
    finish(s)
    s.add(request("evicts", 8, token=3, images=[(image(2, 4), 0)]))
    finish(s)
    s.add(request("b", 12, images=[(image(1, 4), 2)]))
    step, _ = run(s)
    assert step.images_to_encode == []


def test_the_deepest_blocks_are_evicted_first():
    s = scheduler(num_blocks=4, prefix_caching=True)
    s.add(request("a", 13, max_tokens=1))
    finish(s)
    s.add(request("b", 7, token=2, max_tokens=1))
    finish(s)
    s.add(request("c", 13, max_tokens=1))
    run(s)
    assert s.memory.cached_tokens == 8


def test_mixed_requests_find_the_blocks_of_both_passes():
    s = scheduler(prefix_caching=True)
    s.add(request("a", 9, mixed=True))
    finish(s)
    s.add(request("b", 9, mixed=True))
    run(s)
    [running] = s.running
    assert (running.num_cached, len(running.tables)) == (8, 2)
