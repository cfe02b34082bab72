"""Free memory within the container's limit. Imports psutil lazily: every command imports this module."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from pathlib import Path

from vlmserve.cgroups import ControlGroups, read

_UNLIMITED = 2**60
"""Bytes. Version 1 of control groups writes a number near 2**63 for no limit."""
_CACHED = ("inactive_file", "active_file", "slab_reclaimable")
"""Counters of memory that the kernel reclaims on demand."""


def free_memory(groups: ControlGroups | None = None) -> int:
    """Bytes that this process may still take."""
    import psutil

    available: int = psutil.virtual_memory().available
    return min([available, *(max(0, limit - used) for limit, used in _limits(groups))])


def total_memory(groups: ControlGroups | None = None) -> int:
    """Bytes of the machine, or the container's limit."""
    import psutil

    total: int = psutil.virtual_memory().total
    return min([total, *(limit for limit, _ in _limits(groups))])


def return_free_memory() -> None:
    """Return freed memory to the system; glibc would keep it, after quantization a third of the model."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def huge_pages(num_bytes: int) -> mmap.mmap:
    """Zeroed memory, of huge pages if the kernel has them. Unwritten pages take no memory."""
    return _pages(num_bytes, "MADV_HUGEPAGE")


def small_pages(num_bytes: int) -> mmap.mmap:
    """Zeroed memory, never of huge pages. Unwritten pages take no memory."""
    return _pages(num_bytes, "MADV_NOHUGEPAGE")


def _pages(num_bytes: int, advice: str) -> mmap.mmap:
    pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, advice):
        with contextlib.suppress(OSError):  # the kernel lacks huge pages
            pages.madvise(getattr(mmap, advice))
    return pages


def resident_memory() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def num_killed(groups: ControlGroups | None = None) -> int:
    """Processes killed for lack of memory, in the container or, if larger, on the machine."""
    folders = (groups or ControlGroups()).folders("memory")
    files = [folder / name for folder in folders for name in ("memory.events", "memory.oom_control")]
    return max(_counters(path).get("oom_kill", 0) for path in (Path("/proc/vmstat"), *files))


def _limits(groups: ControlGroups | None) -> list[tuple[int, int]]:
    """Limit and usage of each control group, in bytes."""
    found = []
    for folder in (groups or ControlGroups()).folders("memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if limit is not None and limit < _UNLIMITED:
            counters = _counters(folder / "memory.stat")
            cached = sum(counters.get(f"total_{name}", counters.get(name, 0)) for name in _CACHED)
            found.append((limit, max(0, (used or 0) - cached)))
    return found


def _number(path: Path) -> int | None:
    text = read(path)
    return int(text) if text.isdecimal() else None


def _counters(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
