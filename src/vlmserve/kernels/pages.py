"""Memory for weights, in large pages where the system gives them."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

LARGE_PAGE = 2**21


def allocate_weight(count: int, dtype: torch.dtype) -> Tensor:
    """Memory for so many numbers ``[count]``, which are not set yet.

    A product of few rows takes as long as reading its weight, and large pages are read in 0.75 to 1 of the time.
    The system has to be asked for them before memory is written for the first time, which an allocator may have done.
    """
    num_bytes = count * dtype.itemsize
    if num_bytes < LARGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(count, dtype=dtype)
    pages = mmap.mmap(-1, num_bytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(pages, dtype=torch.uint8, count=1).data_ptr() % LARGE_PAGE
    with contextlib.suppress(OSError):  # a system without them
        # What is left behind whole pages stays in small ones, and takes no more memory than it needs.
        pages.madvise(mmap.MADV_HUGEPAGE, start, num_bytes // LARGE_PAGE * LARGE_PAGE)
    return torch.frombuffer(pages, dtype=dtype, count=count, offset=start)
