"""Reads and hashes files ahead of the loader, so that the disk and all cores work while tensors are packed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Self

from vlmserve.models.identity import TensorDigests, stored_tensors

WINDOW_BYTES = 256 * 1024**2
"""Bytes to read ahead. Under a memory limit, the system would drop more of them before they are used."""
REQUEST_BYTES = 128 * 1024
"""Maximum bytes of a request. Linux reads no more of one than its own read-ahead, which is this by default."""


class _Range(NamedTuple):
    path: Path
    name: str
    start: int
    size: int


class ReadAhead:
    """Requests and hashes tensors in a thread, in the order in which they are loaded.

    Leaving the context ends the thread, and raises its error unless the loader failed itself.
    """

    def __init__(self, tensors: Sequence[Sequence[tuple[Path, str]]], digests: TensorDigests) -> None:
        """tensors: file and name of the tensors that each step reads."""
        paths = {path for step in tensors for path, _ in step}
        known = {
            (path, tensor.name): _Range(path, tensor.name, tensor.start, tensor.end - tensor.start)
            for path in paths
            for tensor in stored_tensors(path)
        }
        unread = dict.fromkeys(one for step in tensors for one in step)
        self._steps: list[list[_Range]] = []
        for step in tensors:
            self._steps.append([known[one] for one in dict.fromkeys(step) if one in unread and one in known])
            for one in step:
                unread.pop(one, None)
        sizes = (sum(part.size for part in step) for step in self._steps)
        self._starts = list(accumulate(sizes, initial=0))
        self._digests = digests
        self._reached = self._requested = 0
        self._ended = False
        self._changed = threading.Condition()
        self._executor = ThreadPoolExecutor(1, "read-ahead")
        self._future: Future[None] | None = None

    def __enter__(self) -> Self:
        self._future = self._executor.submit(self._run)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        assert self._future is not None
        self._tell(self._reached, ended=True)
        self._executor.shutdown()
        if kind is None:
            self._future.result()

    def reach(self, step: int) -> None:
        """Call before each step, in order. Raises the thread's error if there is one."""
        assert self._future is not None
        if self._future.done():
            self._future.result()
        self._tell(step)

    def _tell(self, step: int, *, ended: bool = False) -> None:
        with self._changed:
            self._reached, self._ended = step, ended
            self._changed.notify()

    def _run(self) -> None:
        for number, step in enumerate(self._steps):
            with self._changed:
                self._changed.wait_for(partial(self._may_continue, number))
            if self._ended:
                return
            while self._requested < len(self._steps) and self._is_near(self._requested):
                for part in self._steps[self._requested]:
                    _request(part)
                self._requested += 1
            for part in step:
                self._digests.prepare(part.path, part.name)

    def _may_continue(self, step: int) -> bool:
        return self._ended or self._is_near(step)

    def _is_near(self, step: int) -> bool:
        return self._starts[step] - self._starts[self._reached] < WINDOW_BYTES


def _request(part: _Range) -> None:
    """Does nothing where the system takes no requests."""
    if hasattr(os, "posix_fadvise"):
        end = part.start + part.size
        with contextlib.suppress(OSError), part.path.open("rb") as file:
            for start in range(part.start, end, REQUEST_BYTES):
                os.posix_fadvise(file.fileno(), start, min(REQUEST_BYTES, end - start), os.POSIX_FADV_WILLNEED)
