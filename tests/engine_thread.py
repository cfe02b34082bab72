"""An engine in a thread of the test, where a process of its own would only import the same again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import zmq

from vlmserve.engine import create_engine
from vlmserve.engine.child import socket_directory
from vlmserve.engine.process import EngineProcess, load_and_serve
from vlmserve.engine.protocol import VLMEngine
from vlmserve.server import run as server_run
from vlmserve.settings.config import EngineConfig


class _Killed(BaseException):
    """The test wants the engine gone."""


class EngineThread(EngineProcess):
    """What `EngineClient` takes for an engine process. The client, the messages and their way are the real ones; the
    memory, the environment, the log and the end of a process are not, so tests of these start a real one.

    A killed one counts as gone at once and really ends after its step.
    """

    def __init__(self, config: EngineConfig, folder: Path | None = None) -> None:
        self._directory = socket_directory()
        self.endpoint = f"ipc://{self._directory}/engine"
        self._config, self._folder = config, folder
        self._killed, self._kill = os.pipe()
        self._code: int | None = None
        self._gone = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    @classmethod
    def launch(cls, config: EngineConfig, folder: Path | None = None) -> EngineThread:
        return cls(config, folder)

    @property
    def pid(self) -> int:
        """That of the tests, whose memory and time the engine's are."""
        return os.getpid()

    @property
    def returncode(self) -> int | None:
        return self._code

    @property
    def ran_out_of_memory(self) -> bool:
        return False

    def wait(self, timeout: float | None = None) -> int:
        if not self._gone.wait(timeout):
            raise subprocess.TimeoutExpired("engine", timeout or 0)
        assert self._code is not None
        return self._code

    def kill(self) -> None:
        with self._lock:
            if self._kill >= 0:
                os.close(self._kill)  # its other end becomes readable
                self._kill = -1
        self._end(-signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _end(self, code: int) -> None:
        with self._lock:
            if self._code is None:
                self._code = code
        self._gone.set()

    def _run(self) -> None:
        code = 1
        try:
            with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
                socket.set(zmq.LINGER, 1000)
                socket.set(zmq.RECONNECT_IVL, 10)
                socket.connect(self.endpoint)
                with contextlib.suppress(_Killed):
                    code = load_and_serve(self._load, self._config.model, self.endpoint, context, socket)
        finally:
            self._end(code)
            os.close(self._killed)

    def _load(self) -> VLMEngine:
        return _mortal(create_engine(self._config, self._folder), self._killed)


def run_engines_in_threads() -> None:
    """Let the servers of this process run their engines in threads: an engine's process imports for a second."""
    server_run.EngineProcess = EngineThread  # type: ignore[misc]


def _mortal(engine: VLMEngine, killed: int) -> VLMEngine:
    """The engine, whose `check` raises once this file is readable."""

    class Mortal(type(engine)):  # type: ignore[misc]
        @property
        def watched(self) -> Sequence[int]:
            return (*super().watched, killed)

        def check(self) -> None:
            super().check()
            raise _Killed

    engine.__class__ = Mortal
    return engine
