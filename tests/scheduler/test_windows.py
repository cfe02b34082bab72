"""Models with windows: blocks outside of them are free, whatever other layers keep."""

from __future__ import annotations

import pytest

from tests.scheduler.made_up import BLOCK, END, finish, image, plan, request, run, sampled, scheduler
from vlmserve.layer_specs import CacheBytes
from vlmserve.steps import ModelRunnerOutput, RequestFailure, SchedulerOutput


def test_blocks_behind_the_window_are_free_again():
    s = scheduler(windows=(8,), prefix_caching=True)
    s.add(request("a", 40, max_tokens=9))
    run(s)
    assert s.pool.num_used == 2, "33 of 40 computed positions are out of sight of the next one"
    while len(s):
        assert s.pool.num_used <= 3
        run(s)


def test_windowed_prompts_hold_window_and_chunk():
    s = scheduler(num_blocks=12, budget=8, windows=(8,))
    s.add(request("a", 4, max_tokens=20))
    run(s)
    s.add(request("b", 40))
    held = []
    while "b" in s:
        assert [name for name, _ in plan(run(s)[0])] == ["a", "b"]
        held.append(s.pool.num_used)
    assert max(held) <= 3 + 5, "ten for the whole prompt would not fit beside the first request"


def test_the_last_windowed_prompt_gives_way():
    s = scheduler(budget=8, windows=(8,), max_encoded_images=1)
    s.add(request("a", 41, images=[(image(number, 1), 4 * number) for number in range(10)]))
    s.add(request("b", 41, token=2))
    assert plan(run(s)[0]) == [("a", 4), ("b", 4)]
    taken = []
    while s.num_preemptions == 0:
        taken += s.pool.allocate(s.pool.num_free)
        before = [running.num_computed for running in s.running]
        step, _ = run(s)
        assert step.requests
    assert before == [20, 20], "all blocks were full"
    assert plan(step) == [("a", 4)]
    assert [waiting.request_id for waiting in s.waiting] == ["b"]
    s.pool.release(taken)
    assert {output.request_id for output in finish(s) if output.finish_reason} == {"a", "b"}


def test_visible_blocks_are_enough_for_hits():
    s = scheduler(num_blocks=12, windows=(8,), prefix_caching=True)
    s.add(request("a", 40, max_tokens=1))
    finish(s)
    s.add(request("b", 30, token=2, max_tokens=1))
    finish(s)
    s.add(request("a again", 41, max_tokens=1))
    _, (output,) = run(s)
    assert output.cached_tokens >= 36, "the beginning was evicted, what the last token attends to was not"


GEMMA = (None, *[512] * 6)
"""Columns of Gemma 3 1B: pages of 4 layers, 4 full layers and 22 with a window."""


def test_window_columns_hold_window_and_chunk() -> None:
    length, budget = 16_000, 2048
    s = scheduler(num_blocks=10_000, budget=budget, prefix_caching=True, windows=GEMMA)
    s.add(request("a", length, max_tokens=2, capacity=20_000))
    most = 0
    while s.waiting or s.running[0].num_computed < length:
        step = s.schedule()
        most = max(most, s.pool.num_used)
        run_step(s, step)
    needed = 4 * length + 22 * 512
    assert needed < s.pool.num_used * BLOCK * 4 < 1.02 * needed
    assert most <= CacheBytes(BLOCK, 1, GEMMA, {}).pages(length, budget)
    assert most * BLOCK * 4 < 1.02 * (4 * length + 24 * (512 + budget))


def run_step(s, step) -> None:
    s.update(step, sampled(s, step, 7))


def test_columns_take_runs_of_blocks() -> None:
    s = scheduler(windows=(None, 8))
    s.add(request("a", 10))
    s.schedule()
    assert [table.blocks.tolist() for table in s.running[0].tables] == [[0, 1, 2], [3, 4, 5]]


def test_a_prompts_windows_outlive_other_prompts() -> None:
    """Most of the windows of long prompts are given away first, what conversations go on with is not."""
    s = scheduler(num_blocks=100, budget=16, prefix_caching=True, windows=(None, 8, 8))
    s.add(request("turn", 40, token=1, max_tokens=1))
    finish(s)
    for number in range(2, 5):
        s.add(request("other", 60, token=number, max_tokens=1))
        finish(s)
    s.add(request("next turn", 50, token=1, max_tokens=1))
    finish(s)
    assert s.memory.cached_tokens == 40


