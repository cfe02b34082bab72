"""Images cut into slices against Transformers' own processor of MiniCPM-V, budgets included."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import MiniCPMV4_6Processor
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil

from tests.media.images_for_tests import noise
from tests.media.test_tiles import SIZES
from tests.minicpmv_checkpoints import SLICES, side_by_side
from tests.normalized import of_levels
from vlmserve.errors import InvalidRequestError, ModelLoadError, UnsupportedModelError
from vlmserve.media.budget import ImageBudget
from vlmserve.media.images import DecodedImage
from vlmserve.media.slices import SliceProcessor, SliceWords
from vlmserve.media.sources import process_image
from vlmserve.types import Pieces

WORDS = SliceWords((ord("<"), ord(">")), (ord("["), ord("]")), (ord("\n"),))
"""Tokens are characters here."""
SETTINGS: dict[str, dict[str, Any]] = {
    "published": SLICES,
    "few": {**SLICES, "max_slice_nums": 2},
    "never cut": {**SLICES, "slice_mode": False},
    "fine": {**SLICES, "downsample_mode": "4x", "resample": 2},
    "raw": {**SLICES, "do_normalize": False, "do_rescale": False},
    "many": {**SLICES, "scale_resolution": 20, "max_slice_nums": 16, "image_mean": [0.1, 0.2, 0.3]},
}


def slice_processor(settings: dict[str, Any] = SLICES, **options: Any) -> SliceProcessor:
    config = {"vision_config": {"patch_size": 4}, "downsample_mode": settings.get("downsample_mode", "16x")}
    return SliceProcessor(config, settings, WORDS, **options)


def by_transformers(settings: dict[str, Any]) -> MiniCPMV4_6ImageProcessorPil:
    return MiniCPMV4_6ImageProcessorPil(**{**settings, "image_processor_type": None})


def written_by_transformers(images: dict[str, Any], divisor: int) -> str:
    names = {"image_token": "#", "image_start_token": "<", "image_end_token": ">"}
    words = SimpleNamespace(**names, slice_start_token="[", slice_end_token="]", slice_mode=True)
    text: str = MiniCPMV4_6Processor.replace_image_token(words, images, 0, image_token_divisor=divisor)
    return text


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_pixels_and_words_equal_transformers(settings: dict[str, Any]) -> None:
    ours, theirs = slice_processor(settings), by_transformers(settings)
    counts = set()
    for size in SIZES:
        image = noise(*size)
        expected = theirs(images=image, return_tensors="np")
        pixels, placeholders = ours.prepare(DecodedImage.whole(image))
        own = side_by_side(of_levels(pixels, ours.levels), 4)
        np.testing.assert_allclose(own, expected["pixel_values"], rtol=0, atol=1e-6)
        grids = tuple(map(tuple, expected["target_sizes"].tolist()))
        assert placeholders.tiling == (Pieces(grids) if len(grids) > 1 else None)
        letters = ["#"] * placeholders.num_tokens
        for place, letter in placeholders.text:
            letters[place] = chr(letter)
        divisor = 4 if settings.get("downsample_mode") == "4x" else 16
        assert "".join(letters) == written_by_transformers(expected, divisor)
        counts.add(len(grids))
    assert len(counts) > 3 or settings.get("max_slice_nums") == 2 or not settings.get("slice_mode", True)


@pytest.mark.parametrize(
    "budget",
    [
        ImageBudget(max_pixels=4096),
        ImageBudget(max_tokens=20),
        ImageBudget(max_pixels=600),
        ImageBudget(max_pixels=3000, max_tokens=25),
        ImageBudget(low_detail=True),
    ],
    ids=str,
)
def test_images_keep_a_budget(budget: ImageBudget) -> None:
    narrow, wide = slice_processor().within(budget), slice_processor()
    for size in SIZES:
        if max(size) > 5 * min(size):
            continue
        image = process_image(b"", DecodedImage.whole(noise(*size)), narrow)
        budget.check_kept(image)
        whole = process_image(b"", DecodedImage.whole(noise(*size)), wide)
        assert image.num_tokens <= whole.num_tokens
        assert not budget.low_detail or image.tiling is None
    assert narrow.fingerprint != wide.fingerprint


def test_a_minimum_budget_cuts_small_images() -> None:
    small = DecodedImage.whole(noise(30, 30))
    image = process_image(b"", small, slice_processor().within(ImageBudget(min_pixels=4000)))
    assert process_image(b"", small, slice_processor()).tiling is None
    assert image.size is not None
    assert image.size.model_width == image.size.model_height == 64


def test_impossible_budgets_and_settings_are_rejected() -> None:
    with pytest.raises(InvalidRequestError, match="at least 256 pixels"):
        slice_processor().within(ImageBudget(max_pixels=100))
    with pytest.raises(InvalidRequestError, match="at most 6,144 pixels"):
        slice_processor().within(ImageBudget(min_pixels=7000))
    with pytest.raises(UnsupportedModelError, match="do_resize False"):
        slice_processor({**SLICES, "do_resize": False})
    with pytest.raises(ModelLoadError, match="correct patch_size or downsample_mode"):
        SliceProcessor({"vision_config": {"patch_size": 14}}, SLICES, WORDS)
