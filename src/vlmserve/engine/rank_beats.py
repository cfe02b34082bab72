"""Heartbeats of ranks: each writes a byte to a pipe every second, and rank 0 counts seconds without one."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from vlmserve.engine.heartbeat import INTERVAL

_MOST_BYTES = 4096


def beat(pipe: int) -> None:
    """Write until the reader is gone. pipe: must not block."""
    with contextlib.suppress(BrokenPipeError):
        while True:
            with contextlib.suppress(BlockingIOError):  # the reader is stopped and has unread beats
                os.write(pipe, b".")
            time.sleep(INTERVAL)


class RankBeats:
    def __init__(self) -> None:
        self._pipe, self.theirs = os.pipe()
        """theirs: the end for `beat`. Close it here once the rank has it."""
        for end in (self._pipe, self.theirs):
            os.set_blocking(end, False)
        self.silence = 0.0
        """Seconds without a beat, 0 before the first."""
        self._has_begun = False

    def look(self) -> None:
        try:
            beats = os.read(self._pipe, _MOST_BYTES)
        except BlockingIOError:
            beats = b""
        self._has_begun = self._has_begun or bool(beats)
        # Not measured by the clock: no heartbeat arrives while this process is suspended.
        self.silence = 0.0 if beats or not self._has_begun else self.silence + INTERVAL

    def close(self) -> None:
        os.close(self._pipe)


class RankWatch:
    """A thread that checks all ranks every `INTERVAL` seconds until closed."""

    def __init__(self, beats: list[RankBeats], timeout: float, hangs: Callable[[int, float], None]) -> None:
        """timeout: in seconds, 0 for none. hangs: called once per rank that exceeds it, with index and silence."""
        self._beats, self._timeout, self._hangs = beats, timeout, hangs
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch-ranks")
        self._thread.start()

    @property
    def silence(self) -> float:
        return max(one.silence for one in self._beats)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        for one in self._beats:
            one.close()

    def _run(self) -> None:
        reported: set[int] = set()
        while not self._over.wait(INTERVAL):
            for index, one in enumerate(self._beats):
                one.look()
                if self._timeout and one.silence >= self._timeout and index not in reported:
                    reported.add(index)
                    self._hangs(index, one.silence)
