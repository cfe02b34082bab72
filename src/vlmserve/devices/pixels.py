"""Uploads pixels and normalizes them on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vlmserve.devices.streams import CopyEvent, CopyStream
from vlmserve.levels import Levels

BLOCK_ELEMENTS = 2**24
"""Pixels looked up at a time; each takes an index in memory."""
RING_BUFFERS = 4
"""Pinned buffers, and so images in flight."""
FIRST_BYTES = 2**22


class Normalizer:
    """Lookup tables give Transformers' numbers on all devices."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[tuple[Levels, torch.dtype], Tensor] = {}
        self._channels: Tensor | None = None

    def __call__(self, pixels: Tensor, levels: Levels, dtype: torch.dtype) -> Tensor:
        """Normalize uint8 ``[tiles, 3, height, width]``."""
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


class PixelRing:
    """Pinned buffers and a separate stream, for the next step's images."""

    def __init__(self, stream: CopyStream, *, count: int = RING_BUFFERS, pinned: bool = True) -> None:
        """count: buffers. pinned: False without a GPU."""
        self._stream, self._pinned = stream, pinned
        self._buffers: list[tuple[Tensor, CopyEvent | None]] = [(torch.empty(0, dtype=torch.uint8), None)] * count

    def upload(self, pixels: np.ndarray) -> Tensor:
        """Copy for work launched after this call."""
        buffer, copied = self._buffers.pop(0)
        if copied is not None:
            copied.synchronize()
        if len(buffer) < pixels.nbytes:
            size = max(FIRST_BYTES, 1 << (pixels.nbytes - 1).bit_length())
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        host = buffer[: pixels.nbytes].view(torch.from_numpy(pixels[:0].copy()).dtype).view(pixels.shape)
        np.copyto(host.numpy(), pixels)
        target = self._stream.empty(pixels.shape, host.dtype)
        self._stream.copy(target, host)
        copied = self._stream.record()
        self._buffers.append((buffer, copied))
        self._stream.let_compute_wait(copied)
        return target
