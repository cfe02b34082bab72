"""Images that take several steps because others are generating: how far each gets, and when it is given up."""

from __future__ import annotations

import pytest

from tests.scheduler.made_up import (
    FixedLimits,
    cross_input,
    finish,
    image,
    plan,
    request,
    run,
    sampled,
    scheduler,
)
from vlmserve.scheduler.scheduler import Scheduler
from vlmserve.steps import ModelRunnerOutput, RequestFailure, SchedulerOutput


def busy_scheduler(budget: float, **settings) -> Scheduler:
    """One in which a request generates, and steps may make so many multiplications; an image's embedding takes 10."""
    s = scheduler(**settings)
    s.limits = FixedLimits(budget)
    s.add(request("text", 3, max_tokens=1000))
    run(s)
    return s


def encoded(step: SchedulerOutput) -> list[tuple[int, int | None]]:
    return [(one.key[0], one.products) for one in step.encodings]


def test_an_image_takes_steps_by_its_macs():
    s = busy_scheduler(15)
    s.add(request("a", 10, images=[(image(1, 4), 2)]))
    step, _ = run(s)
    assert (plan(step), encoded(step), step.images_to_encode) == ([("text", 1), ("a", 2)], [(1, 15)], [])
    assert step.encodings[0].image is not None
    step, _ = run(s)
    assert (plan(step), encoded(step)) == ([("text", 1)], [(1, 15)])
    assert step.encodings[0].image is None, "pixels are sent once"
    step, _ = run(s)
    assert (plan(step), encoded(step)) == ([("text", 1), ("a", 8)], [(1, None)])
    step, _ = run(s)
    assert (plan(step), step.encoded_keys) == ([("text", 1), ("a", 1)], [])


def test_only_new_images_wait_for_the_next_step():
    s = scheduler(max_encoded_images=1)
    s.add(request("first", 8, images=[(image(1, 4), 0)]))
    s.schedule()
    places = {"same": (1, 0), "new": (2, 0), "later": (2, 4), "stored": (3, 0)}
    s.images.stored = {image(3, 4).key: b""}
    room = {
        name: s.images.grow(request(name, 8, images=[(image(number, 4), start)]), 3)
        for name, (number, start) in places.items()
    }
    assert room == {"same": 3, "new": 0, "later": 3, "stored": 3}


def test_leftover_budget_goes_to_the_next_image():
    s = busy_scheduler(55)
    for number in (1, 2, 3):
        s.add(request(str(number), 8, images=[(image(number, 4), 2)]))
    step, _ = run(s)
    assert [one.key[0] for one in step.images_to_encode] == [1]
    assert encoded(step) == [(2, 15)]
    assert ("3", 2) in plan(step)
    step, _ = run(s)
    assert (step.images_to_encode, encoded(step)) == ([], [(2, None), (3, 30)])


def test_limits_without_generating_requests_are_their_own():
    s = scheduler()
    s.limits = FixedLimits(1, others=25)
    s.add(request("a", 10, images=[(image(1, 4), 2)]))
    assert [encoded(run(s)[0]) for _ in range(2)] == [[(1, 25)], [(1, None)]]


def test_a_stream_gets_a_token_between_all_pieces():
    s = busy_scheduler(10)
    s.add(request("photo", 120, images=[(image(1, 100), 2)]))
    for _ in range(99):
        step, outputs = run(s)
        assert encoded(step) == [(1, 10)]
        assert [one.request_id for one in outputs] == ["text"]
    assert encoded(run(s)[0]) == [(1, None)]


def test_a_short_request_finishes_between_pieces():
    s = scheduler()
    s.limits = FixedLimits(10, others=25)
    s.add(request("photo", 120, images=[(image(1, 100), 2)]))
    run(s)
    s.add(request("short", 10, max_tokens=2))
    assert [[one.request_id for one in run(s)[1]] for _ in range(2)] == [["short"], ["short"]]


def test_images_finish_in_order_of_arrival():
    s = scheduler(max_encoded_images=4)
    s.limits = FixedLimits(20, others=20)
    for number in range(1, 5):
        s.add(request(str(number), 12, images=[(image(number, 10), 1)], max_tokens=1))
    first_tokens = {}
    for step in range(1, 100):
        for output in run(s)[1]:
            first_tokens[output.request_id] = step
        if not len(s):
            break
    # Each image takes five steps.
    assert first_tokens == {"1": 5, "2": 10, "3": 15, "4": 20}


