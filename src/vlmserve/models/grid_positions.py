"""Three-axis positions: frames, rows and columns (https://arxiv.org/abs/2409.12191), or on a canvas (MiniCPM-V)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from vlmserve.types import Canvas, ImagePlacement


def grid_positions(images: Sequence[ImagePlacement], places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return int64 ``[3, tokens]`` positions. images: of a prompt, in order. places: ascending places of tokens in it.

    Within an image or video, each axis counts frames, rows or columns. After it, all axes continue after the highest
    position. If text stands among its placeholders, each frame is its own grid. On a canvas, slices are adjacent, and
    the overview is stretched over them.
    """
    result = np.repeat(places[None], 3, 0)
    shift = 0
    for image in images:
        if image.start > places[-1] or image.grid is None:
            break
        if isinstance(image.grid, Canvas):
            _place_on_canvas(image, image.grid, places, shift, result)
            shift += max(image.grid.size) + 1 - image.num_tokens
            result[:, places >= image.end] = places[places >= image.end] + shift
            continue
        frames, rows, columns = image.grid
        if image.text:
            _place_frames(image, places, shift, result)
            shift += frames * (max(rows, columns) - rows * columns)
            result[:, places >= image.end] = places[places >= image.end] + shift
            continue
        # In float32 as in transformers: products may fall short of a whole number.
        times = (np.arange(frames, dtype=np.float32) * np.float32(image.frame_step)).astype(np.int64)
        inside = (places >= image.start) & (places < image.end)
        within = places[inside] - image.start
        begin = image.start + shift
        result[0, inside] = begin + times[within // (rows * columns)]
        result[1, inside] = begin + within // columns % rows
        result[2, inside] = begin + within % columns
        shift += max(int(times[-1]) + 1, rows, columns) - image.num_tokens
        result[:, places >= image.end] = places[places >= image.end] + shift
    return result


def _place_on_canvas(
    image: ImagePlacement, canvas: Canvas, places: npt.NDArray[np.int64], shift: int, result: npt.NDArray[np.int64]
) -> None:
    """shift: position minus place at the image's start."""
    inside = (places >= image.start) & (places < image.end)
    if inside.any():
        begin, within = image.start + shift, places[inside] - image.start
        result[0, inside] = begin
        # At the start of a prompt, no position before the canvas exists.
        result[1:, inside] = np.maximum(begin + _canvas_places(canvas, image.num_tokens)[:, within], 0)


@functools.lru_cache(maxsize=256)
def _canvas_places(canvas: Canvas, num_tokens: int) -> npt.NDArray[np.int64]:
    """Rows and columns, int64 ``[2, tokens]``.

    Corner tokens enclose each piece; newlines separate rows of slices. Extra tokens use the first place.
    """
    height, width = canvas.size
    down, across = canvas.piece
    parts = [[[-1], [-1]], _spread(canvas.whole, canvas.size), [[height], [width]]]
    rows, columns = canvas.slices
    for row in range(rows):
        top = row * down
        for left in range(0, columns * across, across):
            inner = _spread(canvas.piece, canvas.piece) + np.array([[top], [left]])
            parts += [[[top], [left]], inner, [[top + down - 1], [left + across - 1]]]
        if row + 1 < rows:
            parts.append([[top + down - 1], [width]])
    places = np.concatenate([np.array(part, np.int64) for part in parts], 1)
    return np.pad(places, ((0, 0), (0, num_tokens - places.shape[1])))


def _spread(size: tuple[int, int], over: tuple[int, int]) -> npt.NDArray[np.int64]:
    """Positions of a grid, row by row, stretched over another: int64 ``[2, rows * columns]``."""
    # In float32 as in transformers.
    axes = [torch.linspace(0, last - 1, count).round().long().numpy() for count, last in zip(size, over, strict=True)]
    return np.stack(np.meshgrid(*axes, indexing="ij")).reshape(2, -1)


def _place_frames(
    image: ImagePlacement, places: npt.NDArray[np.int64], shift: int, result: npt.NDArray[np.int64]
) -> None:
    assert isinstance(image.grid, tuple)
    _, rows, columns = image.grid
    inside = (places >= image.start) & (places < image.end)
    within = places[inside] - image.start
    text = np.fromiter((place for place, _ in image.text), np.int64, len(image.text))
    before = np.searchsorted(text, within)
    frame, patch = np.divmod(within - before, rows * columns)
    begin = image.start + shift + before + frame * max(rows, columns)
    is_text = np.isin(within, text)
    result[0, inside] = begin
    result[1, inside] = begin + np.where(is_text, 0, patch // columns)
    result[2, inside] = begin + np.where(is_text, 0, patch % columns)
