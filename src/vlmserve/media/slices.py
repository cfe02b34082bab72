"""Cuts images into slices that keep their shape, as MiniCPM-V does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.media.budget import NO_BUDGET, ImageBudget
from vlmserve.media.image_files import ImageFiles
from vlmserve.media.images import DecodedImage
from vlmserve.media.processor import (
    CLIP_LEVELS,
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
from vlmserve.media.tiles import cut_tiles
from vlmserve.types import Canvas, Pieces, Pixels

_ON_CANVAS = ("minicpmv4_7",)
"""Models that count positions of embeddings on a canvas, by ``model_type``."""
_MERGES = {"4x": 2, "16x": 4}
"""Patches along each side of an embedding, by ``downsample_mode``."""


@dataclass(frozen=True)
class SliceRecipe(Recipe):
    patch: int
    merge: int
    """Patches along each side of an embedding."""
    scale: int
    """Side of a square with the target area of a piece."""
    most: int
    """Maximum number of slices; 1: images are not cut."""
    budget: ImageBudget = NO_BUDGET
    has_labels: bool = True
    """False for video frames, which have no labels."""

    @property
    def side(self) -> int:
        return self.patch * self.merge


class SlicePlan(NamedTuple):
    """Widths and heights in pixels."""

    whole: tuple[int, int]
    """Size of the piece that shows the whole image."""
    rows: int
    columns: int
    """Rows and columns of slices; 0: the image is not cut."""
    piece: tuple[int, int]

    @property
    def refined(self) -> tuple[int, int]:
        if not self.rows:
            return self.whole
        return self.columns * self.piece[0], self.rows * self.piece[1]


@dataclass(frozen=True)
class SliceWords:
    image: tuple[int, int]
    """Before and after the piece that shows the whole image."""
    slice: tuple[int, int]
    """Before and after each slice."""
    newline: Sequence[int]
    number: Callable[[int], Sequence[int]] | None = None
    """Token ids of an image's index in the prompt, from 0; None: images have no labels."""

    @classmethod
    def of(cls, files: ImageFiles, *, numbered: bool) -> Self:
        encode = partial(files.tokenizer.encode, add_special_tokens=False)

        def pair(name: str) -> tuple[int, int]:
            return files.token_id(f"{name}_start_token", f"<{name}>"), files.token_id(f"{name}_end_token", f"</{name}>")

        number = None
        if numbered:
            first, last = pair("image_id")
            number = lambda index: (first, *encode(str(index)), last)  # noqa: E731
        return cls(pair("image"), pair("slice"), tuple(encode("\n")), number)


