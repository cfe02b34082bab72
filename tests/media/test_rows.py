"""Images of any size with a token behind each row against transformers' own processor of Pixtral, budgets included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from tests.media.images_for_tests import encoded, noise, photo
from tests.media.test_tiles import SIZES
from tests.normalized import normalized, of_levels, processed
from vlmserve.errors import InvalidRequestError, ModelLoadError, UnsupportedModelError
from vlmserve.media import rows
from vlmserve.media.budget import ImageBudget
from vlmserve.media.images import DecodedImage, decode_image
from vlmserve.media.rows import RowProcessor
from vlmserve.media.sources import process_image
from vlmserve.settings.config import MediaConfig
from vlmserve.types import ImageSize

SIDE = 8
CONFIG: dict[str, Any] = {"model_type": "mistral3", "vision_config": {"patch_size": 4}}
ROWS: dict[str, Any] = {"size": {"longest_edge": 96}, "patch_size": {"height": 4, "width": 4}}
ROW_END, IMAGE_END = 7, 8
KEPT = [size for size in SIZES if max(size) < 50 * min(size)]
"""Of which transformers leaves something."""
SETTINGS: dict[str, dict[str, Any]] = {
    "published": {**ROWS, "resample": 3, "do_convert_rgb": True, "rescale_factor": 1 / 255},
    "defaults": {},
    "an edge of no whole squares": {**ROWS, "size": {"longest_edge": 50}},
    "raw": {**ROWS, "do_normalize": False, "do_rescale": False},
    "other levels": {**ROWS, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
}


def row_processor(settings: dict[str, Any] = ROWS, **options: Any) -> RowProcessor:
    return RowProcessor(CONFIG, settings, (ROW_END, IMAGE_END), **options)


def by_transformers(image: Any, settings: dict[str, Any], **call: Any) -> np.ndarray:
    """As its processor calls it, with the size of merged patches."""
    processor = PixtralImageProcessorPil(**settings)
    return processor(images=image, return_tensors="np", patch_size={"height": SIDE, "width": SIDE}, **call)[
        "pixel_values"
    ]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_pixels_and_rows_are_those_of_transformers(settings: dict[str, Any]) -> None:
    processor = row_processor(settings)
    for size in KEPT:
        image = noise(*size)
        pixels, placeholders = processor.prepare(DecodedImage.whole(image))
        np.testing.assert_allclose(
            of_levels(pixels, processor.levels), by_transformers(image, settings), rtol=0, atol=1e-6
        )
        down, across = pixels.shape[2] // SIDE, pixels.shape[3] // SIDE
        expected = ([0] * across + [ROW_END]) * down
        expected[-1] = IMAGE_END
        written = [0] * placeholders.num_tokens
        for place, token in placeholders.text:
            written[place] = token
        assert written == expected


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "CMYK"])
def test_image_of_any_mode_equals_transformers(mode: str) -> None:
    image = noise(40, 25, mode)
    pixels = processed(row_processor(), DecodedImage.whole(image))
    np.testing.assert_allclose(pixels, by_transformers(image, ROWS), rtol=0, atol=1e-6)


def test_a_line_has_one_row_of_squares() -> None:
    for size, shape in {(500, 1): (8, 96), (1, 500): (96, 8), (1, 1): (8, 8)}.items():
        image = process_image(b"", DecodedImage.whole(noise(*size)), row_processor())
        assert image.pixels.shape == (1, 3, *shape)


@pytest.mark.parametrize(
    "budget",
    [
        ImageBudget(max_pixels=2000), ImageBudget(max_tokens=30), ImageBudget(max_pixels=64, max_tokens=2),
        ImageBudget(max_pixels=3000, max_tokens=25), ImageBudget(min_pixels=1, max_pixels=700),
    ],
    ids=str,
)  # fmt: skip
def test_budget_uses_the_largest_edge_that_fits(budget: ImageBudget) -> None:
    processor = row_processor().within(budget)
    reduced = 0
    for size in SIZES:
        image = process_image(b"", DecodedImage.whole(noise(*size)), processor)
        budget.check_kept(image)
        assert image.size is not None
        width, height = image.size.model_width or 0, image.size.model_height or 0
        assert image.size == ImageSize(*size, width, height, (0, 0, *size), image.num_tokens)
        fitting = []
        for edge in range(1, 97):
            ratio = max(max(size) / edge, 1)
            across, down = (max(1, -(-int(own / ratio) // SIDE)) for own in size)
            if budget.allows(across * down * SIDE**2, down * (across + 1)):
                fitting.append((edge, across * SIDE, down * SIDE))
        edge, *expected = fitting[-1]
        assert [width, height] == expected
        if int(min(size) * min(1, edge / max(size))) > 0:
            theirs = by_transformers(noise(*size), ROWS, size={"longest_edge": edge})
            np.testing.assert_allclose(normalized(image), theirs, rtol=0, atol=1e-6)
        reduced += edge < 96
    assert reduced > 3


def test_small_images_are_enlarged_to_a_lower_bound() -> None:
    processor = row_processor().within(ImageBudget(min_pixels=4000))
    areas = {}
    for size in ((10, 10), (16, 12), (40, 30), (70, 70), (3, 90), (300, 290)):
        image = process_image(b"", DecodedImage.whole(noise(*size)), processor)
        height, width = image.pixels.shape[2:]
        areas[size] = height * width
        assert max(height, width) <= 96
    assert areas.pop((3, 90)) == 8 * 96, "as near as the longest edge lets it come"
    assert areas[70, 70] == 72 * 72
    assert min(areas.values()) >= 4000
    assert areas[16, 12] < 6000
    both = row_processor().within(ImageBudget(4000, 4200, 70))
    for size in ((10, 10), (16, 12), (40, 30), (300, 290)):
        image = process_image(b"", DecodedImage.whole(noise(*size)), both)
        ImageBudget(4000, 4200, 70).check_kept(image)


def test_little_detail_means_few_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LOW_DETAIL_PIXELS", 1500)
    low = row_processor().within(ImageBudget(low_detail=True))
    assert low.fingerprint == row_processor().within(ImageBudget(max_pixels=1500)).fingerprint
    for budget, most in (
        (ImageBudget(max_pixels=4000, low_detail=True), 4000),
        (ImageBudget(2000, low_detail=True), 2000),
    ):
        image = process_image(b"", DecodedImage.whole(noise(90, 90)), row_processor().within(budget))
        assert 1500 < image.pixels[0, 0].size <= most


def test_a_request_stays_below_the_server() -> None:
    server = row_processor().within(ImageBudget(max_pixels=2000))
    assert (
        server.within(ImageBudget(max_pixels=4000, max_tokens=10**6))
        .prepare(DecodedImage.whole(noise(90, 70)))[0]
        .shape
        == server.prepare(DecodedImage.whole(noise(90, 70)))[0].shape
    )
    with pytest.raises(InvalidRequestError, match=r"min_pixels is 3,000, but .* at most 2,000 pixels"):
        server.within(ImageBudget(min_pixels=3000))


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (ImageBudget(max_pixels=63), "max_pixels is 63, but for this model an image has at least 64 pixels"),
        (ImageBudget(max_tokens=1), "max_tokens is 1, but for this model an image has at least 2 tokens"),
        (ImageBudget(min_pixels=96 * 96 + 1), "min_pixels is 9,217, but .* at most 9,216 pixels"),
        (ImageBudget(min_pixels=900, max_pixels=800), "min_pixels, 900, is more than max_pixels, 800"),
    ],
    ids=str,
)
def test_a_budget_that_no_image_keeps_is_refused(budget: ImageBudget, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        row_processor().within(budget)


def test_large_jpegs_are_downscaled_unless_exact() -> None:
    data = encoded(photo(1600, 1200), "JPEG", quality=95)
    fast, exact = row_processor(), row_processor(exact_pixels=True)
    images = [decode_image(data, MediaConfig(), processor.reduction) for processor in (fast, exact)]
    assert [image.is_reduced for image in images] == [True, False]
    pixels = [processed(processor, image) for processor, image in zip((fast, exact), images, strict=True)]
    assert pixels[0].shape == pixels[1].shape == (1, 3, 72, 96)
    assert 0 < np.abs(pixels[0] - pixels[1]).mean() < 0.03


def test_whatever_changes_pixels_changes_the_fingerprint() -> None:
    changes: list[dict[str, Any]] = [
        {}, {"size": {"longest_edge": 95}}, {"resample": 2}, {"do_normalize": False}, {"image_mean": [0, 0, 0]},
        {"do_rescale": False},
    ]  # fmt: skip
    prints = [row_processor({**ROWS, **change}).fingerprint for change in changes]
    prints += [
        row_processor(exact_pixels=True).fingerprint,
        row_processor().within(ImageBudget(max_tokens=30)).fingerprint,
    ]
    assert len(set(prints)) == len(prints)


def test_files_that_contradict_each_other_are_refused() -> None:
    assert row_processor(sizes={"patch_size": 4, "spatial_merge_size": 2})
    with pytest.raises(ModelLoadError, match=r"patch_size 14, but the model of config\.json 4"):
        row_processor(sizes={"patch_size": 14})
    with pytest.raises(ModelLoadError, match=r"spatial_merge_size 1, but the model of config\.json 2"):
        row_processor(sizes={"spatial_merge_size": 1})
    for settings in ({"size": {"height": 9, "width": 9}}, {"do_resize": False}, {"do_center_crop": True}):
        with pytest.raises(UnsupportedModelError, match="longest edge"):
            row_processor({**ROWS, **settings})
    with pytest.raises(UnsupportedModelError, match="patches of"):
        RowProcessor({"vision_config": {"patch_size": [4, 4]}}, ROWS, (ROW_END, IMAGE_END))
