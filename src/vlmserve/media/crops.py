"""Preprocesses images for Moondream's tower: a small whole image, and overlapping crops of a large one.

Revisions 2025-01-09 to 2025-04-14 of https://huggingface.co/vikhyatk/moondream2 also use Pillow's Lanczos filter
without libvips.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from PIL import Image

from vlmserve.errors import UnsupportedModelError
from vlmserve.levels import Levels
from vlmserve.media.budget import ImageBudget
from vlmserve.media.image_files import ImageFiles
from vlmserve.media.images import DecodedImage
from vlmserve.media.processor import Placeholders, Recipe, RecipeProcessor, to_rgb
from vlmserve.types import Pixels


@dataclass(frozen=True)
class CropRecipe(Recipe):
    """Sizes are in pixels."""

    size: int
    margin: int
    """Overlap with the neighbor on each side."""
    patch: int
    max_crops: int
    max_pixels: int | None = None

    @property
    def step(self) -> int:
        return self.size - 2 * self.margin


class CropProcessor(RecipeProcessor[CropRecipe]):
    """Its pixels are one plane: in the upper left corner the whole image in the size of a crop, below it the image for
    crops."""

    version = "crops v1"

    def __init__(self, config: Mapping[str, Any], *, exact_pixels: bool = False) -> None:
        """Raises UnsupportedModelError for crops that only overlap."""
        self._follow(_recipe(config), exact_pixels=exact_pixels)

    @classmethod
    def from_files(cls, files: ImageFiles) -> Self:
        return cls(files.config, exact_pixels=files.exact_pixels)

    def within(self, budget: ImageBudget) -> Self:
        recipe = self._recipe
        budget = budget.settled(recipe.size**2, recipe.max_pixels or self._most_pixels)
        budget.check_least(recipe.size**2, self._num_tokens)
        budget.check_most(self._most_pixels)
        if budget.low_detail and (budget.min_pixels or 0) <= recipe.size**2:
            return self._uncut if recipe.max_crops > 1 else self
        if budget.max_pixels is None or budget.max_pixels >= (recipe.max_pixels or self._most_pixels):
            return self
        return self._following(replace(recipe, max_pixels=budget.max_pixels))

    @cached_property
    def _uncut(self) -> Self:
        return self._following(replace(self._recipe, max_crops=1))

    def process(self, decoded: DecodedImage) -> Pixels:
        image = to_rgb(decoded.image)
        side = self._recipe.size
        width, height = self._target(decoded.size)
        pixels = np.zeros((1, 3, side + height, width), np.uint8)
        for target, top in (((side, side), 0), ((width, height), side)):
            resized = image.resize(target, self._recipe.resample, decoded.box)
            pixels[0, :, top : top + target[1], : target[0]] = np.asarray(resized).transpose(2, 0, 1)
        return pixels

    def placeholders(self, pixels: Pixels, size: tuple[int, int]) -> Placeholders:
        return Placeholders(self._num_tokens)

    @property
    def _num_tokens(self) -> int:
        return (self._recipe.size // self._recipe.patch) ** 2

    @property
    def _most_pixels(self) -> int:
        most = self._recipe.max_crops
        pixels = (
            math.prod(self._crops_size(rows, columns)) for rows in range(1, most + 1) for columns in [most // rows]
        )
        return min(max(pixels), self._recipe.max_pixels or sys.maxsize)

    def _target(self, size: tuple[int, int]) -> tuple[int, int]:
        """The largest within the budget."""
        recipe = self._recipe
        height, width = size[1] - 2 * recipe.margin, size[0] - 2 * recipe.margin
        for most in range(recipe.max_crops, 0, -1):
            large = self._crops_size(*tiling(height, width, recipe.step, most))
            if recipe.max_pixels is None or math.prod(large) <= recipe.max_pixels:
                break
        return large

    def _crops_size(self, rows: int, columns: int) -> tuple[int, int]:
        step, margins = self._recipe.step, 2 * self._recipe.margin
        return columns * step + margins, rows * step + margins


def tiling(height: int, width: int, step: int, most: int) -> tuple[int, int]:
    """Rows and columns of at most `most` tiles; a very long image may get one longer row or column."""
    if most == 1 or height <= step or width <= step:
        return 1, 1
    least = math.ceil(height / step), math.ceil(width / step)
    if least[0] * least[1] > most:
        shrink = math.sqrt(most / (least[0] * least[1]))
        return max(1, math.floor(least[0] * shrink)), max(1, math.floor(least[1] * shrink))
    rows = max(least[0], math.floor(math.sqrt(most * height / width)))
    columns = max(least[1], math.floor(math.sqrt(most * width / height)))
    if rows * columns > most:
        if columns > rows:
            columns = most // rows
        else:
            rows = most // columns
    return max(1, rows), max(1, columns)


def _recipe(config: Mapping[str, Any]) -> CropRecipe:
    own = config.get("config") or {}
    vision = {
        "crop_size": 378,
        "enc_patch_size": 14,
        "overlap_margin": 4,
        "max_crops": 12,
        **(own.get("vision") or {}),
    }
    recipe = CropRecipe(
        size=int(vision["crop_size"]),
        margin=int(vision["overlap_margin"]) * int(vision["enc_patch_size"]),
        patch=int(vision["enc_patch_size"]),
        max_crops=int(vision["max_crops"]),
        resample=Image.Resampling.LANCZOS,
        levels=Levels(1 / 255, (0.5,) * 3, (0.5,) * 3),
    )
    if recipe.step < 1 or recipe.max_crops < 1:
        raise UnsupportedModelError(
            f"config.json: crops of {recipe.size} pixels with margins of {recipe.margin}, at most {recipe.max_crops}, "
            "are not supported"
        )
    return recipe
