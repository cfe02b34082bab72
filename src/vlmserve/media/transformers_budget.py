"""Apply image budgets to transformers' image processors, whose kinds have different settings."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vlmserve.media.budget import ImageBudget
from vlmserve.media.dynamic_resolution import LOW_DETAIL_PIXELS
from vlmserve.media.processor import View, cropped_view, whole_view

Settings = dict[str, Any]
"""Overrides of the checkpoint's settings for one call."""
_STEPS = 8
"""Steps that relax the lower bound of the area."""


def settings_within(processor: Any, budget: ImageBudget) -> Sequence[Settings]:
    """Settings for an image processor, from the smallest result to the largest.

    Unknown kinds and fixed sizes get only their own settings; processors of any size get the budget's bounds. The
    caller checks other bounds.
    """
    size = _fields(getattr(processor, "size", None))
    if largest_area(processor, budget) is not None:
        return _areas(processor, size, budget)
    if getattr(processor, "max_patches", None) and getattr(processor, "crop_to_patches", True):
        least = getattr(processor, "min_patches", None)
        return [
            {"max_patches": most, **({"min_patches": min(least, most)} if least else {})}
            for most in range(1, processor.max_patches + 1)
        ]
    if pinpoints := getattr(processor, "image_grid_pinpoints", None):
        ordered = sorted(pinpoints, key=math.prod)
        return [{"image_grid_pinpoints": ordered[: count + 1]} for count in range(len(ordered) - 1)] + [{}]
    if getattr(processor, "do_image_splitting", False):
        return [{"do_image_splitting": False}, *_longest_edges(size, edge_of(processor, "max_image_size"), first=2)]
    if getattr(processor, "do_pan_and_scan", False):
        return [{"do_pan_and_scan": False}, {}]
    if _has_edges(processor, size):
        return _longest_edges(size, edge_of(processor, "patch_size"))
    return [{}]


def largest_area(processor: Any, budget: ImageBudget) -> int | None:
    """Maximum pixels for a processor of any size; None: another kind. budget: overrides the checkpoint."""
    size = _fields(getattr(processor, "size", None))
    if not (hasattr(processor, "merge_size") and {"shortest_edge", "longest_edge"} <= size.keys()):
        return None
    return budget.max_pixels or size["longest_edge"]


def low_detail(processor: Any, own: ImageBudget, wanted: ImageBudget) -> ImageBudget:
    """Limit an image of any size to 512 x 512 pixels, unless `wanted` has bounds.

    A cut image gets the processor's minimum, unless `wanted` has `min_pixels`. own: the processor's budget.
    """
    whole = replace(wanted, low_detail=False)
    size = _fields(getattr(processor, "size", None))
    area = largest_area(processor, own)
    if area is not None or _has_edges(processor, size):
        most = max(LOW_DETAIL_PIXELS, wanted.min_pixels or 0)
        is_less = wanted.max_pixels is None and (area is None or most < area)
        return replace(whole, max_pixels=most) if is_less else whole
    is_cut = len(settings_within(processor, whole)) > 1 and wanted.min_pixels is None
    return wanted if is_cut else whole


def view_of(processor: Any, size: tuple[int, int], tiles: int, tile: tuple[int, int]) -> View:
    """size, tile: width and height. tiles: number; if several, one shows the whole image."""
    if tiles > 1:
        columns, rows = _arrangement(processor, size, tiles - 1, tile)
        return whole_view(size, columns * tile[0], rows * tile[1]) if columns else View(None, None, None)
    target, crop = _fields(getattr(processor, "size", None)), _fields(getattr(processor, "crop_size", None))
    if getattr(processor, "do_center_crop", False) and "height" in crop:
        return cropped_view(size, target if processor.do_resize else {}, (crop["height"], crop["width"]))
    if getattr(processor, "do_pad", False) and "longest_edge" not in target:
        return View(*tile, None)
    return whole_view(size, *tile)


def _areas(processor: Any, size: dict[str, int], budget: ImageBudget) -> list[Settings]:
    """Settings of processors whose edges are areas. Some count pixels once for each frame of a repeated image."""
    most = largest_area(processor, budget) or 1
    if budget.max_tokens is not None:
        most = min(most, budget.max_tokens * (edge_of(processor, "patch_size") * processor.merge_size) ** 2)
    most = max(most, budget.min_pixels or 1)
    frames = getattr(processor, "temporal_patch_size", None) or 1
    least = budget.min_pixels or min(size["shortest_edge"], most)
    # In whole squares the lower bound may exceed the upper one, so relax it first.
    bounds = [(max(1, least * step // _STEPS), most) for step in range(1, _STEPS + 1)]
    bounds.append((least, max(most, min(most * frames, size["longest_edge"]))))
    return [{"size": {"shortest_edge": shortest, "longest_edge": longest}} for shortest, longest in bounds]


def _has_edges(processor: Any, size: dict[str, int]) -> bool:
    is_split = getattr(processor, "do_image_splitting", False) or getattr(processor, "do_pan_and_scan", False)
    return size.keys() == {"longest_edge"} and hasattr(processor, "patch_size") and not is_split


def _longest_edges(size: dict[str, int], step: int, first: int = 1) -> list[Settings]:
    own = size.get("longest_edge", 0)
    return [{"size": {"longest_edge": edge}} for edge in range(first * step, own, step or 1) if step] + [{}]


def _arrangement(processor: Any, size: tuple[int, int], tiles: int, tile: tuple[int, int]) -> tuple[int, int]:
    """Columns and rows from the processor's own function; 0: it has none."""
    arrange = getattr(sys.modules[type(processor).__module__], "get_optimal_tiled_canvas", None)
    if arrange is None:
        return 0, 0
    columns, rows = arrange((size[1], size[0]), (tile[1], tile[0]), tiles, tiles)
    return (columns, rows) if columns * rows == tiles else (0, 0)


def edge_of(processor: Any, name: str) -> int:
    """A setting that is a number or a square; 0: none."""
    value = getattr(processor, name, None)
    return value if isinstance(value, int) else next(iter(_fields(value).values()), 0)


def _fields(value: Any) -> dict[str, int]:
    return {} if value is None or isinstance(value, int) else {key: edge for key, edge in dict(value).items() if edge}
