"""Work in threads that stops when nobody waits for its result any more."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from vlmserve.errors import CancelledWorkError

Result = TypeVar("Result")

_cancelled: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("cancelled", default=None)


def check_cancelled() -> None:
    """Raises CancelledWorkError if nobody waits for what this thread does. Work that takes long calls it often."""
    event = _cancelled.get()
    if event is not None and event.is_set():
        raise CancelledWorkError("the result is no longer needed")


async def run_in_thread(executor: Executor, work: Callable[[], Result]) -> Result:
    """What `work` returns, in a thread of `executor`. Raises what it does.

    If the caller is cancelled, work that has not begun never begins, and work that runs stops at its next
    `check_cancelled`.
    """
    event = threading.Event()

    def run() -> Result:
        token = _cancelled.set(event)
        try:
            check_cancelled()
            return work()
        finally:
            _cancelled.reset(token)

    try:
        return await asyncio.get_running_loop().run_in_executor(executor, run)
    finally:
        event.set()
