"""Gated depthwise convolutions that replace attention in LFM3-VL."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import Linear, empty_parameter
from vlmserve.layers.stages import StageBudget, Stages
from vlmserve.models.vision.qwen_spec import QwenVisionSpec

Shape = tuple[int, int]
"""Rows and columns of patches."""
_MOST_PATCHES = 2**14
"""Maximum patches to convolve together, which takes about five copies of them."""


class GridConvolution(nn.Module):
    """``[patches, 3 * hidden_size]`` to ``[patches, hidden_size]``.

    Inputs: input gates, output gates, values. The patches of a square of ``merge^2`` are adjacent.
    """

    attention = None

    def __init__(self, spec: QwenVisionSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        size, self._kernel, self._merge = spec.hidden_size, spec.kernel, spec.merge
        kind: dict[str, Any] = {"bias": False, **factory}
        self.qkv = Linear(size, 3 * size, **kind)
        self.proj = Linear(size, size, **kind)
        self.weight = empty_parameter(size, 1, spec.kernel, spec.kernel, **factory)

    def products(self, length: int) -> int:
        return length * len(self.weight) * self._kernel**2

    def in_stages(self, rows: Tensor, frames: Sequence[Shape], budget: StageBudget) -> Stages[Tensor]:
        """A stage has adjacent frames of one shape, up to `_MOST_PATCHES` patches."""
        results, first = [], 0
        for (down, across), group in groupby(frames):
            length, left = down * across, len(list(group))
            while left:
                most = min(left, max(1, _MOST_PATCHES // length))
                while not (count := budget.take(most, self.products(length))):
                    yield
                results.append(self._convolved(rows[first : first + count * length], down, across))
                first, left = first + count * length, left - count
        return torch.cat(results)

    def _convolved(self, rows: Tensor, down: int, across: int) -> Tensor:
        opened, closing, inputs = rows.chunk(3, -1)
        merge, size = self._merge, inputs.shape[1]
        squares = (opened * inputs).view(-1, down // merge, across // merge, merge, merge, size)
        grid = squares.permute(0, 5, 1, 3, 2, 4).reshape(-1, size, down, across)
        grid = F.conv2d(grid, self.weight, padding=self._kernel // 2, groups=size)
        squares = grid.view(-1, size, down // merge, merge, across // merge, merge).permute(0, 2, 4, 3, 5, 1)
        return squares.reshape(len(rows), size) * closing
