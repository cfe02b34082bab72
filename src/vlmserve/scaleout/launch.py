"""Start and control the process of a worker or gateway."""

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
"""The module that member processes run."""


class MemberProcess:
    """A started process. Close it; it also ends with its parent."""

    def __init__(self, launch: Launch) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # a terminal's Ctrl-C reaches only the parent, which drains the members
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
        """True if it was a gateway and ended because another one took over."""
        return self._process.poll() == HANDED_OVER

    def wait_until_up(self) -> str:
        """Wait for the URL of the member. Raises the VLMServeError that kept it from starting."""
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
        """Have it finish its requests and end."""
        if self.is_alive:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended. Raises subprocess.TimeoutExpired."""
        return self._process.wait(timeout)

    def close(self) -> None:
        """Kill it if it still runs."""
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
        with self._lock, contextlib.suppress(BrokenPipeError):  # the process has ended; its waiter notices
            if not self._process.stdin.closed:
                self._process.stdin.write(line + b"\n")
                self._process.stdin.flush()
