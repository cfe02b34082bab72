"""Images for Muse Glimmer against transformers' own processor."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.muse_glimmer import image_processor, rows_of
from tests.normalized import processed
from vlmserve.media.budget import ImageBudget
from vlmserve.media.image_files import ImageFiles
from vlmserve.media.images import DecodedImage
from vlmserve.media.muse_glimmer import MuseGlimmerProcessor
from vlmserve.settings.config import MediaConfig

SETTINGS: dict[str, Any] = {"patch_size": 4, "max_image_tokens": 30}
BEGIN, END = 7, 8


class Tokens:
    """The tokens around images."""

    special_tokens: Mapping[str, str] = MappingProxyType({})
    image_token, image_token_id = "<|patch|>", 9

    def token_id(self, token: str) -> int | None:
        return {"<|image_start|>": BEGIN, "<|image_end|>": END}.get(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return []


def own(settings: dict[str, Any] | None = None, **media: Any) -> MuseGlimmerProcessor:
    return MuseGlimmerProcessor.from_files(
        ImageFiles({}, SETTINGS if settings is None else settings, {}, Tokens(), MediaConfig(**media))
    )


def noise(width: int, height: int) -> Image.Image:
    levels = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(levels)


@pytest.mark.parametrize(
    "size",
    [(24, 24), (25, 39), (12, 12), (63, 65), (200, 90), (5, 3), (7, 300), (1000, 8), (20, 4), (36, 44), (100, 100)],
    ids=str,
)
def test_pixels_and_tokens_equal_those_of_transformers(size: tuple[int, int]) -> None:
    image = noise(*size)
    theirs = image_processor(**SETTINGS)(image)
    processor = own()
    pixels = processed(processor, DecodedImage.whole(image))
    rows, grid = rows_of(torch.from_numpy(pixels))
    assert grid.tolist() == theirs["image_grid_thw"].tolist()
    torch.testing.assert_close(rows, theirs["pixel_values"], atol=1e-5, rtol=0)
    placeholders = processor.placeholders(pixels, size)
    assert placeholders.num_tokens == grid.prod() // 4 + 2
    assert placeholders.text == ((0, BEGIN), (placeholders.num_tokens - 1, END))


def test_default_sizes_equal_those_of_transformers() -> None:
    theirs = image_processor()
    for size in ((3000, 2000), (100, 4000), (640, 480)):
        pixels = own({}).process(DecodedImage.whole(noise(*size)))
        assert pixels.shape[2] * pixels.shape[3] // 14**2 == theirs.get_number_of_image_patches(*size[::-1], {})


def test_budgets_bound_images_from_both_sides() -> None:
    def tokens(budget: ImageBudget, size: tuple[int, int]) -> int:
        processor = own().within(budget)
        return processor.placeholders(processor.process(DecodedImage.whole(noise(*size))), size).num_tokens

    assert 9 <= tokens(ImageBudget(min_pixels=8 * 64), (10, 8)) <= 14
    assert tokens(ImageBudget(max_tokens=12), (90, 50)) <= 12
    assert tokens(ImageBudget(max_tokens=5), (900, 9)) <= 5
    assert own(mm_processor_kwargs={"max_tokens": 12}).process(DecodedImage.whole(noise(90, 50))).shape[2:] == (16, 32)
