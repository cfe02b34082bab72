"""Bidirectional spans, of a prefix or of each image, are computed in one step, whatever the budget, and only with their
images."""

from __future__ import annotations

from tests.scheduler.made_up import finish, image, plan, request, run, scheduler


def prefixed(name: str, length: int, number: int = 1, size: int = 10, **options):
    """A prompt with an image behind one token."""
    return request(name, length, images=[(image(number, size), 1)], bidirectional="prefix", **options)


def test_a_prefix_over_the_budget_runs_alone():
    s = scheduler(budget=5)
    s.add(prefixed("a", 14))
    s.add(prefixed("b", 14, number=2))
    assert plan(run(s)[0]) == [("a", 11)]
    assert plan(run(s)[0]) == [("a", 3), ("b", 11)]
    assert plan(run(s)[0]) == [("a", 1), ("b", 3)]


def test_a_prefix_chunk_continues_within_the_budget():
    s = scheduler(budget=13)
    s.add(prefixed("a", 40))
    assert plan(run(s)[0]) == [("a", 13)]
    assert plan(run(s)[0]) == [("a", 13)]


def test_a_prompt_without_an_image_is_cut_anywhere():
    s = scheduler(budget=5)
    s.add(request("a", 14, bidirectional="prefix"))
    assert plan(run(s)[0]) == [("a", 5)]


def test_a_prefix_waits_for_its_image():
    s = scheduler(encoder_bytes=10, max_encoded_images=1)
    s.add(request("holds", 30, images=[(image(3, 10), 12)], max_tokens=1))
    s.add(prefixed("a", 14))
    first, _ = run(s)
    assert plan(first) == [("holds", 30)]
    assert plan(run(s)[0]) == [("a", 14)]
    assert len(finish(s)) > 0


def test_the_rest_of_prefixes_takes_one_step():
    """Blocks of 4 hold 8 of its 11 tokens."""
    s = scheduler(budget=2, prefix_caching=True)
    s.add(prefixed("a", 14))
    finish(s)
    s.add(prefixed("b", 14, token=2))
    # Its first token is another one, and so is its prefix.
    assert plan(run(s)[0]) == [("b", 11)]
    finish(s)
    other_question = prefixed("c", 17)
    other_question.token_ids[11:] = [9] * 6
    s.add(other_question)
    assert plan(run(s)[0]) == [("c", 3)]
    assert s.requests["c"].num_cached == 8


def test_a_prefixs_first_key_covers_all():
    images = [(image(1, 10), 5), (image(2, 10), 5), (image(1, 9), 5)]
    for bidirectional, kinds in (("prefix", 3), ("images", 1), (None, 1)):
        requests = [request("a", 20, images=[one], bidirectional=bidirectional) for one in images]
        assert len({one.keys_of_full_blocks(one.chains[0], 1, 4)[0] for one in requests}) == kinds


def test_a_chunk_ends_before_a_span_too_long():
    s = scheduler(budget=5)
    s.add(request("a", 20, images=[(image(1, 6), 2), (image(2, 4), 11)], bidirectional="images"))
    assert [plan(run(s)[0]) for _ in range(5)] == [[("a", count)] for count in (2, 6, 3, 5, 4)]


def test_the_rest_of_images_takes_one_step():
    """Blocks of 4 hold 6 of its 9 tokens behind 6 of text."""
    s = scheduler(budget=2, prefix_caching=True)
    one, other = (request(name, 20, images=[(image(1, 9), 6)], bidirectional="images") for name in ("a", "b"))
    other.token_ids[15:] = [9] * 5
    s.add(one)
    finish(s)
    s.add(other)
    assert plan(run(s)[0]) == [("b", 3)]
    assert other.num_cached == 12


def _tail_key(one):
    return one.tail_key(one.chains[0], 6, 8)


def test_a_tail_key_covers_what_tokens_see():
    """Of a prompt that ends with a bidirectional span all but the last token is cached."""
    one, other = (request("a", 7, images=[(image(1, 3), 4)], bidirectional="prefix") for _ in range(2))
    other.token_ids[6] = 9
    assert _tail_key(one) != _tail_key(other)
    assert _tail_key(one) != _tail_key(request("a", 7, images=[(image(1, 3), 4)]))
