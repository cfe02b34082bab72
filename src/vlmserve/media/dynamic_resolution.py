"""Preprocesses images for towers with dynamic resolution: images keep their shape, within bounds.

For Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-OCR and PaddleOCR-VL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from vlmserve.errors import ConfigurationError, InvalidImageError, InvalidRequestError
from vlmserve.media.budget import HIGH_DETAIL, NO_BUDGET, ImageBudget
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
from vlmserve.settings.config import ProcessorOverrides
from vlmserve.types import Pixels

LARGEST_ASPECT = 200
"""Maximum aspect ratio of an image."""
IMAGE_BOUNDS = (56 * 56, 28 * 28 * 1280)
"""Default minimum and maximum pixels of an image."""
Widening = Literal["down", "nearest"]
"""How to round the longer side when an image grows because the other side is shorter than a square."""


@dataclass(frozen=True)
class DynamicResolutionKind:
    """Differences that the processors' settings do not tell."""

    bounds: tuple[int, int] = IMAGE_BOUNDS
    """Default minimum and maximum pixels of an image."""
    widening: Widening | None = None
    """None: images with a short side do not grow."""
    counts_frames: bool = False
    """The bounds count an image's pixels once for each frame of a patch."""


_GLM = DynamicResolutionKind(bounds=(112 * 112, 28 * 28 * 15000), widening="down", counts_frames=True)
KINDS: Mapping[str, DynamicResolutionKind] = {
    "Qwen2": DynamicResolutionKind(),
    "Glm4": _GLM,
    "GlmOcr": _GLM,
    "PaddleOCRVL": DynamicResolutionKind(bounds=(384 * 384, 1536 * 1536), widening="nearest"),
}
"""By prefix of the image processor's name."""
LOW_DETAIL_PIXELS = 512 * 512
"""Maximum pixels of an image with low detail, unless the request sets a bound."""


@dataclass(frozen=True)
class DynamicResolutionRecipe(Recipe):
    side: int
    """Pixels along each side of an embedding."""
    min_pixels: int
    max_pixels: int
    resize: bool
    frames: int = 1
    """Number of frames that share the pixel bounds."""
    depth: int | None = None
    """Frames of a video that share embeddings; None: it is an image."""
    strict: bool = False
    """Enforce `max_pixels` even if `min_pixels` in whole squares exceeds it; Transformers does not."""
    widening: Widening | None = None
    """As in `DynamicResolutionKind`."""


