"""Cuts images into tiles that fit their shape, as InternVL does; the tower sees one tile at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

from vlmserve.errors import UnsupportedModelError
from vlmserve.media.budget import ImageBudget
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
from vlmserve.media.tiles import check_tile_tokens, cut_tiles, nearest_grid, square_edge
from vlmserve.types import Pixels


@dataclass(frozen=True)
class GridRecipe(Recipe):
    tile: int
    least: int
    most: int


class GridProcessor(RecipeProcessor[GridRecipe]):
    """Resizes to the grid of tiles nearest in shape, and cuts it. The whole image follows several tiles."""

    version = "grid v1"
    most_side: int | None = None
    """Maximum tiles along each side; None: as many as an image may have."""

    def __init__(
        self,
        config: dict[str, Any],
        settings: dict[str, Any],
        around: tuple[int, int],
        *,
        tile_tokens: int | None = None,
        exact_pixels: bool = False,
    ) -> None:
        """around: token ids before and after an image. tile_tokens: of a tile in another file, to compare."""
        recipe = _recipe(settings)
        self._tile_tokens = _tile_tokens(config, recipe.tile)
        check_tile_tokens(recipe.tile, tile_tokens, self._tile_tokens, "image_seq_length")
        self._around = around
        self._follow(recipe, exact_pixels=exact_pixels)

    @classmethod
    def from_files(cls, files: ImageFiles) -> Self:
        around = files.token_id("start_image_token", "<img>"), files.token_id("end_image_token", "</img>")
        count = files.processor_config.get("image_seq_length")
        return cls(files.config, files.settings, around, tile_tokens=count, exact_pixels=files.exact_pixels)

    def within(self, budget: ImageBudget) -> Self:
        recipe, area = self._recipe, self._recipe.tile**2
        budget = budget.settled(area, recipe.most * area)
        budget.check_least(area, self._num_tokens(1))
        most = max(count for count in range(1, recipe.most + 1) if self._fits(count, budget))
        budget.check_most(most * area)
        wanted = budget.min_pixels or 0
        if budget.low_detail and wanted <= area:
            most = 1
        least = math.ceil(wanted / area) or min(recipe.least, most)
        return self._following(replace(recipe, least=least, most=most))

    def _fits(self, count: int, budget: ImageBudget) -> bool:
        return count == 1 or budget.allows(count * self._recipe.tile**2, self._num_tokens(count))

    def _target(self, size: tuple[int, int]) -> tuple[int, int]:
        grids = _grids(self._recipe.least, self._recipe.most, self.most_side or self._recipe.most)
        columns, rows = nearest_grid(size, grids, self._recipe.tile**2)
        return columns * self._recipe.tile, rows * self._recipe.tile

    def process(self, decoded: DecodedImage) -> Pixels:
        tile, resample = self._recipe.tile, self._recipe.resample
        image = to_rgb(decoded.image)
        tiles = cut_tiles(image.resize(self._target(decoded.size), resample, decoded.box), tile, tile)
        if len(tiles) > 1:
            tiles.append(image.resize((tile, tile), resample, decoded.box))
        return to_pixels(tiles)

    def placeholders(self, pixels: Pixels, size: tuple[int, int]) -> Placeholders:
        begin, end = self._around
        count = 2 + len(pixels) * self._tile_tokens
        return Placeholders(count, text=((0, begin), (count - 1, end)))

    def _num_tokens(self, count: int) -> int:
        return 2 + (count + (count > 1)) * self._tile_tokens


@lru_cache(64)
def _grids(least: int, most: int, most_side: int) -> list[tuple[int, int]]:
    """The smallest first."""
    pairs = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    return sorted((pair for pair in pairs if math.prod(pair) >= least and max(pair) <= most_side), key=math.prod)


def _recipe(settings: dict[str, Any]) -> GridRecipe:
    values = {
        **CLIP_LEVELS,
        "size": {"height": 384, "width": 384},
        "min_patches": 1,
        "max_patches": 12,
        **given(settings),
    }
    least, most = int(values["min_patches"]), int(values["max_patches"])
    if not 1 <= least <= most:
        raise UnsupportedModelError(f"the image processor's min_patches {least} and max_patches {most} leave no tiles")
    return GridRecipe(
        tile=square_edge(values["size"]),
        least=least,
        most=most,
        **resizing(values),
    )


def _tile_tokens(config: dict[str, Any], tile: int) -> int:
    vision = config.get("vision_config") or {}
    seen, patch = square_edge(vision.get("image_size", 448)), square_edge(vision.get("patch_size", 14))
    if seen != tile:
        raise UnsupportedModelError(
            f"the image processor makes tiles of {tile} x {tile} pixels, but the vision tower reads {seen} x {seen}"
        )
    return (tile // patch // int(1 / config.get("downsample_ratio", 0.5))) ** 2
