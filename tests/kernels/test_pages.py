"""Memory for weights."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch

from vlmserve.kernels.pages import LARGE_PAGE, allocate_weight


@pytest.mark.parametrize("count", [0, 1, LARGE_PAGE // 2 - 1, LARGE_PAGE // 2, LARGE_PAGE + 3, 3 * LARGE_PAGE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_memory_can_be_written_and_read_to_its_end(count: int, dtype: torch.dtype) -> None:
    weights = [allocate_weight(count, dtype) for _ in range(2)]
    gc.collect()
    for value, weight in enumerate(weights, 1):
        weight.fill_(value)
    for value, weight in enumerate(weights, 1):
        assert weight.shape == (count,)
        assert weight.dtype == dtype
        assert bool((weight == value).all())


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no large pages")
def test_whole_large_pages_are_asked_for_and_nothing_else() -> None:
    weight = allocate_weight(2 * LARGE_PAGE + 4096, torch.uint8)
    assert weight.data_ptr() % LARGE_PAGE == 0
    asked = [size for start, size in advised() if start == weight.data_ptr()]
    assert asked in ([2 * LARGE_PAGE], [])  # [] where the kernel was built without them


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
