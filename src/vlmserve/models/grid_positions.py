"""Positions in three axes: frames, rows and columns (https://arxiv.org/abs/2409.12191)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vlmserve.types import ImagePlacement


def grid_positions(images: Sequence[ImagePlacement], places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """int64 ``[3, tokens]`` from a prompt's images, in order, and the places of tokens in it, ascending.

    Within an image or video that has a grid they count by frames, rows and columns, each from where it begins; after
    it all three go on from the highest of them. Where text stands among its placeholders, each frame is a grid of its
    own, and the text counts as any other.
    """
    result = np.repeat(places[None], 3, 0)
    shift = 0
    for image in images:
        if image.start > places[-1] or image.grid is None:
            break
        frames, rows, columns = image.grid
        if image.text:
            _place_frames(image, places, shift, result)
            shift += frames * (max(rows, columns) - rows * columns)
            result[:, places >= image.end] = places[places >= image.end] + shift
            continue
        # In float32, where a product may fall short of a whole number, as in transformers.
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


def _place_frames(
    image: ImagePlacement, places: npt.NDArray[np.int64], shift: int, result: npt.NDArray[np.int64]
) -> None:
    """Write the positions of a video's tokens, whose frames have text between them. shift: from places to positions,
    at its beginning."""
    assert image.grid is not None
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
