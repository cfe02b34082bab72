"""Images as squares, in tiles and whole, against transformers' own processor of LFM2-VL, budgets included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

from tests.lfm2_checkpoints import SETTINGS as SPLIT
from tests.media.images_for_tests import noise
from tests.normalized import normalized, processed
from tests.square_images import image_processor, squares_of, with_torch
from vlmserve.errors import InvalidRequestError, ModelLoadError, UnsupportedModelError
from vlmserve.media.budget import ImageBudget
from vlmserve.media.images import DecodedImage
from vlmserve.media.sources import process_image
from vlmserve.media.squares import SquareProcessor, SquareWords
from vlmserve.types import ImageInput, SquareGrids

SIDE = 8
SIZES = [
    (24, 24), (25, 39), (63, 65), (200, 90), (90, 200), (5, 3), (1, 1), (16, 32), (125, 100), (100, 125), (33, 11),
    (64, 64), (131, 60), (300, 150),
]  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "tiles": SPLIT,
    "larger tiles": {**SPLIT, "tile_size": 24, "max_tiles": 9, "max_pixels_tolerance": 1.5},
    "tiles alone": {**SPLIT, "use_thumbnail": False},
    "never cut": {**SPLIT, "do_image_splitting": False},
    "one tile": {**SPLIT, "min_tiles": 1, "max_tiles": 1},
    "other levels": {**SPLIT, "image_mean": [0.1, 0.2, 0.3], "image_std": 0.4},
    "raw": {**SPLIT, "do_normalize": False, "do_rescale": False},
}
IMAGE, OVERVIEW = ord("#"), "T"


def encode(text: str) -> list[int]:
    """A character is a token."""
    return list(map(ord, text))


def square_processor(settings: dict[str, Any] = SPLIT, **options: Any) -> SquareProcessor:
    config = {"vision_config": {"patch_size": 4}, "downsample_factor": 2}
    return SquareProcessor(config, settings, SquareWords(encode, "#", IMAGE, "[", "]", OVERVIEW), **options)


class Writer(Lfm2VlProcessor):
    """Only what writes placeholders."""

    def __init__(self, processor: Any) -> None:
        self.image_processor = processor
        self.image_token, self.image_start_token, self.image_end_token = "#", "[", "]"
        self.image_thumbnail_token = OVERVIEW


def text_of(image: ImageInput) -> str:
    letters = ["#"] * image.num_tokens
    for place, letter in image.text:
        letters[place] = chr(letter)
    return "".join(letters)


def prepared(processor: SquareProcessor, size: tuple[int, int], budget: ImageBudget | None = None) -> ImageInput:
    image = process_image(b"", DecodedImage.whole(noise(*size)), processor.within(budget or ImageBudget()))
    if budget is not None:
        budget.check_kept(image)
    return image


def assert_same(image: ImageInput, size: tuple[int, int], settings: dict[str, Any]) -> None:
    """The pixels and words are those of transformers with these settings."""
    theirs = image_processor(**settings)
    expected = theirs(noise(*size), return_row_col_info=True)
    np.testing.assert_allclose(normalized(image), squares_of(expected, SIDE), rtol=0, atol=1e-6)
    assert text_of(image) == Writer(theirs).replace_image_token(expected, 0, use_image_special_tokens=True)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_pixels_and_words_equal_transformers(settings: dict[str, Any]) -> None:
    counts = set()
    for size in SIZES:
        image = prepared(square_processor(settings), size)
        assert_same(image, size, settings)
        counts.add(image.num_tokens)
    assert len(counts) > 5


def test_default_settings_equal_transformers() -> None:
    defaults = SquareProcessor({}, {}, SquareWords(encode, "#", IMAGE, "[", "]", OVERVIEW))
    for size in ((300, 200), (800, 600), (1200, 900)):
        shapes = image_processor()(noise(*size))["spatial_shapes"].tolist()
        tiling = defaults.prepare(DecodedImage.whole(noise(*size)))[1].tiling
        assert tiling == SquareGrids(tuple((down // 2, across // 2) for down, across in shapes))


def test_levels_differ_from_torch_by_one() -> None:
    for size in ((90, 60), (200, 90), (30, 30)):
        raw = {**SPLIT, "do_normalize": False, "do_rescale": False}
        theirs = squares_of(image_processor(with_torch, **raw)(noise(*size)), SIDE)
        differences = np.abs(processed(square_processor(raw), DecodedImage.whole(noise(*size))) - theirs)
        assert differences.max() <= 1
        assert differences.mean() < 0.02


def test_narrow_images_are_taken() -> None:
    for size in ((7, 300), (1000, 8)):
        image = prepared(square_processor(), size)
        assert image.pixels.shape == (image.num_embeddings, 3, SIDE, SIDE)


@pytest.mark.parametrize(
    ("budget", "changes"),
    [
        (ImageBudget(low_detail=True), {"do_image_splitting": False}),
        (ImageBudget(max_tokens=3 * (4 + len("<|img_row_1_col_1|>")) + 16 + 3), {"max_tiles": 3}),
        (ImageBudget(max_pixels=2 * 256), {"max_tiles": 2, "max_image_tokens": 8}),
        (ImageBudget(max_tokens=14), {"do_image_splitting": False, "max_image_tokens": 12}),
        (ImageBudget(max_pixels=500), {"do_image_splitting": False, "max_image_tokens": 7}),
    ],
    ids=str,
)
def test_budgets_equal_settings(budget: ImageBudget, changes: dict[str, Any]) -> None:
    for size in SIZES:
        image = prepared(square_processor(), size, budget)
        assert_same(image, size, {**SPLIT, **changes})


def test_upper_bounds_prevail_over_lower_ones() -> None:
    for size in SIZES:
        prepared(square_processor(), size, ImageBudget(min_pixels=640, max_pixels=703))


def test_wanted_pixels_are_cut() -> None:
    processor = square_processor({**SPLIT, "max_tiles": 9})
    image = prepared(processor, (20, 20), ImageBudget(min_pixels=6 * 256))
    assert image.size is not None
    assert (image.size.model_width, image.size.model_height) == (48, 48)
    with pytest.raises(InvalidRequestError, match=r"min_pixels is 9,999, but .* at most 2,304 pixels"):
        processor.within(ImageBudget(min_pixels=9999))
    with pytest.raises(InvalidRequestError, match="max_tokens is 2, but for this model an image has at least 3"):
        processor.within(ImageBudget(max_tokens=2))


def test_open_budgets_change_nothing() -> None:
    processor = square_processor()
    assert processor.within(ImageBudget()) is processor
    assert processor.within(ImageBudget(high_detail=True)) is processor
    low = processor.within(ImageBudget(low_detail=True))
    assert low.fingerprint != processor.fingerprint
    assert low.reduction((640, 480)) >= processor.reduction((640, 480)) > 1
    assert square_processor(exact_pixels=True).reduction((640, 480)) == 1


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"encoder_patch_size": 16}, ModelLoadError, "correct encoder_patch_size"),
        ({"downsample_factor": 1}, ModelLoadError, "correct encoder_patch_size and downsample_factor"),
        ({"tile_size": 20}, UnsupportedModelError, "at least 2 tiles of a multiple of 8"),
        ({"min_tiles": 1}, UnsupportedModelError, "1 to 4 tiles"),
        ({"min_tiles": 5}, UnsupportedModelError, "5 to 4 tiles"),
    ],
)
def test_impossible_settings_are_rejected(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        square_processor({**SPLIT, **settings})
