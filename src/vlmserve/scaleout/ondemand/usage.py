"""Memory of processes."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def private_memory(pids: Iterable[int]) -> int:
    """Bytes that would be free without these processes and their children; 0: unknown."""
    return sum(map(_private, {process for pid in pids for process in _family(pid)}))


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _private(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().uss)
    except psutil.Error:
        return 0
