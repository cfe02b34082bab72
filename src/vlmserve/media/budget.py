"""Image budgets: limits of an image's area and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vlmserve.errors import InvalidRequestError
from vlmserve.types import ImageInput

BUDGET_FIELDS = ("min_pixels", "max_pixels", "max_tokens")
"""Names of the bounds in requests and settings."""


@dataclass(frozen=True, slots=True)
class ImageBudget:
    """Bounds of an image after resizing; None: the server's bounds."""

    min_pixels: int | None = None
    """Minimum area of all tiles together. Models with few sizes come as close to it as they can."""
    max_pixels: int | None = None
    """Maximum area of all tiles together."""
    max_tokens: int | None = None
    """Maximum tokens in the prompt; for videos, of each frame of embeddings."""
    low_detail: bool = False
    """Models that cut images get them whole, models for any size get small images."""
    high_detail: bool = False
    """As large as the server allows."""
    usual_pixels: int | None = None
    """Maximum area without another upper bound; an image never gets less than the model needs."""

    @classmethod
    def of(cls, fields: Mapping[str, Any], detail: str | None = None) -> ImageBudget:
        """detail: OpenAI's field next to the image's URL."""
        bounds = {name: fields.get(name) for name in BUDGET_FIELDS}
        return cls(**bounds, low_detail=detail == "low", high_detail=detail in ("high", "original"))

    def or_else(self, default: ImageBudget) -> ImageBudget:
        return replace(self, **{name: getattr(default, name) for name in BUDGET_FIELDS if getattr(self, name) is None})

    @property
    def is_open(self) -> bool:
        """True if the server chooses the usual size."""
        return not (self.low_detail or self.high_detail or self.max_pixels or self.max_tokens)

    def settled(self, least: int, most: int) -> ImageBudget:
        """Turn the usual size into `max_pixels`. least, most: pixels of the model's smallest and largest image."""
        if self.usual_pixels is None:
            return self
        # Whole squares or tiles need room for twice the requested minimum.
        pixels = max(self.usual_pixels, least, 2 * (self.min_pixels or 0))
        bound = pixels if self.is_open and pixels < most else self.max_pixels
        return replace(self, max_pixels=bound, usual_pixels=None)

    def allows(self, pixels: int, tokens: int) -> bool:
        return (self.max_pixels is None or pixels <= self.max_pixels) and (
            self.max_tokens is None or tokens <= self.max_tokens
        )

    def narrowed(self, budget: ImageBudget) -> ImageBudget:
        """Combine the lower upper bounds, and the lower bound of `budget`, by default this budget's within the upper
        bound."""
        upper = {
            name: min((most for most in (getattr(self, name), getattr(budget, name)) if most is not None), default=None)
            for name in ("max_pixels", "max_tokens")
        }
        least = budget.min_pixels
        if least is None and self.min_pixels is not None:
            least = min(self.min_pixels, upper["max_pixels"] or self.min_pixels)
        return ImageBudget(least, upper["max_pixels"], upper["max_tokens"])

    def check_limit(self, pixels: int) -> None:
        """Raise InvalidRequestError above the server's limit."""
        for name, value in (("min_pixels", self.min_pixels), ("max_pixels", self.max_pixels)):
            if value is not None and not 1 <= value <= pixels:
                raise InvalidRequestError(
                    f"{name} is {value:,}; it must lie between 1 and this server's max_pixels, {pixels:,}"
                )
        self.check_order()

    def check_kept(self, image: ImageInput) -> None:
        """Raise InvalidRequestError for an image that stays too large."""
        size = image.size
        if size is None:
            return
        tokens = size.tokens
        if size.frames is not None and isinstance(image.grid, tuple):
            tokens = image.grid[1] * image.grid[2]
        kind = f"an image of {size.width} x {size.height} pixels"
        if self.max_tokens is not None and tokens > self.max_tokens:
            raise InvalidRequestError(
                f"max_tokens is {self.max_tokens:,}, but {kind} takes at least {tokens:,} tokens of this model"
            )
        seen = (size.model_width or 0) * (size.model_height or 0)
        if self.max_pixels is not None and seen > self.max_pixels:
            raise InvalidRequestError(
                f"max_pixels is {self.max_pixels:,}, but {kind} has at least {size.model_width} x {size.model_height} "
                "for this model"
            )

    def check_least(self, pixels: int, tokens: int) -> None:
        self.check_order()
        for name, most, least in (("pixels", self.max_pixels, pixels), ("tokens", self.max_tokens, tokens)):
            if most is not None and least > most:
                raise InvalidRequestError(
                    f"max_{name} is {most:,}, but for this model an image has at least {least:,} {name}; "
                    f"raise it or leave it out"
                )

    def check_most(self, pixels: int) -> None:
        if self.min_pixels is not None and self.min_pixels > pixels:
            raise InvalidRequestError(
                f"min_pixels is {self.min_pixels:,}, but for this model an image has at most {pixels:,} pixels here; "
                "lower it or leave it out"
            )

    def check_order(self) -> None:
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise InvalidRequestError(f"min_pixels, {self.min_pixels:,}, is more than max_pixels, {self.max_pixels:,}")


NO_BUDGET = ImageBudget()
HIGH_DETAIL = ImageBudget(high_detail=True)
