"""Memory for weights."""

from __future__ import annotations

import gc
import itertools
import mmap
from pathlib import Path

import pytest
import torch

from vlmserve.kernels.pages import LARGE_PAGE, allocate


@pytest.mark.parametrize("count", [0, 1, LARGE_PAGE // 2 - 1, LARGE_PAGE // 2, LARGE_PAGE + 3, 3 * LARGE_PAGE])
def test_memory_is_usable_to_its_end(count: int) -> None:
    dtypes = [torch.bfloat16, torch.float32, torch.uint8] * 2
    weights = [allocate(count, dtype) for dtype in dtypes]
    gc.collect()
    for value, weight in enumerate(weights, 1):
        weight.fill_(value)
    for value, (dtype, weight) in enumerate(zip(dtypes, weights, strict=True), 1):
        assert weight.shape == (count,)
        assert weight.dtype == dtype
        assert bool((weight == value).all())


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no large pages")
def test_only_whole_large_pages_are_requested() -> None:
    weight = allocate(2 * LARGE_PAGE + 4096, torch.uint8)
    assert weight.data_ptr() % LARGE_PAGE == 0
    asked = [size for start, size in advised() if start == weight.data_ptr()]
    assert asked in ([2 * LARGE_PAGE], [])  # [] where the kernel was built without them


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no large pages")
def test_small_allocations_share_and_free_large_pages() -> None:
    weights = [allocate(LARGE_PAGE // 4 + 1, torch.uint8) for _ in range(96)]
    starts = sorted(weight.data_ptr() for weight in weights)
    assert all(start % 64 == 0 for start in starts)
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    assert min(gaps) >= LARGE_PAGE // 4 + 1
    # What is left of a piece may be too small for the next.
    assert gaps.count(LARGE_PAGE // 4 + 64) >= 80
    mappings = {start for start, size in advised()}
    last = weights.pop()
    del weights
    gc.collect()
    remaining = {start for start, size in advised()}
    assert remaining < mappings or not mappings
    last.fill_(1)
    assert int(last.sum()) == len(last)


def advised() -> list[tuple[int, int]]:
    """Where the mappings lie that are to have large pages, and how long they are."""
    found, start, size = [], 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(address, 16) for address in first.split("-"))
            size = end - start
        elif first == "VmFlags:" and "hg" in rest:
            found.append((start, size))
    return found
