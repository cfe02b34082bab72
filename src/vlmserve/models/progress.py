"""Progress of loading: a bar on a terminal, else a log line every 10 s, and a listener."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Self

LINE_SECONDS = 10.0
"""Seconds between log lines."""
NEWS_SECONDS = 0.5
"""Seconds between calls of `listener`."""
listener: ContextVar[Callable[[str], None]] = ContextVar("listener", default=lambda text: None)
"""Gets lines about the progress, then an empty line at the end, because other work may follow."""
SMALLEST_BAR = 256 * 2**20
"""Minimum bytes of a checkpoint for a bar on a terminal."""

logger = logging.getLogger(__name__)


class LoadingProgress:
    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._started = self._said = self._told = time.monotonic()
        self._bar = Bar(total) if sys.stderr.isatty() and total >= SMALLEST_BAR else None
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._exits.enter_context(self._bar)
        return self

    def __exit__(self, *error: object) -> None:
        self._exits.close()
        listener.get()("")

    def advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        now = time.monotonic()
        text = progress_text(self._done, self._total, now - self._started)
        if now - self._told >= NEWS_SECONDS:
            self._told = now
            listener.get()(text)
        if self._bar is not None:
            self._bar.advance(num_bytes)
        elif now - self._said >= LINE_SECONDS:
            self._said = now
            logger.info("loading weights: %s", text)


class Bar:
    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        columns = ("loading weights", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def advance(self, num_bytes: int) -> None:
        self._progress.advance(self._task, num_bytes)


def progress_text(done: int, total: int, seconds: float) -> str:
    rate = done / max(seconds, 1e-3)
    left = max(0, total - done) / max(rate, 1.0)
    share = f"{done / 1e9:.2f} of {total / 1e9:.2f} GB"
    return f"{share}, {rate / 1e6:.0f} MB/s, {left:.0f} s left"
