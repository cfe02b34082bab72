"""Reads files ahead of the loader, so that the disk works while tensors are packed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vlmserve.models.identity import stored_tensors

WINDOW_BYTES = 256 * 1024**2
"""Bytes to request ahead. Under a memory limit, the system would drop more of them before they are used."""
REQUEST_BYTES = 128 * 1024
"""Maximum bytes of a request. Linux reads no more of one than its own read-ahead, which is this by default."""


class _Range(NamedTuple):
    path: Path
    start: int
    size: int


class ReadAhead:
    """Requests tensors in the order in which they are loaded. Does nothing where the system takes no requests."""

    def __init__(self, tensors: Sequence[Sequence[tuple[Path, str]]]) -> None:
        """tensors: file and name of the tensors that each step reads."""
        paths = {path for step in tensors for path, _ in step}
        known = {
            (path, tensor.name): _Range(path, tensor.start, tensor.end - tensor.start)
            for path in paths
            for tensor in stored_tensors(path)
        }
        unread = dict.fromkeys(one for step in tensors for one in step)
        self._steps: list[list[_Range]] = []
        for step in tensors:
            self._steps.append([known[one] for one in dict.fromkeys(step) if one in unread and one in known])
            for one in step:
                unread.pop(one, None)
        self._requested = self._ahead = 0

    def reach(self, step: int) -> None:
        """Call before each step, in order."""
        while self._requested < len(self._steps) and self._ahead < WINDOW_BYTES:
            for part in self._steps[self._requested]:
                _request(part)
                self._ahead += part.size
            self._requested += 1
        self._ahead -= sum(part.size for part in self._steps[step])


def _request(part: _Range) -> None:
    if hasattr(os, "posix_fadvise"):
        end = part.start + part.size
        with contextlib.suppress(OSError), part.path.open("rb") as file:
            for start in range(part.start, end, REQUEST_BYTES):
                os.posix_fadvise(file.fileno(), start, min(REQUEST_BYTES, end - start), os.POSIX_FADV_WILLNEED)
