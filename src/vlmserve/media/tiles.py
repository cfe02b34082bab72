"""Cuts images into tiles, as LLaVA-NeXT and Idefics3 (SmolVLM) do."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, Self

import numpy as np
from blake3 import blake3
from PIL import Image

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.media.budget import NO_BUDGET, ImageBudget
from vlmserve.media.image_files import ImageFiles
from vlmserve.media.images import DecodedImage
from vlmserve.media.processor import (
    FixedSizeProcessor,
    PixelProcessor,
    Placeholders,
    Recipe,
    RecipeProcessor,
    View,
    given,
    resizing,
    to_pixels,
    to_rgb,
    whole_view,
)
from vlmserve.types import Pixels, Tiling

_LARGEST_EDGE = 4096
"""Maximum pixels of a side before Idefics3 fits an image to tiles."""


class AnyResolutionProcessor(PixelProcessor):
    """Preprocesses images for LLaVA-NeXT.

    Fits an image into the resolution that keeps the most pixels, pads it in black, and cuts it into tiles. The whole
    image precedes as one tile; with low detail it is the only one.

    Raises as `RecipeProcessor` does.
    """

    def __init__(self, config: dict[str, Any], settings: dict[str, Any], *, exact_pixels: bool = False) -> None:
        values = {"size": 224, "crop_size": 224, **given(settings)}
        edge, tile = square_edge(values["size"]), square_edge(values["crop_size"])
        # CLIP's processor preprocesses each square tile.
        square = {
            "image_processor_type": "CLIPImageProcessor",
            "do_pad": False,
            "size": {"height": edge, "width": edge},
        }
        self._tile_processor = FixedSizeProcessor(config, {**values, **square}, exact_pixels=exact_pixels)
        self.levels = self._tile_processor.levels
        self._edge, self._tile = edge, tile
        self._resample = int(values.get("resample", Image.Resampling.BICUBIC))
        self._side = math.isqrt(self._tile_processor.num_tokens)
        if (self._tile_processor.height, self._side**2) != (tile, self._tile_processor.num_tokens):
            raise UnsupportedModelError(
                f"tiles of {tile} pixels become images of {self._tile_processor.height} pixels and "
                f"{self._tile_processor.num_tokens} embeddings, which do not form a square"
            )
        self._exact_pixels = exact_pixels
        self._set_resolutions(_resolutions(values.get("image_grid_pinpoints"), tile))

    @classmethod
    def from_files(cls, files: ImageFiles) -> Self:
        return cls(files.config, files.settings, exact_pixels=files.exact_pixels)

    def within(self, budget: ImageBudget) -> Self:
        budget = budget.settled(self._tile**2, max(map(math.prod, self._resolutions), default=self._tile**2))
        budget.check_least(self._tile**2, self._side**2 + 1)
        allowed = [size for size in self._resolutions if budget.allows(math.prod(size), self._most_tokens(size))]
        budget.check_most(max(map(math.prod, allowed), default=self._tile**2))
        least = budget.min_pixels or 0
        if budget.low_detail and least <= self._tile**2:
            allowed = []
        resolutions = [size for size in allowed if math.prod(size) >= least]
        return self if resolutions == self._resolutions else self._cut_to(resolutions)

    def _cut_to(self, resolutions: list[tuple[int, int]]) -> Self:
        cut = copy(self)
        cut._set_resolutions(resolutions)
        return cut

    def _most_tokens(self, resolution: tuple[int, int]) -> int:
        columns, rows = (edge // self._tile * self._side for edge in resolution)
        return self._side**2 + rows * (columns + 1)

    def _set_resolutions(self, resolutions: list[tuple[int, int]]) -> None:
        """Widths and heights before cutting; empty: images are not cut."""
        self._resolutions = resolutions
        described = json.dumps(["any resolution v1", self._edge, self._tile, self._resample, resolutions])
        self.fingerprint = blake3(described.encode() + self._tile_processor.fingerprint).digest()

    def reduction(self, size: tuple[int, int]) -> float:
        if self._exact_pixels:
            return 1.0
        resized = _fitted(size, self._resolution(size)) if self._resolutions else (self._edge, self._edge)
        return min(own / max(new, self._edge) for own, new in zip(size, resized, strict=True))

    def process(self, decoded: DecodedImage) -> Pixels:
        image = to_rgb(decoded.image)
        whole = image.resize((self._edge, self._edge), self._resample, decoded.box)
        if not self._resolutions:
            return self._tile_processor.process(DecodedImage.whole(whole))
        resolution = self._resolution(decoded.size)
        width, height = _fitted(decoded.size, resolution)
        canvas = Image.new("RGB", resolution)
        corner = (resolution[0] - width) // 2, (resolution[1] - height) // 2
        canvas.paste(image.resize((width, height), self._resample, decoded.box), corner)
        tiles = [whole, *cut_tiles(canvas, self._tile, self._tile)]
        return np.concatenate([self._tile_processor.process(DecodedImage.whole(tile)) for tile in tiles])

    def placeholders(self, pixels: Pixels, size: tuple[int, int]) -> Placeholders:
        """The whole image's embeddings, then the tiles' embeddings of its area, with a newline after each row. An uncut
        image has one newline."""
        if len(pixels) == 1:
            return Placeholders(self._side**2 + 1)
        width, height = size
        columns, rows = (edge // self._tile for edge in self._resolution(size))
        across, down = columns * self._side, rows * self._side
        # Rounded as in transformers, and cropped equally on both sides.
        if width / height > across / down:
            down -= (down - int(round(height * (across / width), 7))) // 2 * 2
        else:
            across -= (across - int(round(width * (down / height), 7))) // 2 * 2
        num_tokens = self._side**2 + down * (across + 1)
        return Placeholders(num_tokens, tiling=Tiling(rows, columns, down, across))

    def view(self, size: tuple[int, int], pixels: Pixels, placeholders: Placeholders) -> View:
        if len(pixels) > 1:
            return whole_view(size, *_fitted(size, self._resolution(size)))
        width, height, box = self._tile_processor.view((self._edge, self._edge), pixels, placeholders)
        assert box is not None
        across, down = size[0] / self._edge, size[1] / self._edge
        return View(width, height, (box[0] * across, box[1] * down, box[2] * across, box[3] * down))

    def _resolution(self, size: tuple[int, int]) -> tuple[int, int]:
        """The resolution that keeps the most pixels of the image; on ties, the smallest."""
        width, height = size

        def kept(resolution: tuple[int, int]) -> tuple[int, int]:
            scale = min(resolution[0] / width, resolution[1] / height)
            pixels = min(int(width * scale) * int(height * scale), width * height)
            return pixels, -resolution[0] * resolution[1]

        return max(self._resolutions, key=kept)


@dataclass(frozen=True)
class SplitRecipe(Recipe):
    size: int | tuple[int, int] | None
    """Longest edge, or width and height, before cutting; None: the image's own."""
    tile: int
    split: bool
    budget: ImageBudget = NO_BUDGET
    """Upper bounds that limit the number of tiles."""


