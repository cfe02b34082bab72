"""Models whose tokens see only so far: blocks out of sight are free."""

from __future__ import annotations

from tests.scheduler.made_up import finish, image, plan, request, run, scheduler


def test_blocks_behind_the_window_are_free_again():
    s = scheduler(window=8, prefix_caching=True)
    s.add(request("a", 40, max_tokens=9))
    run(s)
    assert s.pool.num_used == 2, "33 of 40 computed positions are out of sight of the next one"
    while len(s):
        assert s.pool.num_used <= 3
        run(s)


def test_windowed_prompts_hold_window_and_chunk():
    s = scheduler(num_blocks=12, budget=8, window=8)
    s.add(request("a", 4, max_tokens=20))
    run(s)
    s.add(request("b", 40))
    held = []
    while "b" in s:
        assert [name for name, _ in plan(run(s)[0])] == ["a", "b"]
        held.append(s.pool.num_used)
    assert max(held) <= 3 + 5, "ten for the whole prompt would not fit beside the first request"


def test_the_last_windowed_prompt_gives_way():
    s = scheduler(budget=8, window=8, max_encoded_images=1)
    s.add(request("a", 41, images=[(image(number, 1), 4 * number) for number in range(10)]))
    s.add(request("b", 41, token=2))
    assert plan(run(s)[0]) == [("a", 4), ("b", 4)]
    taken = []
    while s.num_preemptions == 0:
        taken += s.pool.allocate(s.pool.num_free)
        before = [running.num_computed for running in s.running]
        step, _ = run(s)
        assert step.requests
    assert before == [16, 16], "all blocks were full"
    assert plan(step) == [("a", 4)]
    assert [waiting.request_id for waiting in s.waiting] == ["b"]
    s.pool.release(taken)
    assert {output.request_id for output in finish(s) if output.finish_reason} == {"a", "b"}


def test_visible_blocks_are_enough_for_hits():
    s = scheduler(num_blocks=12, window=8, prefix_caching=True)
    s.add(request("a", 40, max_tokens=1))
    finish(s)
    s.add(request("b", 30, token=2, max_tokens=1))
    finish(s)
    s.add(request("a again", 41, max_tokens=1))
    _, (output,) = run(s)
    assert output.cached_tokens >= 36, "the beginning was evicted, what the last token attends to was not"
