"""What sequences look at by cross attention: made once, kept while they run, and made of a picture that is there."""

from __future__ import annotations

from tests.scheduler.made_up import finish, looking, plan, run, scheduler, sequence


def test_equal_requests_share_what_they_look_at_and_others_the_picture():
    s = scheduler()
    for name, text in (("a", 0), ("b", 0), ("c", 3)):
        s.add(sequence(name, 5, cross=looking(1, 10, text)))
    step, _ = run(s)
    assert plan(step) == [("a", 5), ("b", 5), ("c", 5)]
    assert [image.num_tokens for image in step.encode] == [10]
    assert [look.cross.num_states for look in step.look] == [10, 3]
    assert (s.encoder_queries, s.encoder_hits) == (3, 2)
    assert s.encoder_cache.used_bytes == 10 + 10 + 3
    assert s.encoder_cache.num_pinned == 2, "the picture itself was needed in that step only"
    finish(s)
    assert s.encoder_cache.num_pinned == 0


def test_a_picture_that_is_known_is_not_evicted_for_what_is_made_of_it():
    s = scheduler(encoder_bytes=20)
    s.add(sequence("a", 5, cross=looking(1, 10)))
    finish(s)
    assert s.encoder_cache.used_bytes == 20, "full, and the picture is older than what was looked at"
    s.add(sequence("b", 5, cross=looking(1, 10, 4)))
    step, _ = run(s)
    assert plan(step) == [("b", 5)]
    assert not step.encode
    [look] = step.look
    assert look.cross.image.key not in step.evict
    assert len(step.evict) == 1
    finish(s)


def test_who_finds_no_room_waits_for_who_has_it():
    s = scheduler(encoder_bytes=20)
    for number in (1, 2):
        s.add(sequence(str(number), 5, cross=looking(number, 10), max_tokens=2))
    assert plan(run(s)[0]) == [("1", 5)]
    assert plan(run(s)[0]) == [("1", 1)]
    step, _ = run(s)
    assert plan(step) == [("2", 5)]
    assert len(step.evict) == 2
    finish(s)
    assert s.encoder_cache.num_pinned == 0


def test_one_that_is_aborted_or_preempted_lets_go_of_it():
    s = scheduler(num_blocks=4)
    for number in (1, 2):
        s.add(sequence(str(number), 4, cross=looking(number, 10), max_tokens=8))
    run(s)
    while not s.num_preemptions:
        run(s)
    assert s.encoder_cache.num_pinned == 1
    s.abort(["1"])
    assert s.encoder_cache.num_pinned == 0
    finish(s)