def test_small_images_do_not_wait_for_huge_ones():
    s = scheduler(num_blocks=400)
    s.limits = FixedLimits(20, others=20)
    s.add(request("huge", 600, images=[(image(1, 500), 1)], max_tokens=1))
    run(s)
    s.add(request("small", 6, images=[(image(2, 4), 1)], max_tokens=1))
    steps = []
    for _ in range(6):
        step, outputs = run(s)
        steps.append((encoded(step), len(step.images_to_encode), [one.request_id for one in outputs]))
    # The small image needs 40 MACs: it is admitted in the first step and then gets half of each.
    assert steps[0] == ([(1, 20)], 0, [])
    assert steps[1:3] == [([(1, 10), (2, 10)], 0, [])] * 2
    assert [ended for *_, ended in steps].count(["small"]) == 1
    assert steps[-1][0] == [(1, 20)]


def test_prompts_finish_in_order_of_arrival():
    s = scheduler()
    s.limits = FixedLimits(tokens=8)
    for name in "abc":
        s.add(request(name, 16, max_tokens=1, token=ord(name)))
    steps = [[one.request_id for one in run(s)[1]] for _ in range(5)]
    assert steps == [[], ["a"], [], ["b"], ["c"]], "the last one is alone"
    assert not any(s.limits.generating), "no stream waits"


def test_short_prompts_do_not_wait_for_long_ones():
    s = scheduler(budget=8)
    s.add(request("long", 200, max_tokens=1))
    s.add(request("equal", 180, max_tokens=1, token=2))
    run(s)
    s.add(request("short", 6, max_tokens=1, token=3))
    assert plan(run(s)[0]) == [("long", 4), ("equal", 2), ("short", 2)]
    ended = [one.request_id for one in finish(s)]
    assert ended == ["short", "long", "equal"]


def test_a_prompt_beside_a_stream_takes_several_steps():
    s = busy_scheduler(10)
    s.limits = FixedLimits(tokens=8)
    s.add(request("long", 30))
    assert [plan(run(s)[0]) for _ in range(4)] == [[("text", 1), ("long", 8)]] * 3 + [[("text", 1), ("long", 6)]]
    assert s.limits.generating == [True] * 4
    s.abort(["text", "long"])
    s.add(request("alone", 30))
    assert plan(run(s)[0]) == [("alone", 30)]


def test_idle_engines_finish_images_at_once():
    s = busy_scheduler(1)
    s.add(request("a", 10, images=[(image(1, 4), 2)]))
    run(s)
    s.abort(["text"])
    step, _ = run(s)
    assert encoded(step) == [(1, None)]
    finish(s)


def test_two_requests_wait_for_one_image():
    s = busy_scheduler(15)
    for name in ("a", "b"):
        s.add(request(name, 10, images=[(image(1, 4), 2)], token=ord(name)))
    seen = [encoded(run(s)[0]) for _ in range(3)]
    assert seen == [[(1, 15)], [(1, 15)], [(1, None)]]
    assert (s.images.queries, s.images.hits) == (2, 1)


def test_an_image_nobody_needs_is_given_up():
    s = busy_scheduler(15)
    s.add(request("a", 10, images=[(image(1, 4), 2)]))
    run(s)
    s.abort(["a"])
    assert (s.images.cache.used_bytes, len(s.images.cache)) == (0, 0)
    step, _ = run(s)
    assert (step.embeddings_to_evict, step.encodings) == ([image(1, 4).key], [])
    s.add(request("again", 10, images=[(image(1, 4), 2)]))
    step, _ = run(s)
    assert (encoded(step), step.embeddings_to_evict) == ([(1, 15)], [])
    assert step.encodings[0].image is not None, "it begins anew"


def test_a_given_up_image_may_restart_at_once():
    s = busy_scheduler(15)
    s.add(request("a", 10, images=[(image(1, 4), 2)]))
    run(s)
    s.abort(["a"])
    s.add(request("b", 10, images=[(image(1, 4), 2)]))
    step, _ = run(s)
    assert (step.embeddings_to_evict, encoded(step)) == ([image(1, 4).key], [(1, 15)])
    assert step.encodings[0].image is not None


def test_an_image_that_another_one_needs_goes_on():
    s = busy_scheduler(15)
    for name in ("a", "b"):
        s.add(request(name, 10, images=[(image(1, 4), 2)], token=ord(name)))
    run(s)
    s.abort(["a"])
    step, _ = run(s)
    assert (step.embeddings_to_evict, encoded(step)) == ([], [(1, 15)])


