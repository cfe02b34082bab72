"""What all decoders of isolated processes share: refusals, limits of the process, the form of an answer.

These modules run in the processes that `isolated_worker.py` forks, and import nothing else of vlmserve.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

LONGEST_DETAIL = 300
"""Maximum length of a library's message in characters."""

Answer: TypeAlias = tuple[dict[str, Any], Iterable[bytes | memoryview]]
"""Fields of a line, and the pixels that follow it."""


class RefusedError(Exception):
    """Says why a file is not decoded: a reason that the parent knows, and the library's own words."""

    def __init__(self, reason: str, detail: object = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = str(detail)[:LONGEST_DETAIL]


class Decoder(Protocol):
    """Decodes one file. The constructor loads the library."""

    def open(self, data: bytes, settings: dict[str, Any]) -> dict[str, Any]:
        """Describe the file."""
        ...

    def answer(self, line: str) -> Answer:
        """Answer a line of the parent."""
        ...


def limit(name: str, value: int, for_good: bool = True) -> None:
    import resource

    try:
        kind = getattr(resource, name)
        resource.setrlimit(kind, (value, value if for_good else resource.getrlimit(kind)[1]))
    except (AttributeError, ValueError, OSError):
        # Not every system has all of them; the parent ends a process that takes too long in any case.
        return


def address_space() -> int:
    """Bytes that the process has mapped, where the system says so."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def peak_address_space() -> int:
    """Most bytes that the process has had mapped, where the system says so."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("VmPeak:")), 0)
    except OSError:
        return 0


def limit_cpu(seconds: float) -> None:
    """Allow this process so many more seconds of CPU time. Then SIGXCPU ends it, which SIGKILL by others does not."""
    limit("RLIMIT_CPU", math.ceil(sum(os.times()[:2]) + seconds), for_good=False)
