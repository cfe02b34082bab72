"""Pixels as a tower reads them, by numpy alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vlmserve.levels import Levels
from vlmserve.media.images import DecodedImage
from vlmserve.media.processor import PixelProcessor
from vlmserve.types import ImageInput, Pixels


def normalized(image: ImageInput) -> npt.NDArray[np.float32]:
    """Float32 pixels of an image or video."""
    return of_levels(image.pixels, image.levels)


def processed(processor: PixelProcessor, decoded: DecodedImage) -> npt.NDArray[np.float32]:
    """Float32 pixels that a processor makes of an image."""
    return of_levels(processor.process(decoded), processor.levels)


def of_levels(pixels: Pixels, levels: Levels | None) -> npt.NDArray[np.float32]:
    """What becomes of them."""
    if levels is None:
        assert pixels.dtype == np.float32
        return pixels
    assert pixels.dtype == np.uint8
    return np.stack([table[pixels[:, channel]] for channel, table in enumerate(levels.table())], 1)
