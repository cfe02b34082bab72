"""Workers of pytest-xdist that are forked from one process, which has collected the tests.

Each worker would otherwise import all tests and what they import, and collect them: most of what it computes in its
first minute. The controller starts one process that collects (`collect`), and tells xdist to start `tests/attach.py`
in place of each worker. A worker that died is replaced by another fork.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from _pytest import tmpdir
from execnet.gateway_base import Popen2IO, get_execmodel, serve

_CHANNELS: Queue[Any] = Queue()
"""The channel to the controller, from the thread that opens it to the main thread."""
_FINISHED = threading.Event()
"""The worker has reported everything."""


class Controller:
    """Plugin of the process that gives tests to workers."""

    def __init__(self, collecting: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._collecting = collecting
        self._control = control

    def pytest_xdist_getremotemodule(self) -> str:
        return f"from {__name__} import work\nwork(channel)"

    def pytest_unconfigure(self) -> None:
        self._control.close()
        self._collecting.wait()


def can_fork_workers() -> bool:
    """Tell whether this system has what `tests/attach.py` needs. Some sandboxes of Linux do not."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def fork_workers(config: pytest.Config, specs: list[Any]) -> None:
    """Collect the tests, and have xdist fork its workers. Does nothing if collecting fails: workers say why."""
    name = f"vlmserve-tests-{uuid.uuid4()}"
    control, theirs = socket.socketpair()
    with socket.socket(socket.AF_UNIX) as listener, theirs:
        listener.bind(f"\0{name}")
        listener.listen()
        files = listener.fileno(), theirs.fileno()
        begin = f"import sys; sys.path = {sys.path}; from {__name__} import collect; collect(*{files})"
        collecting = subprocess.Popen(
            [sys.executable, "-c", begin, *map(str, config.invocation_params.args)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=files, cwd=config.invocation_params.dir,
        )  # fmt: skip
    if not control.recv(1):
        collecting.wait()
        return
    config.pluginmanager.register(Controller(collecting, control))
    for spec in specs:
        spec.python = shlex.join([sys.executable, "-S", str(Path(__file__).with_name("attach.py")), name])


def collect(listener: int, control: int) -> None:
    """Collect the tests that the command line names; fork a worker for each connection until the controller ends."""
    forking = Forking(socket.socket(fileno=listener), socket.socket(fileno=control))
    code = pytest.main([*sys.argv[1:], "--numprocesses", "0"], plugins=[forking])
    _FINISHED.set()
    if forking.serving is not None:
        forking.serving.join()
    sys.exit(code)


class Forking:
    """Plugin of the process that collects, and of the workers that are forked from it."""

    def __init__(self, listener: socket.socket, control: socket.socket) -> None:
        self._listener = listener
        self._control = control
        self._reports: list[pytest.CollectReport] = []
        self.serving: threading.Thread | None = None
        """Talks to the controller, in a worker."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        config.workerinput = {"workerid": "none", "testrunuid": "none"}  # type: ignore[attr-defined]
        config.workeroutput = {}  # type: ignore[attr-defined]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._reports.append(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        capture = session.config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # forks would share its files
        connection = self._fork()
        if connection is None:
            return True
        capture.start_global_capturing()
        capture.suspend_global_capture()
        self.serving = threading.Thread(target=_serve, args=(connection,), daemon=True)
        self.serving.start()
        channel = _CHANNELS.get()
        return self._run(session, channel)

    def _fork(self) -> socket.socket | None:
        """Return the connection of a worker, in its process; None in the process that forks, when all is done."""
        assert threading.active_count() == 1, threading.enumerate()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
        self._control.send(b"1")
        while self._control not in select.select([self._listener, self._control], [], [])[0]:
            connection, _ = self._listener.accept()
            process = os.fork()
            if process == 0:
                self._listener.close()
                self._control.close()
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return connection
            connection.send(str(process).encode())
            connection.close()
        return None

    def _run(self, session: pytest.Session, channel: Any) -> bool:
        """Report what was collected, and run the tests that the controller names."""
        from xdist import remote

        given, _, options, _ = channel.receive()
        session.config.workerinput.update(given)  # type: ignore[attr-defined]
        session.config.option.basetemp = options["basetemp"]
        tmpdir.pytest_configure(session.config)  # a folder for the files of each worker
        os.environ["PYTEST_XDIST_TESTRUNUID"] = given["testrunuid"]
        os.environ["PYTEST_XDIST_WORKER"] = given["workerid"]
        os.environ["PYTEST_XDIST_WORKER_COUNT"] = str(given["workercount"])
        interactor = remote.WorkerInteractor(session.config, channel)
        remote.interactor = interactor  # type: ignore[attr-defined]  # for what it reports of internal errors
        interactor.pytest_sessionstart(session)
        for report in self._reports:
            interactor.pytest_collectreport(report)
        interactor.pytest_collection_finish(session)
        return interactor.pytest_runtestloop(session)


def _serve(connection: socket.socket) -> None:
    with connection:
        _, files, _, _ = socket.recv_fds(connection, 1, 2)
    source, sink = (os.fdopen(number, mode) for number, mode in zip(files, ("rb", "wb"), strict=True))
    source.readline()  # the program that an interpreter would run here
    pipes = Popen2IO(sink, source, get_execmodel("thread"))
    pipes.write(b"1")
    serve(pipes, id="forked")


def work(channel: Any) -> None:
    """Runs in the thread that talks to the controller, for as long as it may talk."""
    _CHANNELS.put(channel)
    _FINISHED.wait()
