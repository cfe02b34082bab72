"""Levels of pixels to what a tower reads, on its device."""

from __future__ import annotations

import torch
from torch import Tensor

from vlmserve.levels import Levels

BLOCK_ELEMENTS = 2**24
"""Levels that are looked up at a time, for each of which memory of an index is taken."""


class Normalizer:
    """Looks levels up in tables, so that on every device they become the very numbers that transformers' processors
    make of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[tuple[Levels, torch.dtype], Tensor] = {}
        self._channels: Tensor | None = None

    def __call__(self, pixels: Tensor, levels: Levels, dtype: torch.dtype) -> Tensor:
        """uint8 ``[tiles, 3, height, width]`` on the device to another type."""
        if self._channels is None:
            self._channels = torch.arange(0, 3 * 256, 256, dtype=torch.int32, device=self._device).view(3, 1, 1)
        if (levels, dtype) not in self._tables:
            self._tables[levels, dtype] = torch.from_numpy(levels.table()).to(self._device, dtype).flatten()
        table = self._tables[levels, dtype]
        result = torch.empty(pixels.shape, dtype=dtype, device=self._device)
        tiles = max(1, BLOCK_ELEMENTS // max(1, pixels[:1].numel()))
        for some, into in zip(torch.split(pixels, tiles), torch.split(result, tiles), strict=True):
            torch.index_select(table, 0, (some.int() + self._channels).flatten(), out=into.view(-1))
        return result
