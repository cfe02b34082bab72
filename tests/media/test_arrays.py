"""Arrays and tensors as images: every common layout and scale gives the same picture, and nonsense is named."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from PIL import Image

from vlmserve.errors import InvalidImageError
from vlmserve.media.arrays import frames_of, image_of

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)
GREY = PIXELS[..., 0]


@pytest.mark.parametrize(
    "array",
    [
        PIXELS,
        PIXELS.transpose(2, 0, 1),
        PIXELS[None],
        PIXELS.astype(np.int64),
        PIXELS.astype(np.float32),
        PIXELS / 255,
        (PIXELS / 255).astype(np.float32).transpose(2, 0, 1)[None],
        torch.from_numpy(PIXELS),
        torch.from_numpy(PIXELS).permute(2, 0, 1),
        (torch.from_numpy(PIXELS) / 255).requires_grad_(),
        torch.from_numpy(PIXELS)[None].float(),
    ],
    ids=lambda array: f"{type(array).__module__}-{array.dtype}-{list(array.shape)}",
)
def test_an_array_is_the_picture_that_it_shows(array):
    image = image_of(array)
    assert image.mode == "RGB"
    assert np.array_equal(image, PIXELS)


def test_bfloat16_tensors_lose_only_their_precision():
    image = image_of(torch.from_numpy(PIXELS).permute(2, 0, 1).bfloat16() / 255)
    assert np.abs(np.asarray(image, np.int16) - PIXELS).max() <= 1


@pytest.mark.parametrize("array", [GREY, GREY[..., None], GREY[None], torch.from_numpy(GREY)], ids=lambda a: a.shape)
def test_one_channel_is_grey(array):
    image = image_of(array)
    assert image.mode == "L"
    assert np.array_equal(image, GREY)


def test_booleans_are_black_and_white():
    assert np.array_equal(image_of(GREY > 100), (GREY > 100) * 255)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((5, 6, 2), np.uint8), "[height, width, channels] or [channels, height, width]"),
        (np.zeros((0, 4), np.uint8), "not [0, 4]"),
        (np.zeros(4, np.uint8), "not [4]"),
        (np.zeros((2, 4, 4, 3), np.uint8), "[2, 4, 4, 3] is 2 images; give a list of images"),
        (np.full((4, 4), 300), "values from 0 to 255, or floats from 0 to 1, not 300 to 300"),
        (np.array([[-2.1, 2.6]]), "not -2.1 to 2.6"),
        (np.full((4, 4), np.nan), "not nan to nan"),
        (np.full((4, 4), "a"), "must have numbers, not <U1"),
        (np.full((4, 4), 1j), "must have numbers, not complex128"),
        ({}, "an image cannot be made from a dict"),
    ],
)
def test_an_array_that_shows_nothing_is_explained(array, message):
    with pytest.raises(InvalidImageError, match=re.escape(message)) as raised:
        image_of(array)
    assert len(str(raised.value)) <= 140


def test_four_dimensions_are_a_video():
    assert [np.array_equal(frame, PIXELS) for frame in frames_of(np.stack([PIXELS] * 3))] == [True] * 3
    assert frames_of("clip.mp4") == "clip.mp4"
    image = Image.new("RGB", (3, 3))
    assert frames_of(image) is image
