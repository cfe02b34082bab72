"""Waiting for what announces itself to nobody: another process, a thread, a server."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator


def wait_until(condition: Callable[[], object], timeout: float = 120) -> None:
    """Poll a condition; fails the test when it does not come true. timeout: in seconds."""
    for pause in _pauses(timeout):
        if condition():
            return
        time.sleep(pause)


async def until(condition: Callable[[], object | Awaitable[object]], timeout: float = 120) -> None:
    """Poll a condition, which may be a coroutine function, while other tasks run."""
    for pause in _pauses(timeout):
        holds = condition()
        if await holds if inspect.isawaitable(holds) else holds:
            return
        await asyncio.sleep(pause)


def _pauses(timeout: float) -> Iterator[float]:
    """Seconds, few at first: what is asked often may take the processor time that it waits for."""
    limit = time.monotonic() + timeout
    pause = 0.002
    while time.monotonic() < limit:
        yield pause
        pause = min(0.05, 1.2 * pause)
    raise AssertionError("it never came true")
