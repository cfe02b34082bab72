"""Splits images into squares of pixels, one per embedding, as LFM2-VL does.

Large images become tiles and a whole image of another size. Grids and tokens equal Transformers'
`Lfm2VlImageProcessor`; levels differ by at most 1, because it resizes with torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, Self

import numpy as np
from PIL import Image

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.media.budget import ImageBudget
from vlmserve.media.image_files import ImageFiles
from vlmserve.media.images import DecodedImage
from vlmserve.media.processor import (
    Placeholders,
    Recipe,
    RecipeProcessor,
    given,
    resizing,
    to_rgb,
)
from vlmserve.media.tiles import expanded, nearest_grid
from vlmserve.types import Pixels, SquareGrids

_ENDS = 2
"""Tokens before and after an image."""
_DEFAULTS: dict[str, Any] = {
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
    "resample": Image.Resampling.BILINEAR,
    "image_mean": 0.5,
    "image_std": 0.5,
    "encoder_patch_size": 16,
    "downsample_factor": 2,
    "tile_size": 512,
    "do_image_splitting": True,
    "min_tiles": 2,
    "max_tiles": 10,
    "use_thumbnail": True,
    "min_image_tokens": 64,
    "max_image_tokens": 256,
    "max_pixels_tolerance": 2.0,
}


@dataclass(frozen=True)
class SquareRecipe(Recipe):
    side: int
    """Pixels along each side of a square."""
    patch: int
    tile: int
    """Squares along each side of a tile."""
    least_tiles: int
    most_tiles: int
    """1: images are not cut."""
    overview: bool
    """True if the whole image follows its tiles."""
    least: int
    """Minimum squares of an uncut image, and of an overview."""
    most: int
    """Maximum squares of an uncut image, and of an overview."""
    tolerance: float
    """Cut an image with more than ``tolerance * most`` squares."""
    strict: bool = False
    """Enforce `most` even if `least` would lead to more; transformers does not."""

    @property
    def tile_pixels(self) -> int:
        return (self.tile * self.side) ** 2

    @property
    def most_pixels(self) -> int:
        return max(self.most * self.side**2, self.most_tiles * self.tile_pixels if self.most_tiles > 1 else 0)


class SquarePlan(NamedTuple):
    rows: int
    """Rows of tiles. 0: the image is not cut."""
    columns: int
    whole: tuple[int, int] | None
    """Rows and columns of squares of the whole image. None: only tiles."""


class SquareProcessor(RecipeProcessor[SquareRecipe]):
    version = "squares v1"

    def __init__(
        self, config: dict[str, Any], settings: dict[str, Any], words: SquareWords, *, exact_pixels: bool = False
    ) -> None:
        self._follow(_recipe(config, settings), exact_pixels=exact_pixels)
        self._words = words
        self._written = lru_cache(256)(words.tokens)

    @classmethod
    def from_files(cls, files: ImageFiles) -> Self:
        if not files.processor_config.get("use_image_special_tokens", True):
            raise UnsupportedModelError(
                "processor_config.json: use_image_special_tokens is false, which is not supported; remove it"
            )
        return cls(files.config, files.settings, SquareWords.of(files), exact_pixels=files.exact_pixels)

    def within(self, budget: ImageBudget) -> Self:
        recipe = self._recipe
        square = recipe.side**2
        budget = budget.settled(square, recipe.most_pixels)
        budget.check_least(square, 1 + _ENDS)
        bounds = budget.max_pixels and budget.max_pixels // square, budget.max_tokens and budget.max_tokens - _ENDS
        most = min([recipe.most, *(bound for bound in bounds if bound is not None)])
        counts = range(2, recipe.most_tiles + 1)
        most_tiles = max((count for count in counts if self._fits(count, most, budget)), default=1)
        cut = most_tiles >= recipe.least_tiles > 1
        budget.check_most(replace(recipe, most=most, most_tiles=most_tiles if cut else 1).most_pixels)
        wanted = budget.min_pixels or 0
        recipe = replace(recipe, most=most, strict=recipe.strict or most < recipe.most or bool(wanted))
        if wanted > most * square:
            least_tiles = max(recipe.least_tiles, math.ceil(wanted / recipe.tile_pixels))
            return self._following(replace(recipe, least_tiles=least_tiles, most_tiles=most_tiles, tolerance=0.0))
        if not cut or budget.low_detail:
            recipe = replace(recipe, least_tiles=1, most_tiles=1)
        else:
            recipe = replace(recipe, most_tiles=most_tiles)
        return self._following(replace(recipe, least=math.ceil(wanted / square) or min(recipe.least, most)))

    def _fits(self, tiles: int, most: int, budget: ImageBudget) -> bool:
        recipe = self._recipe
        written = max(len(self._written(*grid, recipe.overview)) for grid in ((1, tiles), (tiles, 1)))
        words = written - tiles - recipe.overview
        tokens = tiles * recipe.tile**2 + recipe.overview * most + words
        return budget.allows(tiles * recipe.tile_pixels, tokens)

    def _target(self, size: tuple[int, int]) -> tuple[int, int]:
        return self._largest(self._plan(size))

    def process(self, decoded: DecodedImage) -> Pixels:
        """Return uint8 ``[squares, 3, side, side]``.

        Squares of a part are in rows. Tiles come first, in rows, then the whole image.
        """
        plan, recipe = self._plan(decoded.size), self._recipe
        image, parts = to_rgb(decoded.image), []
        if plan.rows:
            size = self._largest(plan)
            levels = np.asarray(image.resize(size, recipe.resample, decoded.box))
            tiles = levels.reshape(plan.rows, recipe.tile * recipe.side, plan.columns, recipe.tile * recipe.side, 3)
            parts += [
                self._squares(tiles[row, :, column]) for row in range(plan.rows) for column in range(plan.columns)
            ]
        if plan.whole is not None:
            rows, columns = plan.whole
            size = columns * recipe.side, rows * recipe.side
            parts.append(self._squares(np.asarray(image.resize(size, recipe.resample, decoded.box))))
        return np.concatenate(parts)

    def _squares(self, levels: Pixels) -> Pixels:
        """``[height, width, 3]`` to ``[squares, 3, side, side]``."""
        side, (height, width, _) = self._recipe.side, levels.shape
        squares = levels.reshape(height // side, side, width // side, side, 3).transpose(0, 2, 4, 1, 3)
        return squares.reshape(-1, 3, side, side)

    def placeholders(self, pixels: Pixels, size: tuple[int, int]) -> Placeholders:
        plan, tile = self._plan(size), self._recipe.tile
        whole = () if plan.whole is None else (plan.whole,)
        grids = (*((tile, tile) for _ in range(plan.rows * plan.columns)), *whole)
        tokens = self._written(plan.rows, plan.columns, plan.whole is not None)
        count, text = expanded(tokens, self._words.image_token_id, map(math.prod, grids))
        return Placeholders(count, tiling=SquareGrids(grids), text=text)

    def _largest(self, plan: SquarePlan) -> tuple[int, int]:
        """Pixels of all tiles together, or of an uncut image."""
        side, tile = self._recipe.side, self._recipe.tile
        rows, columns = plan.whole or (0, 0)
        if plan.rows:
            rows, columns = plan.rows * tile, plan.columns * tile
        return columns * side, rows * side

    def _plan(self, size: tuple[int, int]) -> SquarePlan:
        recipe = self._recipe
        width, height = size
        squares = math.prod(round(edge / recipe.side) or recipe.patch / recipe.side for edge in size)
        if recipe.most_tiles == 1 or squares <= recipe.most * recipe.tolerance:
            return SquarePlan(0, 0, self._whole(width, height))
        grids = _grids(recipe.least_tiles, recipe.most_tiles)
        columns, rows = nearest_grid(size, grids, recipe.tile_pixels)
        return SquarePlan(rows, columns, self._whole(width, height) if recipe.overview else None)

    def _whole(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of an uncut image with about its shape."""
        recipe, side = self._recipe, self._recipe.side
        rows, columns = (max(1, round(edge / side)) for edge in (height, width))
        if rows * columns > recipe.most:
            shrink = math.sqrt(height * width / (recipe.most * side**2))
            rows, columns = (max(1, math.floor(edge / shrink / side)) for edge in (height, width))
        elif rows * columns < recipe.least:
            grow = math.sqrt(recipe.least * side**2 / (height * width))
            rows, columns = (math.ceil(edge * grow / side) for edge in (height, width))
        while recipe.strict and rows * columns > recipe.most and rows * columns > 1:
            # Shortening the longer side changes the shape least.
            if rows > columns:
                rows -= 1
            else:
                columns -= 1
        return rows, columns


