"""Processes that begin with a server's libraries loaded, for tests of what comes after that.

To import them is most of what a server computes that lives for seconds. Such processes are forked from one that has
imported them once, and that has no threads, unlike the one that runs the tests.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import pytest

import vlmserve

_LOADED = (
    __name__, "tests.engine_thread", "vlmserve.engine.mock", "vlmserve.server.run", "vlmserve.server.app",
    "vlmserve.server.service", "vlmserve.server.web", "vlmserve.server.batches.runner", "vlmserve.frontend.client",
    "vlmserve.frontend.requests", "vlmserve.batch.run", "vlmserve.scaleout.app", "vlmserve.scaleout.door",
    "vlmserve.scaleout.gateway", "vlmserve.scaleout.handover",
)  # fmt: skip
_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(list(_LOADED))


class _Inherited:
    """A file of this process, by its number, that the new one gets as well."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __getstate__(self) -> Any:
        return DupFd(self._number)

    def __setstate__(self, state: Any) -> None:
        self._number = state.detach()

    def take(self, number: int) -> None:
        """Have it under this number from now on."""
        os.dup2(self._number, number)
        os.close(self._number)


class ForkedProcess:
    """Runs a function of a module, which is imported there. Used like a `subprocess.Popen` with pipes.

    The process has the environment of whoever starts it. text: whether the pipes are for text. stderr: descriptor of
    its standard error, by default that of whoever starts it.
    """

    def __init__(self, function: Callable[..., None], *arguments: Any, text: bool = True, stderr: int = 2) -> None:
        (theirs, asks), (answers, says) = os.pipe(), os.pipe()
        self.stdin = os.fdopen(asks, "w" if text else "wb")
        self.stdout = os.fdopen(answers, "r" if text else "rb")
        files = tuple(map(_Inherited, (theirs, says, stderr)))
        self._process = _FORKING.Process(
            target=_begin, args=(dict(os.environ), files, function, arguments), daemon=True
        )
        with pytest.MonkeyPatch.context() as patch:
            # For the process that forks, which starts with the first of them.
            roots = Path(vlmserve.__file__).parents[1], Path(__file__).parents[1]
            patch.setenv("PYTHONPATH", os.pathsep.join(map(str, roots)))
            self._process.start()
        for number in (theirs, says):
            os.close(number)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Nothing if it has ended."""
        if self._process.is_alive():
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def close(self) -> None:
        """Kill it if it still runs, and close the pipes."""
        self.kill()
        self.wait()
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal. Raises subprocess.TimeoutExpired after so many seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return self._process.exitcode


def _begin(
    environment: dict[str, str],
    files: tuple[_Inherited, ...],
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # It was found in another environment.
    for number, file in enumerate(files):
        file.take(number)
    sys.stdin = os.fdopen(0, closefd=False)
    function(*arguments)
