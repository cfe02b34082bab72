"""Which states are stored on disk, and which are found there."""

from __future__ import annotations

import numpy as np

from tests.scheduler.made_up import BLOCK, request, run
from tests.scheduler.test_states import cached, conversation, stateful
from vlmserve.cache.prefix import Column
from vlmserve.cache.states import stored_key
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.checkpoints import prefix_key
from vlmserve.scheduler.resources.stored_states import stored_states


def stored(s) -> set[bytes]:
    return {key for _, key in s.memory.state_stores}


def state_keys(one: Request, places: list[int]) -> set[bytes]:
    return {stored_key(prefix_key(one, place, BLOCK)) for place in places}


def test_ends_of_turns_and_images_are_stored():
    s, one = stateful(), conversation("a", 60, 100, 200, images=2)
    s.memory.stores = []
    cached(s, one)
    assert stored(s) == state_keys(one, [61, 92, one.num_prompt_tokens - 3])
    blocks = {key for _, key in s.memory.stores}
    assert {prefix_key(one, place, BLOCK) for place in (61, 92)} <= blocks, "partly filled ones, too"


def test_prompts_without_turns_store_their_end():
    s, one = stateful(), request("a", 150)
    s.memory.stores = []
    cached(s, one)
    assert stored(s) == state_keys(one, [149])


def test_failed_requests_leave_nothing_on_disk():
    s, one = stateful(), conversation("a", 60)
    s.memory.stores = []
    s.add(one)
    run(s)
    kept = stored(s)
    s.memory.discard(one, out_of_memory=False)
    assert kept
    assert kept <= {*s.memory.forgotten}


def test_shorter_checkpoint_is_read_without_all_blocks():
    s, one = stateful(), conversation("a", 60, 100)
    s.memory.stores = []
    disk = {*state_keys(one, [61, one.num_prompt_tokens - 3])}
    found = s.memory.find(one)
    plan = stored_states(one, found, [Column(0, None, BLOCK)], disk.__contains__, block_bytes=1, state_bytes=2)
    assert plan is not None
    assert [checkpoint.num_tokens for checkpoint in plan.checkpoints] == [one.num_prompt_tokens - 3, 61]
    disk |= {*plan.checkpoints[0].blocks} - {plan.checkpoints[0].blocks[-1]}
    disk |= {*plan.checkpoints[1].blocks}
    read: list[bytes] = []

    def read_known(keys, size):
        known = [key for key in keys if key in disk]
        read.extend(known)
        return len(known)

    assert plan.read(read_known) == 61
    assert state_keys(one, [61]) <= {*read}
    assert not state_keys(one, [one.num_prompt_tokens - 3]) & {*read}, "without its blocks it is useless"


def test_read_states_are_found_and_stay():
    first, one = stateful(), conversation("a", 60, 100)
    first.memory.stores = []
    cached(first, one)
    later, again = stateful(), conversation("b", 60, 100)
    later.memory.cache.stored = {key: np.zeros(1, np.uint8) for _, key in first.memory.stores}
    later.memory.states.stored = {key: np.zeros(1, np.uint8) for _, key in first.memory.state_stores}
    assert cached(later, again) == again.num_prompt_tokens - 3
    later.memory.cache.stored = later.memory.states.stored = {}
    assert cached(later, conversation("c", 60, 100)) == again.num_prompt_tokens - 1