@lru_cache(64)
def _grids(least: int, most: int) -> list[tuple[int, int]]:
    """The smallest first. As in transformers, Python's set order decides between equal areas."""
    pairs = {
        (columns, rows)
        for count in range(least, most + 1)
        for columns in range(1, count + 1)
        for rows in range(1, count + 1)
        if least <= columns * rows <= most
    }
    return sorted(pairs, key=math.prod)


@dataclass(frozen=True)
class SquareWords:
    encode: Callable[[str], Sequence[int]]
    image_token: str
    image_token_id: int
    start: str
    end: str
    overview: str
    """The token before the whole image, after tiles."""

    @classmethod
    def of(cls, files: ImageFiles) -> Self:
        """Raises ModelLoadError for a tokenizer without the tokens around an image."""
        tokenizer, usual = files.tokenizer, ("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
        assert tokenizer.image_token is not None
        assert tokenizer.image_token_id is not None
        names = ("image_start_token", "image_end_token", "image_thumbnail_token")
        for name, token in zip(names[:_ENDS], usual, strict=False):
            files.token_id(name, token)
        start, end, overview = (tokenizer.special_tokens.get(*pair) for pair in zip(names, usual, strict=True))
        encode = partial(tokenizer.encode, add_special_tokens=False)
        return cls(encode, tokenizer.image_token, tokenizer.image_token_id, start, end, overview)

    def tokens(self, rows: int, columns: int, whole: bool) -> Sequence[int]:
        """One placeholder per part."""
        parts = [
            f"<|img_row_{row + 1}_col_{column + 1}|>{self.image_token}"
            for row in range(rows)
            for column in range(columns)
        ]
        if whole:
            parts.append(f"{self.overview if rows else ''}{self.image_token}")
        return self.encode(f"{self.start}{''.join(parts)}{self.end}")


def _recipe(config: dict[str, Any], settings: dict[str, Any]) -> SquareRecipe:
    values = {**_DEFAULTS, **given(settings)}
    patch, merge = int(values["encoder_patch_size"]), int(values["downsample_factor"])
    model = (config.get("vision_config") or {}).get("patch_size", 16), config.get("downsample_factor", 2)
    if (patch, merge) != model:
        raise ModelLoadError(
            f"the image processor merges {merge} x {merge} patches of {patch} pixels, config.json {model[1]} x "
            f"{model[1]} of {model[0]}; correct encoder_patch_size and downsample_factor"
        )
    tile, side = int(values["tile_size"]), patch * merge
    least, most = int(values["min_tiles"]), int(values["max_tiles"])
    if not values["do_image_splitting"] or least == most == 1:
        least = most = 1
    elif tile % side or not 1 < least <= most:
        raise UnsupportedModelError(
            f"the image processor's {least} to {most} tiles of {tile} pixels are not supported; it takes at least 2 "
            f"tiles of a multiple of {side} pixels"
        )
    return SquareRecipe(
        side=side,
        patch=patch,
        tile=max(1, tile // side),
        least_tiles=least,
        most_tiles=most,
        overview=bool(values["use_thumbnail"]),
        least=int(values["min_image_tokens"]),
        most=int(values["max_image_tokens"]),
        tolerance=float(values["max_pixels_tolerance"]),
        **resizing(values),
    )