def test_the_end_of_a_turn_is_kept() -> None:
    s = scheduler(num_blocks=48, budget=16, prefix_caching=True, windows=(None, 8))
    system = [2] * 19 + [END]
    for name, token in (("a", 3), ("b", 4)):
        asked = request(name, 60, max_tokens=1)
        asked.token_ids[:] = [*system, *[token] * 40]
        s.add(asked)
        finish(s)
        assert s.memory.cached_tokens == (20 if name == "b" else 0)
        s.add(request("other", 60, token=9, max_tokens=1))
        finish(s)


def test_where_prompts_part_is_kept() -> None:
    """Between prompts, others take all blocks but the wanted ones."""
    s = scheduler(num_blocks=70, budget=16, prefix_caching=True, windows=(None, 8))
    cached = []
    # 15 full blocks and 3 of the window at the end; then 10 and 3 more, and 2 of the window where both part.
    for token, wanted in ((3, 15 + 3), (4, 15 + 3 + 10 + 3 + 2), (5, 0)):
        asked = request("a", 60, token=2, max_tokens=1)
        asked.token_ids[20:] = [token] * 40
        s.add(asked)
        finish(s)
        cached.append(s.memory.cached_tokens)
        s.pool.release(s.pool.allocate(s.pool.num_free - wanted))
    assert cached == [0, 0, 20]


@pytest.mark.parametrize("windows", [(8,), (None, 8), (30, 5)])
def test_prompts_fill_the_pool_after_any_hit(windows: tuple[int | None, ...]) -> None:
    length = 60
    num_blocks = CacheBytes(BLOCK, 1, windows, {}).pages(length, 8)
    s = scheduler(num_blocks=num_blocks, budget=8, prefix_caching=True, windows=windows)
    for shared in range(0, length, 3):
        asked = request("a", length, max_tokens=1)
        asked.token_ids[shared:] = [2 + shared] * (length - shared)
        s.add(asked)
        for _ in range(length):
            run(s)
        assert not len(s)
    assert s.memory.cached_tokens > 0


@pytest.mark.parametrize("kind", ["out_of_memory", "not_finite"])
@pytest.mark.parametrize("windows", [(8,), (None, 8)])
@pytest.mark.parametrize("num_chunks", [0, 1, 2])
def test_failed_prompts_leave_no_blocks(windows: tuple[int | None, ...], kind: str, num_chunks: int) -> None:
    """Those that have left the window are free already."""
    s = scheduler(budget=16, prefix_caching=True, windows=windows)
    s.add(request("a", 41))
    step = s.schedule()
    [failing] = s.running
    for _ in range(num_chunks):
        run_step(s, step)
        step = s.schedule()
    used = {block for table in failing.tables for block in table.blocks}
    s.update(step, ModelRunnerOutput(token_ids={"a": []}, failures={"a": RequestFailure(kind)}))
    assert s.pool.num_cached == 0
    assert set(s.schedule().blocks_to_zero) >= used


@pytest.mark.parametrize("states", [0, 4])
@pytest.mark.parametrize("windows", [(8,), (None, 8)])
def test_preempted_requests_take_late_tokens(windows: tuple[int | None, ...], states: int) -> None:
    """Of grammars that are slow."""
    s = scheduler(windows=windows, seqs=1, states=states)
    s.add(request("row", 40, priority=1))
    s.update(s.schedule(), ModelRunnerOutput())
    s.add(request("live", 10))
    run(s)
    assert s.num_preemptions == 1
    s.update(SchedulerOutput(), ModelRunnerOutput(token_ids={"row": [7]}))
    assert [output.request_id for output in finish(s) if output.finish_reason] == ["live", "row"]


@pytest.mark.parametrize("window", [6, 7, 8, 9])
def test_no_table_is_longer_than_the_first(window: int) -> None:
    """Batches are as wide as the first one."""
    s = scheduler(budget=5, prefix_caching=True, windows=(window, 5))
    s.add(request("a", 24, max_tokens=1))
    finish(s)
    s.add(request("b", 60))
    s.schedule()
    first, second = (len(table.blocks) for table in s.running[0].tables)
    assert s.running[0].num_computed
    assert second <= first
