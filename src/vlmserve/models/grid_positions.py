"""Positions in three axes: frames, rows and columns (https://arxiv.org/abs/2409.12191)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vlmserve.types import ImageSpan


def grid_positions(spans: Sequence[ImageSpan], places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """int64 ``[3, tokens]`` from a prompt's pictures, in order, and the places of tokens in it, ascending.

    Within a picture or video that has a grid they count by frames, rows and columns, each from where it begins; behind
    it all three go on from the highest of them.
    """
    result = np.repeat(places[None], 3, 0)
    shift = 0
    for span in spans:
        if span.start > places[-1] or span.image.grid is None:
            break
        frames, rows, columns = span.image.grid
        # In float32, where a product may fall short of a whole number, as in transformers.
        times = (np.arange(frames, dtype=np.float32) * np.float32(span.image.frame_step)).astype(np.int64)
        inside = (places >= span.start) & (places < span.end)
        within = places[inside] - span.start
        begin = span.start + shift
        result[0, inside] = begin + times[within // (rows * columns)]
        result[1, inside] = begin + within // columns % rows
        result[2, inside] = begin + within % columns
        shift += max(int(times[-1]) + 1, rows, columns) - span.image.num_tokens
        result[:, places >= span.end] = places[places >= span.end] + shift
    return result
