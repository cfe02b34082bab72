"""Work in threads: its client, and whether the result is still needed."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from vlmserve.errors import CancelledWorkError

Result = TypeVar("Result")

client: contextvars.ContextVar[str] = contextvars.ContextVar("client", default="")
"""The client of the current request: the owner of its key, or without keys its address."""
current: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("cancelled", default=None)
"""Set when this context's result is no longer needed."""


def check_cancelled() -> None:
    """Raise CancelledWorkError if nobody needs this thread's result."""
    event = current.get()
    if event is not None and event.is_set():
        raise CancelledWorkError("the result is no longer needed")


async def run_in_thread(
    executor: Executor, work: Callable[[], Result], ended: Callable[[], None] = lambda: None
) -> Result:
    """Run `work` with the caller's context variables.

    Cancellation drops queued work and stops running work at `check_cancelled`. ended: called in the event loop once
    the thread is free.
    """
    event = threading.Event()

    def run() -> Result:
        current.set(event)
        check_cancelled()
        return work()

    loop = asyncio.get_running_loop()

    def tell(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended)

    try:
        future = executor.submit(contextvars.copy_context().run, run)
    except BaseException:
        ended()
        raise
    future.add_done_callback(tell)
    try:
        return await asyncio.wrap_future(future)
    finally:
        event.set()
