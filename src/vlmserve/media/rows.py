"""Preprocesses images for Pixtral's tower. Most models have a token after each row of embeddings."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.families.registry import vision_family
from vlmserve.media.budget import NO_BUDGET, ImageBudget
from vlmserve.media.dynamic_resolution import LOW_DETAIL_PIXELS
from vlmserve.media.image_files import ImageFiles
from vlmserve.media.images import DecodedImage
from vlmserve.media.processor import (
    CLIP_LEVELS,
    Placeholders,
    Recipe,
    RecipeProcessor,
    given,
    resizing,
    to_pixels,
    to_rgb,
)
from vlmserve.types import Pixels

_MERGING = ("mistral3", "lighton_ocr")
"""Models that merge patches."""


@dataclass(frozen=True)
class RowRecipe(Recipe):
    side: int
    """Pixels along each side of an embedding."""
    longest: int
    """Maximum edge before rounding up to whole squares."""
    budget: ImageBudget = NO_BUDGET
    """Bounds of smaller or larger images."""
    ends: bool = True
    """True if a token follows each row."""

    def num_tokens(self, columns: int, rows: int) -> int:
        return rows * (columns + self.ends)


class RowProcessor(RecipeProcessor[RowRecipe]):
    """Shrinks an image whose longest edge is too long, then resizes to whole squares."""

    version = "rows v1"

    def __init__(
        self,
        config: dict[str, Any],
        settings: dict[str, Any],
        ends: tuple[int, int] | None,
        *,
        sizes: dict[str, Any] | None = None,
        exact_pixels: bool = False,
    ) -> None:
        """ends: token ids after a row and after an image. sizes: of processor_config.json."""
        self._ends = ends
        recipe = replace(_recipe(settings, _side(config, sizes or {})), ends=ends is not None)
        self._follow(recipe, exact_pixels=exact_pixels)

    @classmethod
    def from_files(cls, files: ImageFiles) -> Self:
        sizes, exact = files.processor_config, files.exact_pixels
        family = vision_family(files.config)
        if family is not None and family.model_type == "lighton_ocr":
            return cls(files.config, files.settings, None, sizes=sizes, exact_pixels=exact)
        row_end = files.token_id("image_break_token", sizes.get("image_break_token", "[IMG_BREAK]"))
        image_end = files.token_id("image_end_token", sizes.get("image_end_token", "[IMG_END]"))
        return cls(files.config, files.settings, (row_end, image_end), sizes=sizes, exact_pixels=exact)

    def within(self, budget: ImageBudget) -> Self:
        recipe = self._recipe
        largest = _squares(recipe.longest, recipe.side) ** 2 * recipe.side**2
        budget = budget.settled(recipe.side**2, recipe.budget.max_pixels or largest)
        budget.check_least(recipe.side**2, recipe.num_tokens(1, 1))
        if budget.low_detail and budget.max_pixels is None:
            budget = replace(budget, max_pixels=max(LOW_DETAIL_PIXELS, recipe.side**2, budget.min_pixels or 0))
        budget.check_most(min(largest, recipe.budget.max_pixels or largest))
        return self._following(replace(recipe, budget=recipe.budget.narrowed(budget)))

    def _target(self, size: tuple[int, int]) -> tuple[int, int]:
        columns, rows = self._grid(size)
        return columns * self._recipe.side, rows * self._recipe.side

    def process(self, decoded: DecodedImage) -> Pixels:
        image = to_rgb(decoded.image).resize(self._target(decoded.size), self._recipe.resample, decoded.box)
        return to_pixels([image])

    def placeholders(self, pixels: Pixels, size: tuple[int, int]) -> Placeholders:
        rows, columns = (edge // self._recipe.side for edge in pixels.shape[2:])
        count = self._recipe.num_tokens(columns, rows)
        if self._ends is None:
            return Placeholders(count)
        row_end, image_end = self._ends
        ends = [(place, row_end) for place in range(columns, count - 1, columns + 1)]
        return Placeholders(count, text=(*ends, (count - 1, image_end)))

    def _grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """As many squares as the budget allows, after the smallest enlargement it requires."""
        budget = self._recipe.budget
        width, height = size
        if (least := budget.min_pixels) is not None and self._area(self._fitted(size)) < least:
            enlarged = min(math.sqrt(least / (width * height)), self._recipe.longest / max(size))
            if enlarged > 1:
                size = math.ceil(width * enlarged), math.ceil(height * enlarged)
        fitted = self._fitted(size)
        if self._is_allowed(fitted):
            return fitted
        # Bisect for the longest edge that fits the budget.
        low, high = 1, min(max(size), self._recipe.longest)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._is_allowed(self._fitted(size, middle)) else (low, middle)
        return self._fitted(size, low)

    def _fitted(self, size: tuple[int, int], longest: int | None = None) -> tuple[int, int]:
        """longest: edge in pixels; None: the checkpoint's."""
        longest = longest or self._recipe.longest
        ratio = max(edge / longest for edge in size)
        width, height = (math.floor(edge / ratio) for edge in size) if ratio > 1 else size
        return _squares(width, self._recipe.side), _squares(height, self._recipe.side)

    def _is_allowed(self, grid: tuple[int, int]) -> bool:
        return self._recipe.budget.allows(self._area(grid), self._recipe.num_tokens(*grid))

    def _area(self, grid: tuple[int, int]) -> int:
        return math.prod(grid) * self._recipe.side**2


def _squares(edge: int, side: int) -> int:
    return max(1, math.ceil(edge / side))


def _side(config: dict[str, Any], sizes: dict[str, Any]) -> int:
    patch = (config.get("vision_config") or {}).get("patch_size", 16)
    merge = config.get("spatial_merge_size", 2) if config.get("model_type") in _MERGING else 1
    for name, value in (("patch_size", patch), ("spatial_merge_size", merge)):
        if sizes.get(name, value) != value:
            raise ModelLoadError(
                f"processor_config.json has {name} {sizes[name]}, but the model of config.json {value}; correct it"
            )
    if not isinstance(patch, int) or not isinstance(merge, int) or min(patch, merge) < 1:
        raise UnsupportedModelError(f"patches of {patch!r} pixels, {merge!r} merged, are not supported")
    return patch * merge


def _recipe(settings: dict[str, Any], side: int) -> RowRecipe:
    values = {
        **CLIP_LEVELS,
        "do_resize": True,
        "size": {"longest_edge": 1024},
        **given(settings),
    }
    size = values["size"]
    longest = size.get("longest_edge") if isinstance(size, dict) else size
    if not values["do_resize"] or values.get("do_center_crop") or not isinstance(longest, int) or longest < 1:
        raise UnsupportedModelError(
            f"an image processor with size {size!r}, do_resize {values['do_resize']} and do_center_crop "
            f"{values.get('do_center_crop')} is not supported for Pixtral, only one with a longest edge"
        )
    return RowRecipe(
        side=side,
        longest=longest,
        **resizing(values),
    )
