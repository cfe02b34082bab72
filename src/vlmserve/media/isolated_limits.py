"""Shared by decoders of isolated processes: refusals, resource limits, the answer format.

`isolated_worker.py` forks processes with these modules; they import nothing else of vlmserve.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

LONGEST_DETAIL = 300
"""Maximum characters of a library's message."""

Answer: TypeAlias = tuple[dict[str, Any], Iterable[bytes | memoryview]]
"""Fields of a line, and the pixels after it."""


class RefusedError(Exception):
    """reason: known to the parent. detail: the library's message."""

    def __init__(self, reason: str, detail: object = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = str(detail)[:LONGEST_DETAIL]


class Decoder(Protocol):
    """The constructor imports the library."""

    def open(self, data: bytes, settings: dict[str, Any]) -> dict[str, Any]: ...

    def answer(self, line: str) -> Answer: ...


def limit(name: str, value: int, for_good: bool = True) -> None:
    import resource

    try:
        kind = getattr(resource, name)
        resource.setrlimit(kind, (value, value if for_good else resource.getrlimit(kind)[1]))
    except (AttributeError, ValueError, OSError):
        # Not every system has all limits; the parent ends slow processes.
        return


def address_space() -> int:
    """Mapped bytes of this process; 0: unknown."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def peak_address_space() -> int:
    """Peak of the mapped bytes; 0: unknown."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("VmPeak:")), 0)
    except OSError:
        return 0


def limit_cpu(seconds: float) -> None:
    """Allow `seconds` more of CPU time. SIGXCPU then ends the process."""
    limit("RLIMIT_CPU", math.ceil(sum(os.times()[:2]) + seconds), for_good=False)
