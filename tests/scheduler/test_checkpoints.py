"""Where requests with states leave checkpoints."""

from __future__ import annotations

from tests.scheduler.made_up import END, image, request, scheduler
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.checkpoints import ranked_boundaries


def prompt(*turns: int, images: tuple[tuple[int, int], ...] = ()) -> Request:
    """A prompt of 100 tokens. turns: places of end tokens. images: numbers of tokens and places."""
    spans = [(image(number, size), start) for number, (size, start) in enumerate(images)]
    one = request("a", 100, images=spans)
    for place in turns:
        one.token_ids[place] = END
    return one


def test_last_turn_ranks_before_prompt_and_images():
    assert ranked_boundaries(prompt(9, 89, images=((4, 40), (4, 60)))) == [90, 99, 64, 10, 44]


def test_image_needs_none_with_turn_near():
    near = prompt(9, 79, images=((4, 60), (4, 66)))
    assert ranked_boundaries(near) == [80, 99, 64, 10]


def test_turns_before_images_need_their_own():
    assert ranked_boundaries(prompt(9, images=((1, 10),))) == [10, 99, 11]


def test_only_first_boundary_is_kept():
    s = scheduler(num_blocks=400, states=20, prefix_caching=True, budget=1000)
    one = prompt(9, 89)
    s.add(one)
    s.schedule()
    assert one.state is not None
    assert {*one.state.leaving} >= {90, 99}
    assert one.state.kept == {90}
