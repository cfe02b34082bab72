"""Image budgets: how large an image may be for a model, and how many tokens it may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vlmserve.errors import InvalidRequestError
from vlmserve.types import ImageInput

BUDGET_FIELDS = ("min_pixels", "max_pixels", "max_tokens")
"""Names of its bounds in requests and settings."""


@dataclass(frozen=True, slots=True)
class ImageBudget:
    """Bounds for what a model sees of an image; None: those of the server.

    min_pixels, max_pixels: of the area that the image has for the model: once it is resized, all tiles together.
    Models of few sizes come as close to min_pixels as they can. max_tokens: in the prompt; of a video, for each frame
    of its embeddings. low_detail: low detail is enough: models that cut images get it whole, those that take any size
    get it small. high_detail: as large as the server allows.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    max_tokens: int | None = None
    low_detail: bool = False
    high_detail: bool = False
    usual_pixels: int | None = None
    """Maximum area unless the budget has an upper bound of its own; an image never gets less than the model needs."""

    @classmethod
    def of(cls, fields: Mapping[str, Any], detail: str | None = None) -> ImageBudget:
        """The bounds in a request's fields. detail: OpenAI's field beside the image's URL."""
        bounds = {name: fields.get(name) for name in BUDGET_FIELDS}
        return cls(**bounds, low_detail=detail == "low", high_detail=detail in ("high", "original"))

    def or_else(self, default: ImageBudget) -> ImageBudget:
        """The same, with bounds of `default` where it has none."""
        return replace(self, **{name: getattr(default, name) for name in BUDGET_FIELDS if getattr(self, name) is None})

    @property
    def is_open(self) -> bool:
        """True if nothing bounds the size from above, so that the server chooses the usual one."""
        return not (self.low_detail or self.high_detail or self.max_pixels or self.max_tokens)

    def settled(self, least: int, most: int) -> ImageBudget:
        """The same with the usual size as `max_pixels`.

        least, most: pixels of the smallest and the largest image that the model takes.
        """
        if self.usual_pixels is None:
            return self
        # Whole squares or tiles leave room for twice the least area that was asked for.
        pixels = max(self.usual_pixels, least, 2 * (self.min_pixels or 0))
        bound = pixels if self.is_open and pixels < most else self.max_pixels
        return replace(self, max_pixels=bound, usual_pixels=None)

    def allows(self, pixels: int, tokens: int) -> bool:
        return (self.max_pixels is None or pixels <= self.max_pixels) and (
            self.max_tokens is None or tokens <= self.max_tokens
        )

    def narrowed(self, budget: ImageBudget) -> ImageBudget:
        """Both upper bounds, and the lower one of `budget`; without that its own, which gives way to upper bounds."""
        upper = {
            name: min((most for most in (getattr(self, name), getattr(budget, name)) if most is not None), default=None)
            for name in ("max_pixels", "max_tokens")
        }
        least = budget.min_pixels
        if least is None and self.min_pixels is not None:
            least = min(self.min_pixels, upper["max_pixels"] or self.min_pixels)
        return ImageBudget(least, upper["max_pixels"], upper["max_tokens"])

    def check_limit(self, pixels: int) -> None:
        """Raises InvalidRequestError for more than the server's limit of pixels, for models that take any size."""
        for name, value in (("min_pixels", self.min_pixels), ("max_pixels", self.max_pixels)):
            if value is not None and not 1 <= value <= pixels:
                raise InvalidRequestError(
                    f"{name} is {value:,}; it must lie between 1 and this server's max_pixels, {pixels:,}"
                )
        self.check_order()

    def check_kept(self, image: ImageInput) -> None:
        """Raises InvalidRequestError for an image that could not be made small enough."""
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
        """Raises InvalidRequestError if the least that a model can do with an image is too much. pixels, tokens: of
        that."""
        self.check_order()
        for name, most, least in (("pixels", self.max_pixels, pixels), ("tokens", self.max_tokens, tokens)):
            if most is not None and least > most:
                raise InvalidRequestError(
                    f"max_{name} is {most:,}, but for this model an image has at least {least:,} {name}; "
                    f"raise it or leave it out"
                )

    def check_most(self, pixels: int) -> None:
        """Raises InvalidRequestError if no image is as large for the model as it is to be. pixels: of the largest."""
        if self.min_pixels is not None and self.min_pixels > pixels:
            raise InvalidRequestError(
                f"min_pixels is {self.min_pixels:,}, but for this model an image has at most {pixels:,} pixels here; "
                "lower it or leave it out"
            )

    def check_order(self) -> None:
        """Raises InvalidRequestError for bounds that leave nothing."""
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise InvalidRequestError(f"min_pixels, {self.min_pixels:,}, is more than max_pixels, {self.max_pixels:,}")


NO_BUDGET = ImageBudget()
HIGH_DETAIL = ImageBudget(high_detail=True)
