"""Converts arrays of numpy, torch and others to images and videos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from vlmserve.errors import InvalidImageError

_CHANNELS = (1, 3, 4)
_LEVELS = 255


def is_array(source: object) -> bool:
    return hasattr(source, "__array__") and hasattr(source, "shape") and not isinstance(source, Image.Image)


def frames_of(source: Any) -> Any:
    """Split ``[frames, …]``. Other sources stay."""
    return list(source) if is_array(source) and len(source.shape) == 4 else source


def image_of(source: Any) -> Image.Image:
    """Make an image from an array or tensor.

    Shapes: ``[height, width]``, ``[height, width, channels]`` or ``[channels, height, width]`` with 1, 3 or 4 channels,
    or a batch of one. Values: integers 0 to 255, floats 0 to 1 or 0 to 255, or booleans. Raises InvalidImageError for
    others.
    """
    if not is_array(source):
        raise InvalidImageError(f"an image cannot be made from a {type(source).__name__}")
    array = _with_channels_last(_as_numpy(source))
    return Image.fromarray(_as_levels(array))


def _as_numpy(source: Any) -> npt.NDArray[Any]:
    if hasattr(source, "detach"):  # a torch tensor, perhaps on a GPU
        source = source.detach().cpu()
        return np.asarray(source.float() if str(source.dtype) == "torch.bfloat16" else source)
    return np.asarray(source)


def _with_channels_last(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    shape = array.shape
    if len(shape) == 4 and shape[0] == 1:
        array = array[0]
    elif len(shape) == 4:
        raise InvalidImageError(f"an array {_text(shape)} is {shape[0]} images; give a list of images")
    if array.ndim == 3 and array.shape[2] not in _CHANNELS and array.shape[0] in _CHANNELS:
        array = array.transpose(1, 2, 0)
    if array.ndim not in (2, 3) or array.size == 0 or (array.ndim == 3 and array.shape[2] not in _CHANNELS):
        raise InvalidImageError(
            f"an array must be [height, width], [height, width, channels] or [channels, height, width] with 1, 3 or 4 "
            f"channels, not {_text(shape)}"
        )
    return array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array


def _as_levels(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * np.uint8(_LEVELS)
    if not (np.issubdtype(array.dtype, np.integer) or np.issubdtype(array.dtype, np.floating)):
        raise InvalidImageError(f"an array must have numbers, not {array.dtype}")
    if array.dtype != np.uint8:
        low, high = float(array.min()), float(array.max())
        if not (low >= 0 and high <= _LEVELS):  # false for NaN
            raise InvalidImageError(
                f"an array must have values from 0 to 255, or floats from 0 to 1, not {low:g} to {high:g}"
            )
        if np.issubdtype(array.dtype, np.floating):
            array = (array.astype(np.float64) * (_LEVELS if high <= 1 else 1)).round()
    return np.ascontiguousarray(array, dtype=np.uint8)


def _text(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"