class SplitPlan(NamedTuple):
    size: tuple[int, int]
    rows: int
    """Rows of tiles; 0: it is not cut."""
    columns: int


class SplitProcessor(RecipeProcessor[SplitRecipe]):
    """Resizes an image to whole tiles and cuts it. The whole image follows as one tile. The prompt names each tile."""

    version = "split v1"

    def __init__(
        self,
        config: dict[str, Any],
        settings: dict[str, Any],
        words: SplitWords,
        *,
        tile_tokens: int | None = None,
        exact_pixels: bool = False,
    ) -> None:
        """words: tokens around tiles. tile_tokens: of a tile in another file, to compare."""
        self._follow(_split_recipe(settings), exact_pixels=exact_pixels)
        self._tile_tokens = _tile_tokens(config, self._recipe.tile)
        check_tile_tokens(self._recipe.tile, tile_tokens, self._tile_tokens, "image_seq_len")
        self._words = words
        self._written = lru_cache(256)(self._write)

    @classmethod
    def from_files(cls, files: ImageFiles) -> Self:
        count = files.processor_config.get("image_seq_len")
        words = SplitWords.of(files)
        return cls(files.config, files.settings, words, tile_tokens=count, exact_pixels=files.exact_pixels)

    def within(self, budget: ImageBudget) -> Self:
        recipe, least = self._recipe, self._recipe.tile**2
        budget = budget.settled(least, self._most_pixels)
        budget.check_least(least, self._written(0, 0).num_tokens)
        budget.check_most(self._most_pixels)
        if not recipe.split:
            return self
        if budget.low_detail and (budget.min_pixels or 0) <= least:
            return self._following(replace(recipe, split=False, budget=NO_BUDGET))
        return self._following(replace(recipe, budget=recipe.budget.narrowed(budget)))

    @property
    def _most_pixels(self) -> int:
        tile, size = self._recipe.tile, self._recipe.size
        if not self._recipe.split:
            return tile**2
        edges = (size, size) if isinstance(size, int) else size or (_LARGEST_EDGE, _LARGEST_EDGE)
        most = math.prod(math.ceil(min(edge, _LARGEST_EDGE) / tile) * tile for edge in edges)
        return min(most, self._recipe.budget.max_pixels or most)

    def _target(self, size: tuple[int, int]) -> tuple[int, int]:
        return size if self._recipe.size is None else self._plan(size).size

    def process(self, decoded: DecodedImage) -> Pixels:
        tile, resample, plan = self._recipe.tile, self._recipe.resample, self._plan(decoded.size)
        image = to_rgb(decoded.image).resize(plan.size, resample, decoded.box)
        if not plan.rows:
            return to_pixels([image.resize((tile, tile), resample)])
        image = image.resize((plan.columns * tile, plan.rows * tile), resample)
        return to_pixels([*cut_tiles(image, tile, tile), image.resize((tile, tile), resample)])

    def placeholders(self, pixels: Pixels, size: tuple[int, int]) -> Placeholders:
        plan = self._plan(size)
        return self._written(plan.rows, plan.columns)

    def view(self, size: tuple[int, int], pixels: Pixels, placeholders: Placeholders) -> View:
        plan, tile = self._plan(size), self._recipe.tile
        return whole_view(size, (plan.columns or 1) * tile, (plan.rows or 1) * tile)

    def _plan(self, size: tuple[int, int]) -> SplitPlan:
        """As many tiles as the budget allows."""
        tile, budget = self._recipe.tile, self._recipe.budget
        own = self._first_size(size, self._recipe.size)
        uncut = SplitPlan(own, 0, 0)
        if not self._recipe.split:
            return uncut
        smaller = (self._first_size(size, edge * tile) for edge in range(math.ceil(max(own) / tile) - 1, 1, -1))
        for first in (own, *smaller):
            width, height = _whole_tiles(first, tile)
            if max(width, height) <= tile:
                break
            plan = SplitPlan(first, height // tile, width // tile)
            if budget.allows(width * height, self._written(plan.rows, plan.columns).num_tokens):
                return plan
        return uncut

    def _write(self, rows: int, columns: int) -> Placeholders:
        tokens = self._words.tokens(rows, columns)
        count, text = expanded(tokens, self._words.image_token_id, itertools.repeat(self._tile_tokens))
        return Placeholders(count, text=text)

    def _first_size(self, size: tuple[int, int], target: int | tuple[int, int] | None) -> tuple[int, int]:
        """Width and height before the image is fitted to tiles. target: as `SplitRecipe.size`."""
        if target is None:
            return size
        if not isinstance(target, int):
            return target
        width, height = _with_longest_edge(size, target)
        # Round the shorter edge up to an even number.
        width, height = (width, height + height % 2) if size[0] >= size[1] else (width + width % 2, height)
        width, height = max(1, width), max(1, height)
        if max(width, height) > _LARGEST_EDGE:
            width, height = (max(1, edge) for edge in _with_longest_edge((width, height), _LARGEST_EDGE))
        return width, height


@dataclass(frozen=True)
class SplitWords:
    encode: Callable[[str], Sequence[int]]
    image_token: str
    image_token_id: int
    around: str
    """The token before each tile and after the last one."""
    whole: str
    """The token before the tile with the whole image."""

    @classmethod
    def of(cls, files: ImageFiles) -> Self:
        tokenizer = files.tokenizer
        assert tokenizer.image_token is not None
        assert tokenizer.image_token_id is not None
        around, named = "<fake_token_around_image>", tokenizer.special_tokens
        files.token_id("fake_image_token", around)
        return cls(
            encode=partial(tokenizer.encode, add_special_tokens=False),
            image_token=tokenizer.image_token,
            image_token_id=tokenizer.image_token_id,
            around=named.get("fake_image_token", around),
            whole=named.get("global_image_token", "<global-img>"),
        )

    def tokens(self, rows: int, columns: int) -> Sequence[int]:
        """One placeholder for each tile; 0 rows and columns: only the whole image."""
        lines = [
            "".join(f"{self.around}<row_{row + 1}_col_{column + 1}>{self.image_token}" for column in range(columns))
            for row in range(rows)
        ]
        tiles = "".join(line + "\n" for line in lines) + ("\n" if lines else "")
        return self.encode(f"{tiles}{self.around}{self.whole}{self.image_token}{self.around}")


def cut_tiles(image: Image.Image, width: int, height: int) -> list[Image.Image]:
    return [
        image.crop((x, y, x + width, y + height))
        for y in range(0, image.height, height)
        for x in range(0, image.width, width)
    ]


def nearest_grid(size: tuple[int, int], grids: Iterable[tuple[int, int]], tile_pixels: int) -> tuple[int, int]:
    """Columns and rows with the aspect ratio nearest to the image's.

    Among equally near grids, the last one with less than twice the image's area wins.
    """
    width, height = size
    best, least = (1, 1), math.inf
    for columns, rows in grids:
        distance = abs(width / height - columns / rows)
        enough = width * height > 0.5 * columns * rows * tile_pixels
        if distance < least or (distance == least and enough):
            best, least = (columns, rows), distance
    return best


def check_tile_tokens(tile: int, stated: int | None, computed: int, field: str) -> None:
    """Raises ModelLoadError if files disagree about the placeholders of a tile."""
    if stated is not None and stated != computed:
        raise ModelLoadError(
            f"a tile of {tile} pixels has {stated} placeholders in processor_config.json but {computed} embeddings by "
            f"config.json; correct {field}"
        )


def expanded(
    token_ids: Iterable[int], image_token_id: int, counts: Iterator[int]
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Repeat each image token as often as `counts` says. Returns the length, and the other tokens with their places."""
    place, text = 0, []
    for token_id in token_ids:
        if token_id == image_token_id:
            place += next(counts)
        else:
            text.append((place, token_id))
            place += 1
    return place, tuple(text)


def _fitted(size: tuple[int, int], bounds: tuple[int, int]) -> tuple[int, int]:
    (width, height), (most_width, most_height) = size, bounds
    across, down = most_width / width, most_height / height
    if across < down:
        return most_width, min(math.ceil(height * across), most_height)
    return min(math.ceil(width * down), most_width), most_height


def _with_longest_edge(size: tuple[int, int], longest: int) -> tuple[int, int]:
    width, height = size
    aspect = width / height
    return (longest, int(longest / aspect)) if width >= height else (int(longest * aspect), longest)


def _whole_tiles(size: tuple[int, int], tile: int) -> tuple[int, int]:
    """No smaller, and with about the same shape."""
    width, height = size
    longest = math.ceil(max(size) / tile) * tile
    width, height = _with_longest_edge(size, longest)
    return math.ceil(width / tile) * tile, math.ceil(height / tile) * tile


def square_edge(value: Any) -> int:
    """A number, or equal height and width."""
    edges = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
    edges = [edge for edge in edges if edge is not None]
    if not edges or not all(isinstance(edge, int) and edge == edges[0] > 0 for edge in edges):
        raise UnsupportedModelError(f"the image processor's size {value!r} is not supported; tiles are square")
    return int(edges[0])


def _resolutions(value: Any, tile: int) -> list[tuple[int, int]]:
    if value is None:
        value = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    pairs = [tuple(pair) for pair in value] if isinstance(value, list) else []
    if not pairs or not all(
        len(pair) == 2 and all(isinstance(edge, int) and edge > 0 for edge in pair) for pair in pairs
    ):
        raise UnsupportedModelError(f"image_grid_pinpoints {value!r} is not a list of heights and widths")
    if any(edge % tile for pair in pairs for edge in pair):
        raise UnsupportedModelError(f"image_grid_pinpoints {value!r} are not whole tiles of {tile} pixels")
    return [(width, height) for height, width in pairs]


def _split_recipe(settings: dict[str, Any]) -> SplitRecipe:
    values = {
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_image_splitting": True,
        "rescale_factor": 1 / 255,
        "resample": Image.Resampling.LANCZOS,
        "size": {"longest_edge": 4 * 364},
        "max_image_size": {"longest_edge": 364},
        "image_mean": 0.5,
        "image_std": 0.5,
        **given(settings),
    }
    return SplitRecipe(
        size=_first_size(values["size"]) if values["do_resize"] else None,
        tile=square_edge(values["max_image_size"]),
        split=bool(values["do_image_splitting"]),
        **resizing(values),
    )


def _first_size(value: Any) -> int | tuple[int, int]:
    size = {key: edge for key, edge in value.items() if edge is not None} if isinstance(value, dict) else {}
    if size.keys() == {"longest_edge"}:
        return int(size["longest_edge"])
    if size.keys() == {"height", "width"}:
        return int(size["width"]), int(size["height"])
    raise UnsupportedModelError(f"the image processor's size {value!r} is not supported; it takes a longest_edge")


def _tile_tokens(config: dict[str, Any], tile: int) -> int:
    merge, patch = config.get("scale_factor", 2), (config.get("vision_config") or {}).get("patch_size", 32)
    side = tile // patch
    if side < merge or side % merge:
        raise ModelLoadError(
            f"tiles of {tile} pixels have {side} patches per side, which the model cannot merge by {merge}; "
            "correct max_image_size of the image processor"
        )
    return int((side // merge) ** 2)
