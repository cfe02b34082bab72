"""Preprocesses images for Muse Glimmer: the grid of squares nearest to an image's shape, within a number of tokens.

Equals Transformers' processor with Pillow's resizing. torchvision's rounds levels once instead of after each axis, so
that levels of most images differ by at most 2 of 255.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, Self

from PIL import Image

from vlmserve.media.budget import ImageBudget
from vlmserve.media.dynamic_resolution import DynamicResolutionProcessor
from vlmserve.media.image_files import ImageFiles
from vlmserve.media.processor import Placeholders, given
from vlmserve.types import Pixels

_AROUND = 2
"""Tokens before and after an image."""
_DEFAULTS: dict[str, Any] = {
    "resample": Image.Resampling.LANCZOS,
    "image_mean": 0.5,
    "image_std": 0.5,
    "patch_size": 14,
    "merge_size": 2,
    "max_image_tokens": 4096,
}


class MuseGlimmerProcessor(DynamicResolutionProcessor):
    version = "nearest grid v1"
    around: tuple[int, int]
    """Ids of the tokens before and after an image."""

    @classmethod
    def from_files(cls, files: ImageFiles) -> Self:
        settings = {**_DEFAULTS, **given(files.settings)}
        area = (settings["patch_size"] * settings["merge_size"]) ** 2
        settings |= {"min_pixels": 1, "max_pixels": settings["max_image_tokens"] * area}
        own, overrides = {**settings, "size": None}, files.media.mm_processor_kwargs
        if overrides.max_tokens is not None:
            overrides = overrides.model_copy(update={"max_tokens": max(1, overrides.max_tokens - _AROUND)})
        made = cls.from_settings(own, exact_pixels=files.exact_pixels, overrides=overrides)
        names = ("image_start_token", "<|image_start|>"), ("image_end_token", "<|image_end|>")
        begin, end = (files.token_id(*name) for name in names)
        made.around = begin, end
        return made

    def within(self, budget: ImageBudget) -> Self:
        if budget.max_tokens is not None:
            budget = replace(budget, max_tokens=max(1, budget.max_tokens - _AROUND))
        return super().within(budget)

    def placeholders(self, pixels: Pixels, size: tuple[int, int]) -> Placeholders:
        begin, end = self.around
        count = math.prod(self.grid(pixels)) + _AROUND
        return Placeholders(count, text=((0, begin), (count - 1, end)))

    def _grid_of(self, size: tuple[int, int]) -> tuple[int, int]:
        width, height = size
        area = self._recipe.side**2
        least, most = self._recipe.min_pixels / area, max(1, self._recipe.max_pixels // area)
        down, across = height / self._recipe.side, width / self._recipe.side
        # Only a request's budget has a minimum.
        if (wanted := min(max(down * across, least), most)) != down * across:
            ratio = across / down
            down = (wanted / ratio) ** 0.5
            across = down * ratio
        # Transformers iterates over a set, whose order decides between equally near grids.
        grids = set(itertools.product(*([math.floor(edge), math.ceil(edge)] for edge in (down, across))))
        fitting = [(rows, columns) for rows, columns in grids if min(rows, columns) > 0 and rows * columns <= most]
        if not fitting:
            rows, columns = (max(1, round(edge)) for edge in (down, across))
            return (min(rows, most), min(columns, most)) if self._recipe.strict else (rows, columns)
        return min(fitting, key=lambda grid: abs(grid[0] / grid[1] - height / width))