class DynamicResolutionProcessor(RecipeProcessor[DynamicResolutionRecipe]):
    version = "any size v1"

    def __init__(self, recipe: DynamicResolutionRecipe, *, exact_pixels: bool = False) -> None:
        self._follow(recipe, exact_pixels=exact_pixels)

    @classmethod
    def from_settings(
        cls,
        settings: dict[str, Any],
        *,
        exact_pixels: bool = False,
        overrides: ProcessorOverrides | None = None,
        bounds: tuple[int, int] | None = None,
    ) -> Self:
        """overrides: replace settings. bounds: default pixels. Raises ConfigurationError for overrides that leave no
        size."""
        return cls(_recipe(settings, overrides or ProcessorOverrides(), bounds), exact_pixels=exact_pixels)

    @classmethod
    def from_files(cls, files: ImageFiles) -> Self:
        overrides = files.media.mm_processor_kwargs
        return cls.from_settings(files.settings, exact_pixels=files.exact_pixels, overrides=overrides)

    def within(self, budget: ImageBudget) -> Self:
        """Raises InvalidRequestError for larger bounds; `max_tokens` has no limit."""
        budget = budget.settled(self._recipe.min_pixels, self._recipe.max_pixels if self._recipe.resize else 0)
        if budget in (NO_BUDGET, HIGH_DETAIL):
            return self
        if not self._recipe.resize:
            raise InvalidRequestError("images keep their size for this model; leave the budget of this image out")
        most = self._recipe.max_pixels
        budget.check_limit(most)
        if budget.low_detail:
            most = min(most, max(LOW_DETAIL_PIXELS, budget.min_pixels or 0))
        most = budget.max_pixels or most
        if budget.max_tokens is not None:
            most = min(most, budget.max_tokens * self._recipe.side**2)
        budget.check_most(most)
        least = budget.min_pixels or min(self._recipe.min_pixels, most)
        bounded = budget.max_pixels is not None or budget.max_tokens is not None
        reduced = most < self._recipe.max_pixels and budget.min_pixels is None
        strict = self._recipe.strict or bounded or reduced
        return self._following(replace(self._recipe, min_pixels=least, max_pixels=most, strict=strict))

    def for_video(self, num_frames: int, depth: int, bounds: tuple[int, int]) -> Self:
        """As in Qwen3-VL. depth: frames that share embeddings. bounds: pixels of all frames together; this processor's
        bounds apply to each frame."""
        least = max(bounds[0], num_frames * self._recipe.min_pixels)
        counted = _counted(num_frames, depth) if self._recipe.strict else num_frames
        most = min(bounds[1], min(num_frames, counted) * self._recipe.max_pixels)
        recipe = replace(
            self._recipe, min_pixels=min(least, most), max_pixels=most, frames=num_frames, depth=depth, widening="down"
        )
        return type(self)(recipe, exact_pixels=self._exact_pixels)

    def _target(self, size: tuple[int, int]) -> tuple[int, int]:
        return self._resized(size) if self._recipe.resize else size

    def process(self, decoded: DecodedImage) -> Pixels:
        image = to_rgb(decoded.image)
        if self._recipe.resize:
            image = image.resize(self._resized(decoded.size), self._recipe.resample, decoded.box)
        return to_pixels([image])

    def placeholders(self, pixels: Pixels, size: tuple[int, int]) -> Placeholders:
        grid = self.grid(pixels)
        return Placeholders(math.prod(grid), grid)

    def grid(self, pixels: Pixels) -> tuple[int, int, int]:
        frames, _, height, width = pixels.shape
        return frames, height // self._recipe.side, width // self._recipe.side

    def _resized(self, size: tuple[int, int]) -> tuple[int, int]:
        width, height = size
        if max(size) > LARGEST_ASPECT * min(size):
            raise InvalidImageError(
                f"the image has {width} x {height} pixels; one side may be at most {LARGEST_ASPECT} times as long as "
                "the other"
            )
        down, across = self._grid_of(size)
        return across * self._recipe.side, down * self._recipe.side

    def _grid_of(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of squares. size: width and height of the image."""
        side, least, most = self._recipe.side, self._recipe.min_pixels, self._recipe.max_pixels
        depth = self._recipe.depth
        counted = 1 if depth is None else _counted(self._recipe.frames, depth)
        width, height = _widened(size, side, self._recipe.widening)
        down, across = round(height / side), round(width / side)
        area = self._recipe.frames * width * height
        if counted * down * across * side**2 > most:
            shrink = math.sqrt(area / most)
            down, across = (max(1, math.floor(edge / shrink / side)) for edge in (height, width))
        elif counted * down * across * side**2 < least:
            grow = math.sqrt(least / area)
            down, across = (math.ceil(edge * grow / side) for edge in (height, width))
            while self._recipe.strict and counted * down * across * side**2 > most and down * across > 1:
                # Remove the row or column that a growing image reaches last.
                if (down - 1) * width >= (across - 1) * height:
                    down -= 1
                else:
                    across -= 1
        return down, across


def _widened(size: tuple[int, int], side: int, widening: Widening | None) -> tuple[int, int]:
    width, height = size
    if widening == "down" and min(size) < side:
        enlarged = max(side / height, side / width)
        return int(width * enlarged), int(height * enlarged)
    if widening == "nearest" and height < side:
        width, height = round(width * side / height), side
    if widening == "nearest" and width < side:
        width, height = side, round(height * side / width)
    return width, height


def _counted(num_frames: int, depth: int) -> int:
    return max(1, round(num_frames / depth)) * depth


def pixel_bounds(settings: dict[str, Any], defaults: tuple[int, int]) -> tuple[int, int]:
    size = settings.get("size")
    bounds = size if isinstance(size, dict) else {}
    # Transformers' versions store them outside `size`, or in it with either name.
    least = settings.get("min_pixels") or bounds.get("min_pixels") or bounds.get("shortest_edge") or defaults[0]
    most = settings.get("max_pixels") or bounds.get("max_pixels") or bounds.get("longest_edge") or defaults[1]
    return int(least), int(most)


def _kind_of(settings: dict[str, Any]) -> DynamicResolutionKind:
    name = str(settings.get("image_processor_type"))
    return next((kind for prefix, kind in KINDS.items() if name.startswith(prefix)), DynamicResolutionKind())


def _recipe(
    settings: dict[str, Any], overrides: ProcessorOverrides, defaults: tuple[int, int] | None
) -> DynamicResolutionRecipe:
    kind = _kind_of(settings)
    values = {
        **CLIP_LEVELS,
        "do_resize": True,
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        **given(settings),
    }
    side = int(values["patch_size"]) * int(values["merge_size"])
    least, most = pixel_bounds(values, defaults or kind.bounds)
    if kind.counts_frames:
        frames = int(values["temporal_patch_size"])
        least, most = -(-least // frames), most // frames
    most = overrides.max_pixels or most
    if overrides.max_tokens is not None:
        most = min(most, overrides.max_tokens * side**2)
    least = overrides.min_pixels or min(least, most)
    if least > most:
        raise ConfigurationError(f"--mm-processor-kwargs: min_pixels, {least:,}, is more than max_pixels, {most:,}")
    return DynamicResolutionRecipe(
        side=side,
        min_pixels=least,
        max_pixels=most,
        resize=bool(values["do_resize"]),
        **resizing(values),
        strict=not (overrides.max_pixels is None and overrides.max_tokens is None),
        widening=kind.widening,
    )
