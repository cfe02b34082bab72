"""Time of the vision tower, by an image's area."""

from __future__ import annotations

import math

import msgspec


class ImageCost(msgspec.Struct, frozen=True):
    """Seconds for `p` pixels: ``per_pixel * p + per_square * p**2``. The second term is attention."""

    per_pixel: float
    per_square: float

    @classmethod
    def of(cls, small: tuple[int, int], large: tuple[int, int], seconds_per_mac: float) -> ImageCost | None:
        """Fit to two images, given as (pixels, MACs). None: the larger one costs no more."""
        (p, a), (q, b) = small, large
        if b <= a or q <= p:
            return None
        per_square = max(0.0, (b / q - a / p) / (q - p))
        return cls((a / p - per_square * p) * seconds_per_mac, per_square * seconds_per_mac)

    def seconds(self, pixels: float) -> float:
        return self.per_pixel * pixels + self.per_square * pixels**2

    def pixels(self, seconds: float) -> int:
        """Maximum area of an image for this time in seconds."""
        # This form of the root loses no digits if per_square is small.
        root = math.sqrt(self.per_pixel**2 + 4 * self.per_square * seconds)
        return int(2 * seconds / (self.per_pixel + root))
