"""Images of any size against transformers' own processor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.models.test_qwen_vision import QWEN2, flat_patches, patches
from tests.normalized import processed
from vlmserve.errors import ConfigurationError, InvalidImageError, InvalidRequestError
from vlmserve.media.budget import ImageBudget
from vlmserve.media.dynamic_resolution import LOW_DETAIL_PIXELS, DynamicResolutionProcessor
from vlmserve.media.images import DecodedImage
from vlmserve.settings.config import ProcessorOverrides

SETTINGS: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
}
GLM_SETTINGS: dict[str, Any] = {
    **SETTINGS,
    "image_processor_type": "Glm46VImageProcessor",
    "size": {name: 2 * pixels for name, pixels in SETTINGS["size"].items()},
}
"""Of which each image counts twice."""
PADDLE_SETTINGS: dict[str, Any] = {
    **SETTINGS,
    "image_processor_type": "PaddleOCRVLImageProcessor",
    "temporal_patch_size": 1,
    "image_mean": [0.5] * 3,
    "image_std": [0.4] * 3,
}
KINDS: dict[str, tuple[dict[str, Any], type[Any]]] = {
    "Qwen2-VL": (SETTINGS, Qwen2VLImageProcessorPil),
    "GLM-OCR": (GLM_SETTINGS, Glm46VImageProcessorPil),
    "PaddleOCR-VL": (PADDLE_SETTINGS, PaddleOCRVLImageProcessorPil),
}
"""Settings, and transformers' processor of them."""


