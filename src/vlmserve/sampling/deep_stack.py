"""Threads with large stacks, for libraries that parse nested input by recursion."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_STACK_PER_BYTE = 4096
"""Bytes of stack for each byte of a grammar. llguidance was seen to use up to 700."""
_LEAST_STACK = 16 * 1024**2
_PAGE = 65536
_STACK_LOCK = threading.Lock()
"""`threading.stack_size` applies to the whole process."""
Result = TypeVar("Result")


def stack_size(num_bytes: int) -> int:
    """llguidance recurses, and a stack overflow ends the process."""
    return max(_LEAST_STACK, _STACK_PER_BYTE * num_bytes // _PAGE * _PAGE)


def in_deep_stack(work: Callable[[], Result], num_bytes: int, niceness: int = 0) -> Result:
    """Unused stack takes no memory. niceness: added to the thread's, on Linux only."""
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            if niceness and sys.platform == "linux":
                with contextlib.suppress(OSError):  # a sandbox forbids it
                    os.nice(niceness)
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    with _STACK_LOCK:
        usual = threading.stack_size(num_bytes)
        try:
            thread = threading.Thread(target=run, name="compile-grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(usual)
    try:
        return outcome.result()
    finally:
        thread.join()