def test_a_preempted_request_gives_up_its_image():
    s = busy_scheduler(1, num_blocks=6)
    s.add(request("a", 12, images=[(image(1, 4), 2)]))
    run(s)
    while not s.num_preemptions:
        run(s)
    assert len(s.images.cache) == 0
    assert not s.images.unfinished
    s.abort(["text"])
    assert [one.token_ids for one in finish(s)] == [[7]] * 3


def test_a_request_that_fails_gives_its_image_up():
    """Its logits for the first token of a preempted answer, say; here those of the prompt before the image."""
    s = busy_scheduler(15)
    s.add(request("a", 10, images=[(image(1, 4), 2)]))
    step = s.schedule()
    output = sampled(s, step, 7)
    output.token_ids["a"] = []
    output.failures["a"] = RequestFailure("not_finite")
    ended = {one.request_id: one.finish_reason for one in s.update(step, output)}
    assert ended == {"text": None, "a": "error"}
    assert len(s.images.cache) == 0
    assert s.schedule().embeddings_to_evict == [image(1, 4).key]


def test_cross_attention_states_wait_for_their_image():
    s = busy_scheduler(15)
    s.add(request("a", 5, cross=cross_input(1, 4, 3)))
    s.add(request("b", 5, cross=cross_input(1, 4, 3), token=2))
    steps = [run(s)[0] for _ in range(3)]
    assert [encoded(step) for step in steps] == [[(1, 15)], [(1, 15)], [(1, None)]]
    assert [len(step.cross_states) for step in steps] == [0, 0, 1]
    assert plan(steps[2]) == [("text", 1), ("a", 5), ("b", 5)]
    assert (s.images.queries, s.images.hits) == (2, 1)
    s.abort(["a", "b"])
    assert s.images.cache.num_pinned == 0


def test_the_last_token_waits_for_the_encoder_budget():
    s = scheduler(num_blocks=3, budget=2, seqs=2, encoder_bytes=8, max_encoded_images=1)
    s.limits = FixedLimits(1)
    s.add(request("text", 2))
    run(s)
    for name in ("a", "b"):
        s.add(request(name, 1, max_tokens=1, cross=cross_input(1, 1)))
    for _ in range(20):
        step, _ = run(s)
        assert len({*step.encoded_keys}) == len(step.encoded_keys)
        assert sum(one.products or 0 for one in step.encodings) <= 1
        if len(s) == 0:
            break
    assert len(s) == 0


def test_the_last_token_waits_for_the_image_limit():
    s = scheduler(num_blocks=5, budget=2, seqs=3, max_encoded_images=1)
    for name, number in (("a", 1), ("b", 2), ("c", 3)):
        s.add(request(name, 1, max_tokens=1, images=[(image(number, 1), 0)]))
    for number, name in enumerate(("a", "b", "c"), 1):
        step, _ = run(s)
        assert (plan(step), step.encoded_keys) == ([(name, 1)], [image(number, 1).key])
    assert s.num_preemptions == 0


@pytest.mark.parametrize("aborted", [["a"], ["b"], ["a", "b"]])
def test_missing_cross_states_are_not_evicted(aborted):
    s = busy_scheduler(15)
    for name, text in (("a", 3), ("b", 2)):
        s.add(request(name, 5, cross=cross_input(1, 4, text)))
    run(s)
    s.abort(aborted)
    step, _ = run(s)
    assert step.embeddings_to_evict == ([image(1, 4).key] if len(aborted) == 2 else [])
    s.abort(["text"])
    answers = finish(s)
    assert {one.request_id for one in answers} == {"a", "b"} - {*aborted}
    assert s.images.cache.num_pinned == 0


def test_requests_that_wait_for_images_are_counted():
    s = busy_scheduler(15)
    s.limits = limits = FixedLimits(15)
    s.add(request("a", 10, images=[(image(1, 4), 2)]))
    s.add(request("b", 10, images=[(image(2, 4), 2)]))
    s.add(request("long", 10))
    for _ in range(7):
        run(s)
    # The first step admits them, each image takes three. `long` has no image.
    assert limits.asked == [0, 2, 2, 1, 1, 1, 0]


def test_an_image_alone_needs_no_output():
    s = busy_scheduler(15)
    s.abort(["text"])
    s.limits = FixedLimits(15)
    s.add(request("a", 10, images=[(image(1, 4), 0)]))
    step = s.schedule()
    assert s.update(step, ModelRunnerOutput(token_ids={"a": [7]}))[0].token_ids == [7]