def rows_of(kind: str, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels as transformers' processor of a kind arranges them, and their grid."""
    return flat_patches(pixels, 4) if kind == "PaddleOCR-VL" else patches(pixels, QWEN2)


def of_transformers(kind: str, **settings: Any) -> Any:
    """transformers' processor of a kind; settings: instead of its own."""
    own, processor_class = KINDS[kind]
    return processor_class(**{k: v for k, v in {**own, **settings}.items() if k != "image_processor_type"})


def noise(width: int, height: int) -> Image.Image:
    levels = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(levels)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "size",
    [(24, 24), (25, 39), (63, 65), (200, 90), (5, 3), (7, 300), (1000, 8), (20, 4), (12, 20), (64, 64), (36, 44)],
    ids=str,
)
def test_pixels_and_grid_equal_those_of_transformers(size: tuple[int, int], kind: str) -> None:
    image = noise(*size)
    theirs = of_transformers(kind)(images=image, return_tensors="pt")
    processor = DynamicResolutionProcessor.from_settings(KINDS[kind][0])
    pixels = processed(processor, DecodedImage.whole(image))
    rows, grid = rows_of(kind, torch.from_numpy(pixels))
    assert grid.tolist() == theirs["image_grid_thw"].tolist()
    torch.testing.assert_close(rows, theirs["pixel_values"].view_as(rows), atol=1e-5, rtol=0)
    placeholders = processor.placeholders(pixels, size)
    assert placeholders.grid == (1, grid[0, 1] // 2, grid[0, 2] // 2)
    assert placeholders.num_tokens == grid.prod() // 4


@pytest.mark.parametrize("kind", KINDS)
def test_default_bounds_equal_transformers(kind: str) -> None:
    settings = {"image_processor_type": KINDS[kind][0]["image_processor_type"], "patch_size": 4}
    theirs = of_transformers(kind, size=KINDS[kind][1].size)
    processor = DynamicResolutionProcessor.from_settings(settings)
    for side in (40, 4000):
        edge = side / processor.reduction((side, side))
        assert edge**2 / 4**2 == pytest.approx(theirs.get_number_of_image_patches(side, side))


@pytest.mark.parametrize(
    "bounds",
    [
        {"min_pixels": 400, "max_pixels": 1600},
        {"size": {"min_pixels": 400, "max_pixels": 1600}},
        {"size": {"shortest_edge": 400, "longest_edge": 1600}},
        {"size": {"shortest_edge": 4, "longest_edge": 9999}, "min_pixels": 400, "max_pixels": 1600},
        {},
    ],
    ids=["beside size", "in size", "as edges", "both", "none at all"],
)
def test_bounds_come_from_the_file_or_overrides(bounds: dict[str, Any]) -> None:
    settings = {"patch_size": 4, "merge_size": 2, **bounds}
    large, small = DecodedImage.whole(noise(3000, 2000)), DecodedImage.whole(noise(8, 8))

    def areas(processor: DynamicResolutionProcessor) -> list[int]:
        return [pixels.shape[2] * pixels.shape[3] for pixels in map(processor.process, (small, large))]

    least, most = areas(DynamicResolutionProcessor.from_settings(settings))
    if bounds:
        assert 400 <= least <= 600
        assert 1200 <= most <= 1600
    else:
        assert 3136 <= least < most <= 1003520
    overrides = ProcessorOverrides(min_pixels=900, max_pixels=2500)
    least, most = areas(DynamicResolutionProcessor.from_settings(settings, overrides=overrides))
    assert 900 <= least <= 1100
    assert 2000 <= most <= 2500
    narrow = DynamicResolutionProcessor.from_settings(settings, overrides=ProcessorOverrides(max_pixels=256))
    assert max(areas(narrow)) <= 256, "the file's lower bound gives way"
    with pytest.raises(ConfigurationError, match="min_pixels, 9,000,000, is more than max_pixels"):
        DynamicResolutionProcessor.from_settings(settings, overrides=ProcessorOverrides(min_pixels=9_000_000))


def test_whatever_changes_pixels_changes_the_fingerprint() -> None:
    fingerprints = {
        DynamicResolutionProcessor.from_settings({**SETTINGS, **change}).fingerprint
        for change in ({}, {"max_pixels": 999}, {"merge_size": 1}, {"resample": 2}, {"do_normalize": False})
    }
    processor = DynamicResolutionProcessor.from_settings(SETTINGS)
    fingerprints.add(
        DynamicResolutionProcessor.from_settings(SETTINGS, overrides=ProcessorOverrides(min_pixels=100)).fingerprint
    )
    fingerprints |= {processor.within(ImageBudget(max_pixels=most)).fingerprint for most in (500, 600)}
    fingerprints.add(DynamicResolutionProcessor.from_settings(SETTINGS, exact_pixels=True).fingerprint)
    assert len(fingerprints) == 9
    assert processor.within(ImageBudget()).fingerprint in fingerprints


def test_request_bounds_may_narrow_but_not_widen() -> None:
    processor = DynamicResolutionProcessor.from_settings(SETTINGS)
    narrow = processed(processor.within(ImageBudget(max_pixels=1000)), DecodedImage.whole(noise(200, 90)))
    assert 500 <= narrow.shape[2] * narrow.shape[3] <= 1000
    large = processed(processor.within(ImageBudget(min_pixels=2000)), DecodedImage.whole(noise(8, 8)))
    assert 2000 <= large.shape[2] * large.shape[3] <= 2500
    tiny = processed(processor.within(ImageBudget(max_pixels=100)), DecodedImage.whole(noise(200, 200)))
    assert tiny.shape[2] * tiny.shape[3] == 64, "the checkpoint's own lower bound gives way"
    for limits, message in {
        ImageBudget(max_pixels=64 * 64 + 1): "max_pixels is 4,097; it must lie between 1 and this server's max_pixels",
        ImageBudget(min_pixels=10**9): "min_pixels is 1,000,000,000",
        ImageBudget(min_pixels=0): "min_pixels is 0",
        ImageBudget(min_pixels=2000, max_pixels=1000): "min_pixels, 2,000, is more than max_pixels, 1,000",
    }.items():
        with pytest.raises(InvalidRequestError, match=message):
            processor.within(limits)


def test_low_detail_is_small_without_an_explicit_size() -> None:
    settings = {**SETTINGS, "size": {"shortest_edge": 16 * 16, "longest_edge": 1024 * 1024}}
    processor = DynamicResolutionProcessor.from_settings(settings)

    def area(size: tuple[int, int], of: DynamicResolutionProcessor = processor, **limits: int) -> int:
        pixels = processed(of.within(ImageBudget(**limits, low_detail=True)), DecodedImage.whole(noise(*size)))
        return pixels.shape[2] * pixels.shape[3]

    assert 0.95 * LOW_DETAIL_PIXELS < area((900, 700)) <= LOW_DETAIL_PIXELS == 512 * 512
    assert area((64, 40)) == 64 * 40, "what is small stays as it is"
    assert 390_000 < area((900, 700), max_pixels=400_000) <= 400_000
    assert 300_000 <= area((64, 40), min_pixels=300_000) < 330_000
    small = DynamicResolutionProcessor.from_settings(SETTINGS)
    assert small.within(ImageBudget(low_detail=True)) is small, "the server's own bound is lower"
    large = DynamicResolutionProcessor.from_settings(settings, overrides=ProcessorOverrides(min_pixels=500_000))
    assert area((64, 40), large) < 1.02 * LOW_DETAIL_PIXELS, "the server's lower bound gives way"
    low = processor.within(ImageBudget(low_detail=True))
    assert low.fingerprint == processor.within(ImageBudget(max_pixels=LOW_DETAIL_PIXELS)).fingerprint
    assert low.fingerprint != processor.fingerprint
    theirs = Qwen2VLImageProcessorPil(**{**settings, "size": {"shortest_edge": 16 * 16, "longest_edge": 512 * 512}})(
        images=noise(900, 700), return_tensors="pt"
    )
    rows, grid = patches(torch.from_numpy(processed(low, DecodedImage.whole(noise(900, 700)))), QWEN2)
    assert grid.tolist() == theirs["image_grid_thw"].tolist()
    torch.testing.assert_close(rows, theirs["pixel_values"].view_as(rows), atol=1e-5, rtol=0)


def test_an_image_that_is_too_narrow_is_refused() -> None:
    with pytest.raises(InvalidImageError, match="200 times as long as the other"):
        processed(DynamicResolutionProcessor.from_settings(SETTINGS), DecodedImage.whole(noise(1, 201)))
