"""Allocates, clears and copies whole blocks of caches, whose first axis is the blocks."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

from vlmserve.kernels.attention import LayerCache
from vlmserve.kernels.transfers import to_device


def allocate_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that on a CPU take memory only once they are written to.

    Their pages come from the system: an allocator may take them from what it holds, and write the zeros.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, max(math.prod(shape) * dtype.itemsize, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape)).view(shape)


def clear_blocks(cache: LayerCache, blocks: Tensor) -> None:
    """Zero blocks (int64 ids on the cache's device)."""
    for tensor in cache.tensors:
        tensor.index_fill_(0, blocks, 0)


def copy_blocks(source: LayerCache, target: LayerCache, source_blocks: Tensor, target_blocks: Tensor) -> None:
    """Copy blocks between caches of one geometry, which may be the same cache or lie on two devices.

    source_blocks, target_blocks: int64 ids on the CPU, as many of each. All are read before any is written.
    """
    for origin, destination in zip(source.tensors, target.tensors, strict=True):
        blocks = origin.index_select(0, to_device(source_blocks, origin.device)).to(destination.device)
        destination.index_copy_(0, to_device(target_blocks, destination.device), blocks)
