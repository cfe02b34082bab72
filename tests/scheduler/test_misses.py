"""Why prompt tokens are not found."""

from __future__ import annotations

from typing import Any

from tests.scheduler.made_up import finish, request, run, scheduler
from tests.scheduler.test_states import conversation, stateful
from vlmserve.types import Missed


def reasons(s, one) -> dict[str, Any]:
    """Counts other than 0, and whether there is a time of eviction."""
    s.add(one)
    _, [output] = run(s)
    assert output.missed is not None
    missed = output.missed
    counts = {name: getattr(missed, name) for name in ("never_seen", "evicted", "no_checkpoint", "not_cacheable")}
    assert sum(counts.values()) == one.num_prompt_tokens - output.cached_tokens
    timed = missed.seconds_since_eviction is not None and missed.seconds_since_eviction >= 0
    finish(s)
    return {name: count for name, count in counts.items() if count} | ({"timed": True} if timed else {})


def test_new_tokens_were_never_seen():
    s = scheduler(prefix_caching=True)
    assert reasons(s, request("a", 11)) == {"never_seen": 10, "not_cacheable": 1}
    assert reasons(s, request("b", 11)) == {"not_cacheable": 1}
    assert reasons(s, request("c", 11, salt="tenant")) == {"never_seen": 10, "not_cacheable": 1}
    longer = request("d", 30)
    longer.token_ids[11:] = [5] * 19
    assert reasons(s, longer) == {"never_seen": 21, "not_cacheable": 1}
    assert s.memory.misses.total == Missed(never_seen=41, not_cacheable=4)


def test_evicted_tokens_are_told_apart():
    s = scheduler(num_blocks=6, prefix_caching=True)
    reasons(s, request("a", 11))
    assert reasons(s, request("other", 20, token=2)) == {"never_seen": 19, "not_cacheable": 1}
    longer = request("b", 15)
    longer.token_ids[11:] = [5] * 4
    assert reasons(s, longer) == {"evicted": 8, "never_seen": 6, "not_cacheable": 1, "timed": True}


def test_host_blocks_are_not_evicted():
    s = scheduler(num_blocks=6, host_blocks=20, prefix_caching=True)
    reasons(s, request("a", 11))
    reasons(s, request("other", 20, token=2))
    assert reasons(s, request("b", 11)) == {"not_cacheable": 1}


def test_blocks_that_return_are_forgotten():
    s = scheduler(num_blocks=6, prefix_caching=True)
    for name, token in (("a", 1), ("b", 2), ("c", 1)):
        reasons(s, request(name, 20, token=token))
    evicted = reasons(s, request("d", 20, token=2))
    assert evicted.pop("timed")
    assert evicted == {"evicted": 19, "not_cacheable": 1}
    assert reasons(s, request("e", 20, token=2)) == {"not_cacheable": 1}


def test_uncached_prompts_are_not_cacheable():
    assert reasons(scheduler(), request("a", 11)) == {"not_cacheable": 11}
    s = scheduler(prefix_caching=True)
    assert reasons(s, request("a", 11, prompt_logprobs=1)) == {"not_cacheable": 11}


def test_missing_checkpoints_are_told_apart():
    s = stateful()
    reasons(s, conversation("a", 150))
    parted = request("b", 121)
    parted.token_ids[:] = conversation("b", 150).token_ids[:121]
    assert reasons(s, parted) == {"no_checkpoint": 120 - 64, "not_cacheable": 1}


def test_evicted_checkpoints_are_told_apart():
    s = stateful(states=4)
    reasons(s, conversation("a", 150))
    for number in range(4):
        reasons(s, request(f"other {number}", 150, token=60 + number))
    assert reasons(s, conversation("b", 150)) == {
        "evicted": 128, "no_checkpoint": 28, "never_seen": 3, "not_cacheable": 1, "timed": True
    }  # fmt: skip
