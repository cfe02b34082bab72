"""Cross-attention states: computed once, kept while requests run, and computed from an image that is there."""

from __future__ import annotations

from tests.scheduler.made_up import cross_input, finish, plan, request, run, scheduler


def test_equal_requests_share_their_states():
    s = scheduler()
    for name, text in (("a", 0), ("b", 0), ("c", 3)):
        s.add(request(name, 5, cross=cross_input(1, 10, text)))
    step, _ = run(s)
    assert plan(step) == [("a", 5), ("b", 5), ("c", 5)]
    assert [image.num_tokens for image in step.images_to_encode] == [10]
    assert [len(states.token_ids) for states in step.cross_states] == [0, 3]
    assert (s.images.queries, s.images.hits) == (3, 2)
    assert s.images.cache.used_bytes == 10 + 10 + 3
    assert s.images.cache.num_pinned == 2, "the image itself was needed in that step only"
    finish(s)
    assert s.images.cache.num_pinned == 0


def test_states_do_not_evict_their_image():
    s = scheduler(encoder_bytes=20)
    s.add(request("a", 5, cross=cross_input(1, 10)))
    finish(s)
    assert s.images.cache.used_bytes == 20, "full, and the image is older than the states"
    s.add(request("b", 5, cross=cross_input(1, 10, 4)))
    step, _ = run(s)
    assert plan(step) == [("b", 5)]
    assert not step.images_to_encode
    [states] = step.cross_states
    assert states.image_key not in step.embeddings_to_evict
    assert len(step.embeddings_to_evict) == 1
    finish(s)


def test_requests_without_room_wait():
    s = scheduler(encoder_bytes=20)
    for number in (1, 2):
        s.add(request(str(number), 5, cross=cross_input(number, 10), max_tokens=2))
    assert plan(run(s)[0]) == [("1", 5)]
    assert plan(run(s)[0]) == [("1", 1)]
    step, _ = run(s)
    assert plan(step) == [("2", 5)]
    assert len(step.embeddings_to_evict) == 2
    finish(s)
    assert s.images.cache.num_pinned == 0


def test_aborted_or_preempted_requests_let_go():
    s = scheduler(num_blocks=4)
    for number in (1, 2):
        s.add(request(str(number), 4, cross=cross_input(number, 10), max_tokens=8))
    run(s)
    while not s.num_preemptions:
        run(s)
    assert s.images.cache.num_pinned == 1
    s.abort(["1"])
    assert s.images.cache.num_pinned == 0
    finish(s)
