"""Memory for what steps read from beginning to end, like weights, in large pages where the system gives them."""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch
from torch import Tensor

LARGE_PAGE = 2**21

_PIECE = 8 * LARGE_PAGE  # less than an eighth is lost where the next weight does not fit
_LINE = 64


def allocate(count: int, dtype: torch.dtype) -> Tensor:
    """Memory for so many numbers ``[count]``, which are not set yet, on the CPU.

    A product of few rows takes as long as reading its weight, and large pages are read in 0.75 to 1 of the time.
    The system has to be asked for them before memory is written for the first time, which an allocator may have done.
    What is smaller than a page shares one with others, which is given back once none of them is left.
    """
    num_bytes = count * dtype.itemsize
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(count, dtype=dtype)
    # Of no mode: some that ask are in torch's inference mode, and others are not.
    with torch.inference_mode(False):
        pages = _map(num_bytes) if num_bytes >= LARGE_PAGE else _shared.take(num_bytes)
        return pages.view(dtype)


def _map(num_bytes: int) -> Tensor:
    """uint8 ``[num_bytes]``, from the beginning of a large page on."""
    pages = mmap.mmap(-1, num_bytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(pages, dtype=torch.uint8, count=1).data_ptr() % LARGE_PAGE
    with contextlib.suppress(OSError):  # a system without them
        # What is left behind whole pages stays in small ones, and takes no more memory than it needs.
        pages.madvise(mmap.MADV_HUGEPAGE, start, num_bytes // LARGE_PAGE * LARGE_PAGE)
    return torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes, offset=start)


class _SharedPages:
    """Hands out parts of large pages, each from the beginning of a line of a cache on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """uint8 ``[num_bytes]``, less than a large page."""
        size = -(-num_bytes // _LINE) * _LINE
        with self._lock:
            if size > len(self._free):
                self._free = _map(_PIECE)
            own, self._free = self._free[:num_bytes], self._free[size:]
            return own


_shared = _SharedPages()
