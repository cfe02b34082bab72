"""Start and control the process of a worker or gateway."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Collection, Iterator

import msgspec

from vlmserve import errors
from vlmserve.engine.preload import Process, start_module
from vlmserve.errors import ModelLoadError, VLMServeError
from vlmserve.scaleout.member_messages import HANDED_OVER, Failed, Launch, News, Up

MODULE = "vlmserve.scaleout.member"
"""The module that member processes run."""


class MemberProcess:
    """Close it; it also ends with its parent. process: reads `launch` as `start_module` does."""

    def __init__(self, launch: Launch, process: Process | None = None) -> None:
        self._process = process or start_module(MODULE)
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
        """True if another gateway took over."""
        return self._process.poll() == HANDED_OVER

    def news(self) -> Iterator[News]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield msgspec.json.decode(line, type=News)

    def wait_until_up(self) -> str:
        """Raises the VLMServeError that kept the member from starting."""
        for news in self.news():
            match news:
                case Up(url):
                    return url
                case Failed(message, kind):
                    error = getattr(errors, kind, VLMServeError)
                    raise error(message) if issubclass(error, VLMServeError) else VLMServeError(message)
        raise ModelLoadError(f"the process ended with exit status {self._process.wait()} before it answered")

    def set_workers(self, urls: Collection[str]) -> None:
        self._write(msgspec.json.encode(sorted(urls)))

    def terminate(self) -> None:
        if self.is_alive:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        return self._process.wait(timeout)

    def close(self) -> None:
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