class SliceProcessor(RecipeProcessor[SliceRecipe]):
    """A large image becomes a small whole image plus a grid of equal slices of about its shape.

    Pixels of a cut image are patches side by side, ``[1, 3, patch, patches * patch]``.
    """

    version = "slices v1"

    def __init__(
        self, config: dict[str, Any], settings: dict[str, Any], words: SliceWords, *, exact_pixels: bool = False
    ) -> None:
        recipe = _recipe(settings)
        _check_model(config, recipe)
        self._words = words
        self.on_canvas = config.get("model_type") in _ON_CANVAS
        if self.on_canvas and len(words.newline) != 1:
            raise ModelLoadError("tokenizer.json: a newline is not one token, as MiniCPM-V 4.7 needs it")
        self._follow(recipe, exact_pixels=exact_pixels)

    @classmethod
    def from_files(cls, files: ImageFiles) -> Self:
        words = SliceWords.of(files, numbered=bool(files.settings.get("use_image_id", True)))
        return cls(files.config, files.settings, words, exact_pixels=files.exact_pixels)

    @property
    def for_frames(self) -> Self:
        return self._following(replace(self._recipe, has_labels=False))

    def label(self, index: int) -> Sequence[int]:
        return () if self._words.number is None else self._words.number(index)

    def within(self, budget: ImageBudget) -> Self:
        recipe = self._recipe
        area = recipe.scale**2
        budget = budget.settled(area, recipe.most * area)
        budget.check_least(recipe.side**2, 3)
        budget.check_most(recipe.most * area)
        if budget.low_detail and (budget.min_pixels or 0) <= area:
            recipe = replace(recipe, most=1)
        return self._following(replace(recipe, budget=recipe.budget.narrowed(budget)))

    def _target(self, size: tuple[int, int]) -> tuple[int, int]:
        plan = self._plan(size)
        return max(plan.whole[0], plan.refined[0]), max(plan.whole[1], plan.refined[1])

    def process(self, decoded: DecodedImage) -> Pixels:
        plan, resample = self._plan(decoded.size), self._recipe.resample
        image = to_rgb(decoded.image)
        whole = to_pixels([image.resize(plan.whole, resample, decoded.box)])
        if not plan.rows:
            return whole
        refined = image.resize(plan.refined, resample, decoded.box)
        pieces = [whole[0], *to_pixels(cut_tiles(refined, *plan.piece))]
        return np.concatenate([self._patches(piece) for piece in pieces], 2)[None]

    def placeholders(self, pixels: Pixels, size: tuple[int, int]) -> Placeholders:
        """Newlines separate rows of slices."""
        plan = self._plan(size)
        text: list[tuple[int, int]] = []
        place = 0

        def piece(area: tuple[int, int], around: tuple[int, int]) -> None:
            nonlocal place
            count = math.prod(edge // self._recipe.side for edge in area)
            text.extend([(place, around[0]), (place + 1 + count, around[1])])
            place += count + 2

        piece(plan.whole, self._words.image)
        for row in range(plan.rows):
            for _ in range(plan.columns):
                piece(plan.piece, self._words.slice)
            if row + 1 < plan.rows:
                text.extend((place + offset, token) for offset, token in enumerate(self._words.newline))
                place += len(self._words.newline)
        canvas, end_id = (self._canvas(plan), self._words.newline[0]) if self.on_canvas else (None, None)
        return Placeholders(place, canvas, self._pieces(plan), tuple(text), end_id, self._recipe.has_labels)

    def view(self, size: tuple[int, int], pixels: Pixels, placeholders: Placeholders) -> View:
        return whole_view(size, *self._plan(size).refined)

    def _canvas(self, plan: SlicePlan) -> Canvas:
        whole, piece = (
            (height // self._recipe.side, width // self._recipe.side) for width, height in (plan.whole, plan.piece)
        )
        return Canvas(whole, (plan.rows, plan.columns), piece) if plan.rows else Canvas(whole)

    def _pieces(self, plan: SlicePlan) -> Pieces | None:
        if not plan.rows:
            return None
        patch = self._recipe.patch
        whole, piece = ((height // patch, width // patch) for width, height in (plan.whole, plan.piece))
        return Pieces((whole, *[piece] * (plan.rows * plan.columns)))

    def _patches(self, piece: Pixels) -> Pixels:
        """``[3, height, width]`` to ``[3, patch, patches * patch]``, row by row."""
        channels, height, width = piece.shape
        patch = self._recipe.patch
        rows = piece.reshape(channels, height // patch, patch, width)
        return rows.transpose(0, 2, 1, 3).reshape(channels, patch, -1)

    def _plan(self, size: tuple[int, int]) -> SlicePlan:
        """The most slices within the budget; without such a plan, the image shrinks."""
        recipe = self._recipe
        for most in range(recipe.most, 0, -1):
            plan = self._plan_of(size, most, recipe.scale)
            if self._is_allowed(plan):
                return plan
        for scale in range(recipe.scale - recipe.scale % recipe.side, recipe.side, -recipe.side):
            plan = self._plan_of(size, 1, scale)
            if self._is_allowed(plan):
                return plan
        return self._plan_of(size, 1, recipe.side)

    def _is_allowed(self, plan: SlicePlan) -> bool:
        side, newlines = self._recipe.side, len(self._words.newline) * max(0, plan.rows - 1)
        slices = plan.rows * plan.columns
        embeddings = (math.prod(plan.whole) + slices * math.prod(plan.piece)) // side**2
        tokens = embeddings + 2 * (1 + slices) + newlines
        return self._recipe.budget.allows(math.prod(plan.refined), tokens)

    def _plan_of(self, size: tuple[int, int], most: int, scale: int) -> SlicePlan:
        side = self._recipe.side
        wanted = max(math.prod(size), self._recipe.budget.min_pixels or 0)
        columns, rows = _grid(size, min(math.ceil(wanted / scale**2), most), most)
        whole = _fitted(size, scale, side, enlarge=not rows)
        if not rows:
            return SlicePlan(whole, 0, 0, whole)
        edges = (max(round(edge / count), 1) for edge, count in zip(size, (columns, rows), strict=True))
        width, height = edges
        return SlicePlan(whole, rows, columns, _fitted((width, height), scale, side, enlarge=True))


def _grid(size: tuple[int, int], wanted: int, most: int) -> tuple[int, int]:
    """About `wanted` slices with the nearest shape; 0: the image is not cut."""
    if wanted <= 1:
        return 0, 0
    shape = math.log(size[0] / size[1])
    grids = [
        (count // rows, rows)
        for count in (wanted - 1, wanted, wanted + 1)
        if 1 < count <= most
        for rows in range(1, count + 1)
        if count % rows == 0
    ]
    # Among equally near grids, the one with the most rows.
    return min(grids, key=lambda grid: (abs(shape - math.log(grid[0] / grid[1])), -grid[1]))


def _fitted(size: tuple[int, int], scale: int, side: int, *, enlarge: bool) -> tuple[int, int]:
    """Whole squares, about ``scale ** 2`` pixels. enlarge: also enlarge smaller images."""
    width, height = size
    if width * height > scale**2 or enlarge:
        aspect = width / height
        height = int(scale / math.sqrt(aspect))
        width = int(height * aspect)
    return max(round(width / side), 1) * side, max(round(height / side), 1) * side


def _recipe(settings: dict[str, Any]) -> SliceRecipe:
    values = {
        **CLIP_LEVELS,
        "image_mean": 0.5,
        "image_std": 0.5,
        "do_resize": True,
        "slice_mode": True,
        "max_slice_nums": 9,
        "scale_resolution": 448,
        "patch_size": 14,
        "downsample_mode": "16x",
        **given(settings),
    }
    if not values["do_resize"] or values["downsample_mode"] not in _MERGES:
        raise UnsupportedModelError(
            f"an image processor with do_resize {values['do_resize']} and downsample_mode "
            f"{values['downsample_mode']!r} is not supported for MiniCPM-V"
        )
    return SliceRecipe(
        patch=int(values["patch_size"]),
        merge=_MERGES[values["downsample_mode"]],
        scale=int(values["scale_resolution"]),
        most=max(1, int(values["max_slice_nums"])) if values["slice_mode"] else 1,
        **resizing(values),
    )


def _check_model(config: dict[str, Any], recipe: SliceRecipe) -> None:
    """Raise ModelLoadError unless the patches fit the vision tower."""
    vision = config.get("vision_config") or {}
    patch, merge = vision.get("patch_size", 16), _MERGES.get(config.get("downsample_mode", "16x"))
    if (patch, merge) != (recipe.patch, recipe.merge):
        raise ModelLoadError(
            f"the image processor merges {recipe.merge} x {recipe.merge} patches of {recipe.patch} pixels, config.json "
            f"{merge} x {merge} of {patch}; correct patch_size or downsample_mode"
        )
