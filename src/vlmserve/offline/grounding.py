"""Converts boxes and points in answers to pixels of the original image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmserve.types import ImageSize


def original_point(
    point: Sequence[float], size: ImageSize | Mapping[str, Any], scale: float | tuple[float, float] | None = None
) -> tuple[float, float]:
    """Convert a point in an answer to pixels of the original image; the result is inside the image.

    - point: x and y as the model wrote them.
    - size: the image's entry in ``image_sizes`` of a response or `RequestOutput`.
    - scale: the model's coordinate range: 1000 for Qwen2-VL and Qwen3-VL, 1 for fractions, or an (x, y) pair; None:
      pixels that the model sees, as in Qwen2.5-VL.

    Raises ValueError if the part of the image that the model saw is unknown or empty.
    """
    known: Mapping[str, Any] = size if isinstance(size, Mapping) else {name: getattr(size, name) for name in _FIELDS}
    box = known.get("box")
    seen = (known.get("model_width"), known.get("model_height")) if scale is None else scale
    across, down = seen if isinstance(seen, Sequence) else (seen, seen)
    if box is None or not across or not down:
        raise ValueError("it is not known which part of the image the model saw")
    left, top, right, bottom = box
    x, y = left + point[0] / across * (right - left), top + point[1] / down * (bottom - top)
    return min(max(x, 0.0), float(known["width"])), min(max(y, 0.0), float(known["height"]))


def original_box(
    box: Sequence[float], size: ImageSize | Mapping[str, Any], scale: float | tuple[float, float] | None = None
) -> tuple[float, float, float, float]:
    """Convert a box in an answer to left, top, right and bottom in pixels of the original image.

    box: left, top, right and bottom as the model wrote them. size, scale: as in `original_point`.
    """
    left, top = original_point(box[:2], size, scale)
    right, bottom = original_point(box[2:4], size, scale)
    return left, top, right, bottom


_FIELDS = ("width", "height", "model_width", "model_height", "box")
