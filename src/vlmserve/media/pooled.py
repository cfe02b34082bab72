"""Preprocesses images for towers that average squares of patches, within a budget of squares."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

from vlmserve.errors import ConfigurationError, InvalidImageError, UnsupportedModelError
from vlmserve.levels import Levels
from vlmserve.media.budget import ImageBudget
from vlmserve.media.image_files import ImageFiles
from vlmserve.media.images import DecodedImage
from vlmserve.media.processor import Placeholders, Recipe, RecipeProcessor, given, per_channel, to_pixels, to_rgb
from vlmserve.types import Pixels

BUDGETS = (70, 140, 280, 560, 1120)
"""Maximum embeddings of an image; the models were trained with these."""
_USUAL_BUDGET = 280
_AROUND = 2
"""Tokens before and after an image."""
_BICUBIC = 3
_BEGIN, _END = 255999, 258882
"""Default ids of the tokens before and after an image."""


@dataclass(frozen=True)
class PooledRecipe(Recipe):
    patch: int
    pool: int
    budget: int

    @property
    def side(self) -> int:
        return self.patch * self.pool


class PooledProcessor(RecipeProcessor[PooledRecipe]):
    version = "pooled v1"
    levels_of = (0.5, 0.5)
    """Mean and standard deviation that map levels to the tower's range from -1 to 1."""

    def __init__(self, recipe: PooledRecipe, around: tuple[int, int], *, exact_pixels: bool = False) -> None:
        self._around = around
        self._follow(recipe, exact_pixels=exact_pixels)

    @classmethod
    def from_files(cls, files: ImageFiles) -> Self:
        recipe, overrides = _recipe(files.settings, *cls.levels_of), files.media.mm_processor_kwargs
        most = overrides.max_tokens or recipe.budget + _AROUND
        if overrides.max_pixels is not None:
            most = min(most, overrides.max_pixels // recipe.side**2 + _AROUND)
        if most < BUDGETS[0] + _AROUND:
            raise ConfigurationError(
                f"--mm-processor-kwargs: images of this model take at least {BUDGETS[0] + _AROUND} tokens"
            )
        recipe = replace(recipe, budget=max(budget for budget in BUDGETS if budget + _AROUND <= most))
        around = files.config.get("boi_token_id", _BEGIN), files.config.get("eoi_token_id", _END)
        return cls(recipe, around, exact_pixels=files.exact_pixels)

    def within(self, budget: ImageBudget) -> Self:
        recipe, area = self._recipe, self._recipe.side**2
        budget = budget.settled(BUDGETS[0] * area, recipe.budget * area)
        budget.check_least(BUDGETS[0] * area, BUDGETS[0] + _AROUND)
        budget.check_most(recipe.budget * area)
        allowed = [own for own in BUDGETS if own <= recipe.budget and budget.allows(own * area, own + _AROUND)]
        wanted = budget.min_pixels or 0
        if budget.low_detail:
            allowed = [next((own for own in allowed if own * area >= wanted), allowed[-1])]
        return self._following(replace(recipe, budget=allowed[-1]))

    def process(self, decoded: DecodedImage) -> Pixels:
        image = to_rgb(decoded.image)
        return to_pixels([image.resize(self._target(decoded.size), self._recipe.resample, decoded.box)])

    def placeholders(self, pixels: Pixels, size: tuple[int, int]) -> Placeholders:
        begin, end = self._around
        count = _AROUND + math.prod(pixels.shape[2:]) // self._recipe.side**2
        return Placeholders(count, text=((0, begin), (count - 1, end)))

    def _target(self, size: tuple[int, int]) -> tuple[int, int]:
        (width, height), side, budget = size, self._recipe.side, self._recipe.budget
        factor = math.sqrt(budget * side**2 / (height * width))
        down, across = (math.floor(factor * edge / side) for edge in (height, width))
        if not down and not across:
            raise InvalidImageError(f"the image has {width} x {height} pixels, which fill no square of this model")
        if not down:
            down, across = 1, min(width // height, budget)
        elif not across:
            down, across = min(height // width, budget), 1
        return across * side, down * side


class UnifiedProcessor(PooledProcessor):
    """For models without a tower, which take levels from 0 to 1."""

    version = "pooled unified v1"
    levels_of = (0.0, 1.0)


def _recipe(settings: dict[str, Any], mean: float, deviation: float) -> PooledRecipe:
    values = {
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "max_soft_tokens": _USUAL_BUDGET,
        "resample": _BICUBIC,
        "rescale_factor": 1 / 255,
        "do_rescale": True,
        "do_resize": True,
        "do_normalize": False,
        "image_mean": 0.0,
        "image_std": 1.0,
        **given(settings),
    }
    plain = per_channel(values["image_mean"]) == (0, 0, 0) and per_channel(values["image_std"]) == (1, 1, 1)
    if values["do_normalize"] and not plain:
        raise UnsupportedModelError("the image processor normalizes levels, which is not supported for this model")
    if not values["do_resize"]:
        raise UnsupportedModelError("the image processor does not resize, which is not supported for this model")
    if values["max_soft_tokens"] not in BUDGETS:
        raise UnsupportedModelError(
            f"the image processor's max_soft_tokens is {values['max_soft_tokens']!r}, not one of {BUDGETS}"
        )
    rescale = float(values["rescale_factor"]) if values["do_rescale"] else None
    return PooledRecipe(
        patch=int(values["patch_size"]),
        pool=int(values["pooling_kernel_size"]),
        budget=int(values["max_soft_tokens"]),
        resample=int(values["resample"]),
        levels=Levels(rescale, (mean,) * 3, (deviation,) * 3),
    )
