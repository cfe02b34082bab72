"""The parent's side of a worker's or gateway's process."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Collection

import msgspec

from vlmserve import errors
from vlmserve.errors import ModelLoadError, VLMServeError
from vlmserve.scaleout.member import HANDED_OVER, Launch, News, Up

MODULE = "vlmserve.scaleout.member"
"""The command line of each worker and gateway names it."""


class MemberProcess:
    """A process that was started. It must be closed; it also ends when its parent does."""

    def __init__(self, launch: Launch) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C in a terminal goes to the parent alone, which has it drain first
        )
        self._lock = threading.Lock()
        self._write(msgspec.json.encode(launch))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def was_replaced(self) -> bool:
        """Whether it was a gateway whose place another one has taken, and has ended since."""
        return self._process.poll() == HANDED_OVER

    def wait_until_up(self) -> str:
        """Its URL, once it answers. Raises the VLMServeError for which it does not start."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ModelLoadError(f"the process ended with exit status {self._process.wait()} before it answered")
        news = msgspec.json.decode(line, type=News)
        if isinstance(news, Up):
            return news.url
        kind = getattr(errors, news.kind, VLMServeError)
        raise kind(news.message) if issubclass(kind, VLMServeError) else VLMServeError(news.message)

    def set_workers(self, urls: Collection[str]) -> None:
        self._write(msgspec.json.encode(sorted(urls)))

    def terminate(self) -> None:
        """Have it finish what is under way, and end."""
        if self.is_alive:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout: float | None = None) -> int:
        """Block until it has ended. Raises subprocess.TimeoutExpired."""
        return self._process.wait(timeout)

    def close(self) -> None:
        """End it at once if it still runs."""
        if self.is_alive:
            self._process.kill()
        self._process.wait()
        with self._lock:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(BrokenPipeError):  # it has ended, which whoever waits for it finds out
            if not self._process.stdin.closed:
                self._process.stdin.write(line + b"\n")
                self._process.stdin.flush()
