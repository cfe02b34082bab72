"""Images cut into grids of tiles against transformers' own processor of InternVL, budgets included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from tests.media.images_for_tests import encoded, noise, photo
from tests.media.test_tiles import SIZES
from tests.normalized import normalized, of_levels, processed
from vlmserve.errors import InvalidRequestError, ModelLoadError, UnsupportedModelError
from vlmserve.media.budget import ImageBudget
from vlmserve.media.cache import ImageCache
from vlmserve.media.grids import GridProcessor
from vlmserve.media.images import DecodedImage, decode_image
from vlmserve.media.sources import prepare_image, process_image
from vlmserve.settings.config import MediaConfig
from vlmserve.types import ImageSize

TILE, TILE_TOKENS = 16, 4
CONFIG: dict[str, Any] = {"vision_config": {"image_size": [TILE, TILE], "patch_size": [4, 4]}}
GRID: dict[str, Any] = {"size": {"height": TILE, "width": TILE}, "crop_to_patches": False}
BEGIN, END = 7, 8
SETTINGS: dict[str, dict[str, Any]] = {
    "published": {**GRID, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "resample": 3},
    "defaults": GRID,
    "few": {**GRID, "max_patches": 3},
    "one": {**GRID, "max_patches": 1},
    "many": {**GRID, "min_patches": 5, "max_patches": 20},
    "raw": {**GRID, "do_normalize": False, "do_rescale": False},
    "another filter": {**GRID, "resample": 2},
}


def grid_processor(settings: dict[str, Any] = GRID, **options: Any) -> GridProcessor:
    return GridProcessor(CONFIG, settings, (BEGIN, END), **options)


def by_transformers(settings: dict[str, Any]) -> GotOcr2ImageProcessorPil:
    """InternVL's processor has all images cut, whatever the file says."""
    return GotOcr2ImageProcessorPil(**{**settings, "crop_to_patches": True})


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_pixels_and_tiles_are_those_of_transformers(settings: dict[str, Any]) -> None:
    ours, theirs = grid_processor(settings), by_transformers(settings)
    counts = set()
    for size in SIZES:
        image = noise(*size)
        expected = theirs(images=image, return_tensors="np")
        pixels, placeholders = ours.prepare(DecodedImage.whole(image))
        np.testing.assert_allclose(of_levels(pixels, ours.levels), expected["pixel_values"], rtol=0, atol=1e-6)
        assert placeholders.num_tokens == 2 + TILE_TOKENS * expected["num_patches"][0]
        assert placeholders.text == ((0, BEGIN), (placeholders.num_tokens - 1, END))
        counts.add(len(pixels))
    assert len(counts) > 4 or settings["max_patches"] <= 3


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "CMYK"])
def test_image_of_any_mode_equals_transformers(mode: str) -> None:
    image = noise(40, 25, mode)
    expected = by_transformers(GRID)(images=image, return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(processed(grid_processor(), DecodedImage.whole(image)), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("budget", "least", "most"),
    [
        (ImageBudget(max_pixels=1100), 1, 4),
        (ImageBudget(max_tokens=30), 1, 6),
        (ImageBudget(min_pixels=1100), 5, 12),
        (ImageBudget(900, 2100, 34), 4, 7),
        (ImageBudget(max_pixels=256, max_tokens=10**6), 1, 1),
        (ImageBudget(low_detail=True), 1, 1),
        (ImageBudget(min_pixels=600, low_detail=True), 3, 12),
    ],
    ids=str,
)
def test_a_budget_is_a_number_of_tiles(budget: ImageBudget, least: int, most: int) -> None:
    theirs = by_transformers({**GRID, "min_patches": least, "max_patches": most})
    shapes = set()
    for size in SIZES:
        image = process_image(b"", DecodedImage.whole(noise(*size)), grid_processor().within(budget))
        budget.check_kept(image)
        expected = theirs(images=noise(*size), return_tensors="np")
        np.testing.assert_allclose(normalized(image), expected["pixel_values"], rtol=0, atol=1e-6)
        tiles = max(1, expected["num_patches"][0] - 1)
        assert image.size is not None
        area = (image.size.model_width or 0) * (image.size.model_height or 0)
        assert area == tiles * TILE**2
        assert image.size == ImageSize(
            *size, image.size.model_width, image.size.model_height, (0, 0, *size), image.num_tokens
        )
        shapes.add((image.size.model_width, image.size.model_height))
    assert len(shapes) > 1 or most == 1


def test_a_request_stays_below_the_server() -> None:
    server = grid_processor().within(ImageBudget(max_pixels=6 * 256))
    looser = server.within(ImageBudget(max_pixels=12 * 256, max_tokens=10**6))
    assert looser is server
    assert server.within(ImageBudget(max_pixels=3 * 256)).fingerprint != server.fingerprint
    many = grid_processor(SETTINGS["many"]).within(ImageBudget(max_pixels=2 * 256))
    image = process_image(b"", DecodedImage.whole(noise(40, 40)), many)
    assert len(image.pixels) == 2 + 1, "a checkpoint's lower bound gives way"


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (ImageBudget(max_pixels=255), "max_pixels is 255, but for this model an image has at least 256 pixels"),
        (ImageBudget(max_tokens=5), "max_tokens is 5, but for this model an image has at least 6 tokens"),
        (ImageBudget(min_pixels=12 * 256 + 1), "min_pixels is 3,073, but .* at most 3,072 pixels"),
        (ImageBudget(min_pixels=800, max_tokens=14), "min_pixels is 800, but .* at most 512 pixels"),
        (ImageBudget(min_pixels=900, max_pixels=800), "min_pixels, 900, is more than max_pixels, 800"),
    ],
    ids=str,
)
def test_a_budget_that_no_grid_keeps_is_refused(budget: ImageBudget, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        grid_processor().within(budget)


def test_large_jpegs_are_downscaled_unless_exact() -> None:
    data = encoded(photo(1600, 1200), "JPEG", quality=95)
    fast, exact = grid_processor(), grid_processor(exact_pixels=True)
    images = [decode_image(data, MediaConfig(), processor.reduction) for processor in (fast, exact)]
    assert [image.is_reduced for image in images] == [True, False]
    pixels = [processed(processor, image) for processor, image in zip((fast, exact), images, strict=True)]
    assert pixels[0].shape == pixels[1].shape == (13, 3, TILE, TILE)
    assert 0 < np.abs(pixels[0] - pixels[1]).mean() < 0.03


def test_whatever_changes_pixels_changes_the_fingerprint() -> None:
    changes: list[dict[str, Any]] = [
        {}, {"min_patches": 2}, {"max_patches": 9}, {"resample": 2}, {"do_normalize": False}, {"image_mean": [0, 0, 0]},
        {"do_rescale": False},
    ]  # fmt: skip
    prints = [grid_processor({**GRID, **change}).fingerprint for change in changes]
    prints.append(grid_processor(exact_pixels=True).fingerprint)
    assert len(set(prints)) == len(prints)
    data, cache = encoded(noise(40, 30)), ImageCache(2**20)
    budgets = [ImageBudget(), ImageBudget(max_pixels=600), ImageBudget()]
    images = [prepare_image(data, grid_processor().within(budget), MediaConfig(), cache) for budget in budgets]
    assert images[0] is images[2]
    assert images[0].key != images[1].key


def test_files_that_contradict_each_other_are_refused() -> None:
    assert grid_processor(tile_tokens=TILE_TOKENS)
    with pytest.raises(ModelLoadError, match="image_seq_length"):
        grid_processor(tile_tokens=256)
    with pytest.raises(UnsupportedModelError, match="tiles of 24 x 24 pixels, but the vision tower reads 16 x 16"):
        grid_processor({"size": {"height": 24, "width": 24}})
    with pytest.raises(UnsupportedModelError, match="tiles are square"):
        grid_processor({"size": {"height": 16, "width": 24}})
    with pytest.raises(UnsupportedModelError, match="min_patches 4 and max_patches 3 leave no tiles"):
        grid_processor({**GRID, "min_patches": 4, "max_patches": 3})
