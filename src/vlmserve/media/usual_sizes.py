"""Default sizes of images, pages and frames, from their cost on this machine."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from vlmserve.image_cost import ImageCost
from vlmserve.media.budget import ImageBudget
from vlmserve.settings.config import MediaConfig

LEAST_PIXELS = 512 * 512
"""Minimum area of an image or page on any machine: low detail."""
LEAST_FRAME_PIXELS = 256 * 256
"""Minimum area of a video frame."""
LEAST_GROUPS = 8
"""Minimum limit of a video's frame groups on any machine."""


@dataclass(frozen=True)
class UsualSizes:
    cost: ImageCost
    image_seconds: float
    video_seconds: float
    """For all frames of a video, or all pages of a document."""

    @classmethod
    def of(cls, media: MediaConfig, cost: ImageCost | None) -> UsualSizes | None:
        """None: checkpoint and settings determine sizes."""
        own = media.mm_processor_kwargs
        if cost is None or own.max_pixels is not None or own.max_tokens is not None:
            return None
        return cls(cost, media.image_seconds or math.inf, media.video_seconds or math.inf)

    def for_images(self, budget: ImageBudget, count: int = 1) -> ImageBudget:
        """The budget of each of `count` pages. Keeps a usual size that is set."""
        if not budget.is_open or budget.usual_pixels is not None:
            return budget
        seconds = self.image_seconds if count == 1 else min(self.image_seconds, self.video_seconds / count)
        return replace(budget, usual_pixels=None if math.isinf(seconds) else self._pixels(seconds, LEAST_PIXELS))

    def frame_budget(self, num_groups: int) -> ImageBudget:
        """num_groups: groups of frames that share embeddings."""
        seconds = self.video_seconds / num_groups
        return ImageBudget(usual_pixels=None if math.isinf(seconds) else self._pixels(seconds, LEAST_FRAME_PIXELS))

    def max_groups(self, pixels: int | None = None) -> float:
        """pixels: area of a frame; None: the minimum."""
        return max(LEAST_GROUPS, self.video_seconds / self.cost.seconds(pixels or LEAST_FRAME_PIXELS))

    def described(self, *, limits: bool) -> str:
        """For the log: maximum area of an image and how to raise it. limits: any image gets smaller."""
        if not limits:
            return "up to the checkpoint's own size"
        pixels = self._pixels(self.image_seconds, LEAST_PIXELS)
        return (
            f"at most {pixels / 1e6:.2g} megapixels, about {self.cost.seconds(pixels):.2g} s each here; "
            f'more: detail "high" in a request, or --image-seconds {4 * self.image_seconds:g}'
        )

    def _pixels(self, seconds: float, least: int) -> int:
        return max(least, self.cost.pixels(seconds))
