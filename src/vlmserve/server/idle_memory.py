"""Gives memory back to the system when no media are being prepared."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor

from vlmserve.memory import return_free_memory

_PAUSE = 1.0
"""Seconds after work ends to check for new work."""


class IdleMemory:
    """The C library keeps freed memory. executor: runs the call. is_busy: returns whether work runs."""

    def __init__(self, executor: Executor, is_busy: Callable[[], bool]) -> None:
        self._executor = executor
        self._is_busy = is_busy
        self._timer: asyncio.TimerHandle | None = None

    def worked(self) -> None:
        if self._timer is None:
            self._wait()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_PAUSE, self._look)

    def _look(self) -> None:
        if self._is_busy():
            self._wait()
            return
        self._timer = None
        with contextlib.suppress(RuntimeError):  # the server closes
            self._executor.submit(return_free_memory)
