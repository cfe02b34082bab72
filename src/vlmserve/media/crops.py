"""Images to pixels for Moondream's tower: the whole one small, and a large one that overlapping crops are cut from.

The revisions of https://huggingface.co/vikhyatk/moondream2 from 2025-01-09 to 2025-04-14 resize with Pillow's Lanczos
filter, as here, where libvips is not installed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from blake3 import blake3
from PIL import Image

from vlmserve.errors import UnsupportedModelError
from vlmserve.media.images import DecodedImage
from vlmserve.media.processor import PixelLimits, PixelProcessor, Placeholders, level_table, refuse_limits, to_rgb
from vlmserve.types import Pixels


@dataclass(frozen=True)
class CropRecipe:
    """Every setting that changes pixels. size: of a crop's side. margin: what its neighbours have as well of it, on
    either side. patch: of a patch's side. max_crops: of one image."""

    size: int
    margin: int
    patch: int
    max_crops: int

    @property
    def step(self) -> int:
        """Pixels from one crop to the next."""
        return self.size - 2 * self.margin


class CropProcessor(PixelProcessor):
    """Preprocesses images for one checkpoint; see `media.processor.FixedSizeProcessor`. Its pixels are one plane: the
    whole image at a crop's size in the upper left corner, below it the one that crops are cut from."""

    def __init__(self, config: Mapping[str, Any], *, exact_pixels: bool = False) -> None:
        """config: of config.json. Raises UnsupportedModelError for crops that have nothing of their own."""
        self._exact_pixels = exact_pixels
        self._set_recipe(_recipe(config))
        self._levels = level_table(1 / 255, (0.5,) * 3, (0.5,) * 3)

    def within(self, limits: PixelLimits) -> Self:
        """The same for images that become one crop, or this one. Raises InvalidRequestError for any bounds."""
        refuse_limits(limits)
        return self._uncut if limits.low_detail and self._recipe.max_crops > 1 else self

    @cached_property
    def _uncut(self) -> Self:
        uncut = copy(self)
        uncut._set_recipe(replace(self._recipe, max_crops=1))
        return uncut

    def _set_recipe(self, recipe: CropRecipe) -> None:
        self._recipe = recipe
        described = json.dumps(["crops v1", self._exact_pixels, asdict(recipe)], sort_keys=True)
        self.fingerprint = blake3(described.encode()).digest()

    def reduction(self, size: tuple[int, int]) -> float:
        """How many pixels of an image of that width and height become one, along the axis where it is fewer; 1.0 if
        every pixel is to be decoded."""
        if self._exact_pixels:
            return 1.0
        width, height = self._large_size(size)
        return min(size[0] / width, size[1] / height)

    def process(self, decoded: DecodedImage) -> Pixels:
        """Float32 ``[1, 3, height, width]`` of an image of any size and mode."""
        image = to_rgb(decoded.image)
        side = self._recipe.size
        width, height = self._large_size(decoded.size)
        levels = np.zeros((side + height, width, 3), np.uint8)
        for target, top in (((side, side), 0), ((width, height), side)):
            resized = image.resize(target, Image.Resampling.LANCZOS, decoded.box)
            levels[top : top + target[1], : target[0]] = np.asarray(resized)
        pixels = np.empty((1, 3, side + height, width), dtype=np.float32)
        for channel in range(3):
            np.take(self._levels[channel], levels[:, :, channel], out=pixels[0, channel])
        return pixels

    def placeholders(self, pixels: Pixels, size: tuple[int, int]) -> Placeholders:
        """As many tokens for every image; positions count them one by one."""
        return Placeholders((self._recipe.size // self._recipe.patch) ** 2)

    def _large_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Width and height of what crops are cut from."""
        recipe = self._recipe
        rows, columns = tiling(size[1] - 2 * recipe.margin, size[0] - 2 * recipe.margin, recipe.step, recipe.max_crops)
        return columns * recipe.step + 2 * recipe.margin, rows * recipe.step + 2 * recipe.margin


def tiling(height: int, width: int, step: int, most: int) -> tuple[int, int]:
    """How many rows and columns of tiles an image is cut into: at most so many in all, but for a single row or column
    of an image that is dozens of times as long as wide."""
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
    )
    if recipe.step < 1 or recipe.max_crops < 1:
        raise UnsupportedModelError(
            f"config.json: crops of {recipe.size} pixels with margins of {recipe.margin}, at most {recipe.max_crops}, "
            "are not supported"
        )
    return recipe
