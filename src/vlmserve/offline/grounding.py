"""Where boxes and points of an answer lie in the image as it was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmserve.types import ImageSize


def original_point(
    point: Sequence[float], size: ImageSize | Mapping[str, Any], scale: float | tuple[float, float] | None = None
) -> tuple[float, float]:
    """A point of an answer, in pixels of the image as it was sent; no point is outside of it.

    point: x and y as the model wrote them. size: of the image, out of ``image_sizes`` of the response or of
    `RequestOutput`. scale: what the model counts to along each side: 1000 for Qwen2-VL and Qwen3-VL, 1 for fractions,
    or a number for x and one for y; None: pixels of what it sees, as Qwen2.5-VL counts.

    Raises ValueError if it is not known which part of the image the model saw, or if nothing was seen.
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
    """A box of an answer as left, top, right and bottom in pixels of the image as it was sent. box: left, top, right
    and bottom as the model wrote them. For the rest see `original_point`."""
    left, top = original_point(box[:2], size, scale)
    right, bottom = original_point(box[2:4], size, scale)
    return left, top, right, bottom


_FIELDS = ("width", "height", "model_width", "model_height", "box")
