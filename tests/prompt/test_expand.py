from __future__ import annotations

import numpy as np
import pytest

from vlmserve.errors import InvalidRequestError
from vlmserve.prompt.expand import expand_placeholders, truncate
from vlmserve.types import ImageInput, ImageSpan, Prompt

IMAGE = 9


def image_of(num_tokens: int) -> ImageInput:
    return ImageInput(bytes(32), np.zeros((1, 3, 2, 2), np.float32), num_tokens)


def test_each_placeholder_expands_to_its_image() -> None:
    first, second = image_of(3), image_of(2)
    prompt = expand_placeholders([IMAGE, 1, 2, IMAGE], IMAGE, [first, second])
    assert prompt.token_ids == [IMAGE] * 3 + [1, 2] + [IMAGE] * 2
    assert [(span.image, span.start, span.end) for span in prompt.images] == [(first, 0, 3), (second, 5, 7)]


def test_an_images_own_text_stands_among_its_placeholders() -> None:
    image = ImageInput(bytes(32), np.zeros((2, 3, 2, 2), np.float32), 6, text=((0, 5), (3, 6), (5, 7)))
    prompt = expand_placeholders([1, IMAGE, 2, IMAGE], IMAGE, [image, image_of(2)])
    assert prompt.token_ids == [1, 5, IMAGE, IMAGE, 6, IMAGE, 7, 2, IMAGE, IMAGE]
    assert [(span.start, span.end) for span in prompt.images] == [(1, 7), (8, 10)]
    assert image.num_embeddings == 3


def test_a_label_precedes_each_image() -> None:
    images = [image_of(1), image_of(2)]
    prompt = expand_placeholders([1, IMAGE, 2, IMAGE], IMAGE, images, label=lambda index: (7, 30 + index))
    assert prompt.token_ids == [1, 7, 30, IMAGE, 2, 7, 31, IMAGE, IMAGE]
    assert [(span.start, span.end) for span in prompt.images] == [(3, 4), (7, 9)]


def test_text_stays_as_it_is() -> None:
    prompt = expand_placeholders([1, 2, 3], None, [])
    assert (prompt.token_ids, prompt.images) == ([1, 2, 3], ())


@pytest.mark.parametrize(("ids", "num_images"), [([1], 1), ([IMAGE], 0), ([IMAGE, IMAGE], 1)])
def test_as_many_placeholders_as_images(ids: list[int], num_images: int) -> None:
    with pytest.raises(InvalidRequestError, match="placeholder"):
        expand_placeholders(ids, IMAGE, [image_of(1)] * num_images)


def test_a_truncated_prompt_keeps_its_end() -> None:
    prompt = Prompt([5, 6, 7, 8, 8, 9], (ImageSpan(image_of(2), start=3),))
    kept = truncate(prompt, 4, 99)
    assert (kept.token_ids, [span.start for span in kept.images]) == ([7, 8, 8, 9], [1])
    assert truncate(prompt, None, 2) is prompt
    assert truncate(prompt, 6, 2) is prompt
    assert truncate(prompt, -1, 5).token_ids == [6, 7, 8, 8, 9]
    with pytest.raises(InvalidRequestError, match="leaves out an image") as caught:
        truncate(prompt, 2, 99)
    assert caught.value.param == "truncate_prompt_tokens"
