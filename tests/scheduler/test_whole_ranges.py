"""Tokens that see each other, of a prefix or of each picture, are computed in one go, whatever the budget, and only
with their pictures."""

from __future__ import annotations

from tests.scheduler.made_up import finish, image, plan, run, scheduler, sequence


def seeing(name: str, length: int, picture: int = 1, size: int = 10, **options):
    """A prompt with a picture behind one token."""
    return sequence(name, length, images=[(image(picture, size), 1)], sees_ahead="prefix", **options)


def test_a_prefix_goes_over_the_budget_and_nothing_comes_beside_it():
    s = scheduler(budget=5)
    s.add(seeing("a", 14))
    s.add(seeing("b", 14, picture=2))
    assert plan(run(s)[0]) == [("a", 11)]
    assert plan(run(s)[0]) == [("a", 3), ("b", 11)]
    assert plan(run(s)[0]) == [("a", 1), ("b", 3)]


def test_a_prefix_goes_on_with_the_prompt_as_far_as_the_budget_reaches():
    s = scheduler(budget=13)
    s.add(seeing("a", 40))
    assert plan(run(s)[0]) == [("a", 13)]
    assert plan(run(s)[0]) == [("a", 13)]


def test_a_prompt_without_a_picture_is_cut_anywhere():
    s = scheduler(budget=5)
    s.add(sequence("a", 14, sees_ahead="prefix"))
    assert plan(run(s)[0]) == [("a", 5)]


def test_nothing_of_a_prefix_is_computed_before_its_picture_can_be_encoded():
    s = scheduler(encoder_bytes=10, max_encoded_images=1)
    s.add(sequence("holds", 30, images=[(image(3, 10), 12)], max_tokens=1))
    s.add(seeing("a", 14))
    first, _ = run(s)
    assert plan(first) == [("holds", 30)]
    assert plan(run(s)[0]) == [("a", 14)]
    assert len(finish(s)) > 0


def test_what_is_left_of_a_known_prefix_is_computed_in_one_go():
    """Blocks of 4 hold 8 of its 11 tokens."""
    s = scheduler(budget=2, prefix_caching=True)
    s.add(seeing("a", 14))
    finish(s)
    s.add(seeing("b", 14, token=2))
    # Its first token is another one, and so is its prefix.
    assert plan(run(s)[0]) == [("b", 11)]
    finish(s)
    other_question = seeing("c", 17)
    other_question.token_ids[11:] = [9] * 6
    s.add(other_question)
    step, _ = run(s)
    assert plan(step) == [("c", 3)]
    assert step.chunks[0].sequence.num_cached == 8


def test_the_key_of_a_prefixs_first_block_depends_on_all_of_it():
    pictures = [(image(1, 10), 5), (image(2, 10), 5), (image(1, 9), 5)]
    for sees_ahead, kinds in (("prefix", 3), ("pictures", 1), (None, 1)):
        sequences = [sequence("a", 20, images=[one], sees_ahead=sees_ahead) for one in pictures]
        assert len({one.keys_of_full_blocks(1, 4)[0] for one in sequences}) == kinds


def test_a_chunk_ends_before_a_picture_that_does_not_fit_and_takes_one_that_it_begins_with():
    s = scheduler(budget=5)
    s.add(sequence("a", 20, images=[(image(1, 6), 2), (image(2, 4), 11)], sees_ahead="pictures"))
    assert [plan(run(s)[0]) for _ in range(5)] == [[("a", count)] for count in (2, 6, 3, 5, 4)]


def test_what_is_left_of_a_known_picture_is_computed_in_one_go():
    """Blocks of 4 hold 6 of its 9 tokens behind 6 of text."""
    s = scheduler(budget=2, prefix_caching=True)
    one, other = (sequence(name, 20, images=[(image(1, 9), 6)], sees_ahead="pictures") for name in ("a", "b"))
    other.token_ids[15:] = [9] * 5
    s.add(one)
    finish(s)
    s.add(other)
    assert plan(run(s)[0]) == [("b", 3)]
    assert other.num_cached == 12


def test_the_key_of_a_tail_depends_on_what_its_tokens_see():
    """A prompt that ends with what sees itself leaves all but its last token behind."""
    one, other = (sequence("a", 7, images=[(image(1, 3), 4)], sees_ahead="prefix") for _ in range(2))
    other.token_ids[6] = 9
    assert one.tail_key(6, 8) != other.tail_key(6, 8)
    assert one.tail_key(6, 8) != sequence("a", 7, images=[(image(1, 3), 4)]).tail_key(6, 8)
