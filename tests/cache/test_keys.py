from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmserve.cache.keys import TouchedImage, block_key, cross_attention_root, cross_key, root_key, touched_images
from vlmserve.types import ImageInput, ImageSpan

ROOT = root_key(b"model")
IMAGES = [bytes([number]) * 32 for number in range(3)]


def span(number: int, start: int, length: int) -> ImageSpan:
    return ImageSpan(ImageInput(IMAGES[number], np.zeros((1, 3, 1, 1), np.float32), length), start)


def image(number: int, offset: int = 0, position: int = 0, length: int = 1) -> TouchedImage:
    return TouchedImage(IMAGES[number], offset, position, length)


def attending(image_key: bytes, *token_ids: int) -> bytes:
    """The root of requests that attend to an image, and to a text that is read along with it."""
    return cross_attention_root(ROOT, cross_key(image_key, token_ids))


def test_blocks_meet_two_images_at_the_right_offsets():
    """T0,T1,P00,P01 | P02,P03,P04,T2 | T3,P10,P11,P12"""
    spans = [span(0, 2, 5), span(1, 9, 3)]
    assert touched_images(spans, 0, 4) == [(IMAGES[0], 0, 2, 2)]
    assert touched_images(spans, 4, 8) == [(IMAGES[0], 2, 0, 3)]
    assert touched_images(spans, 8, 12) == [(IMAGES[1], 0, 1, 3)]
    assert touched_images(spans, 12, 16) == []


def test_a_block_may_touch_several_images():
    assert touched_images([span(0, 0, 2), span(1, 2, 2)], 0, 4) == [image(0, 0, 0, 2), image(1, 0, 2, 2)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (root_key(b"m", salt="a"), root_key(b"m", salt="b")),
        (root_key(b"m", adapter=b"a"), root_key(b"m", salt="a")),
        (root_key(b"ma"), root_key(b"m", adapter=b"a")),
        (root_key(b"m", adapter=b"ab", salt="c"), root_key(b"m", adapter=b"a", salt="bc")),
        (block_key(ROOT, [1, 2], []), block_key(ROOT, [2, 1], [])),
        (block_key(ROOT, [1, 2], []), block_key(block_key(ROOT, [1, 2], []), [1, 2], [])),
        (block_key(ROOT, [1, 2], [], ahead=[3]), block_key(ROOT, [1, 2], [], ahead=[4])),
        (block_key(ROOT, [1, 2], [], ahead=[3]), block_key(ROOT, [1, 2], [])),
        (block_key(ROOT, [1, 2], [], ahead=[3]), block_key(ROOT, [1, 2, 3], [])),
        *(
            (block_key(ROOT, [9, 9], [image(0)]), block_key(ROOT, [9, 9], images))
            for images in (
                [],
                [image(1)],
                [image(0, offset=1)],
                [image(0, position=1)],
                [image(0, length=2)],
                [image(0), image(1)],
            )
        ),
        (attending(IMAGES[0]), ROOT),
        (attending(IMAGES[0]), attending(IMAGES[1])),
        (attending(IMAGES[0]), attending(IMAGES[0], 5)),
        (attending(IMAGES[0], 5, 6), attending(IMAGES[0], 6, 5)),
        (cross_attention_root(ROOT, IMAGES[0]), cross_attention_root(root_key(b"other"), IMAGES[0])),
        (cross_key(IMAGES[0], []), IMAGES[0]),
        (block_key(ROOT, [9, 9], [image(0), image(1)]), block_key(ROOT, [9, 9], [image(1), image(0)])),
    ],
)
def test_other_content_has_another_key(one, other):
    assert one != other
    assert len(one) == len(other) == 32


def test_a_short_key_is_refused():
    with pytest.raises(ValueError, match="32 bytes"):
        block_key(ROOT[:16], [1], [])
    with pytest.raises(ValueError, match="32 bytes"):
        block_key(ROOT, [1], [TouchedImage(b"short", 0, 0, 1)])


CONTENT = st.tuples(
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.lists(
        st.builds(TouchedImage, st.sampled_from(IMAGES), *[st.integers(0, 2)] * 3),
        max_size=2,
    ),
)


@given(CONTENT, CONTENT)
def test_keys_are_equal_exactly_when_content_is(one, other):
    assert (block_key(ROOT, *one) == block_key(ROOT, *other)) == (one == other)
