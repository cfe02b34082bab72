"""Fork processes from one that has imported vlmserve's libraries: a fork takes milliseconds, the imports take seconds.

The preloader starts no threads, so forks are safe. It listens on a Unix socket. A connection stands for one process:
its module, standard streams and exit status go over it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import IO, NoReturn

from vlmserve.engine.child import child_environment, socket_directory
from vlmserve.garbage import freeze_loaded_objects

_FRONTEND = (
    "scaleout.app", "scaleout.door", "scaleout.member", "server.app", "server.batches.runner", "server.run",
    "server.service", "server.web", "frontend.client", "frontend.requests",
)  # fmt: skip
_ENGINE = (
    "engine.engine", "engine.process", "devices.cpu", "kernels.cpu_native", "models.gguf_tensors", "models.registry",
    "runner.runner", "runner.warm_up",
)  # fmt: skip
_STDERR = 2
_MAX_MESSAGE = 1024
"""Bytes of a module's name."""
_MAX_NAME = 15
"""Characters of a process name on Linux."""

_address = ""
"""Socket of the preloader that forks this process's children; empty: they import everything themselves."""


def process_name(module: str) -> str:
    """The name that `ps` shows for a fork that runs `module`; its command line is the preloader's."""
    return module.removeprefix("vlmserve.")[:_MAX_NAME]


class Preloader:
    """Owns the process that forks. Its forks live until their own standard input closes."""

    def __init__(self) -> None:
        self._folder = socket_directory()
        self.address = str(self._folder / "fork")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(128)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "vlmserve.engine.preload", str(listener.fileno()), self.address],
                stdin=subprocess.PIPE,
                env=child_environment(),
                pass_fds=(listener.fileno(),),
                process_group=0,  # Ctrl-C in a terminal goes to the parent alone
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class ForkedProcess:
    """A process that a preloader forked, with the interface of `subprocess.Popen`.

    Raises OSError without a preloader. module: runs its `main`. stdout: see `start_module`.
    """

    def __init__(self, address: str, module: str, stdout: int | None = None) -> None:
        with contextlib.ExitStack() as opened, contextlib.ExitStack() as theirs:
            reads, writes = os.pipe()
            self.stdin: IO[bytes] = opened.enter_context(os.fdopen(writes, "wb"))
            theirs.callback(os.close, reads)
            self.stdout: IO[bytes] | None = None
            if stdout is None:
                answers, stdout = os.pipe()
                self.stdout = opened.enter_context(os.fdopen(answers, "rb"))
                theirs.callback(os.close, stdout)
            connection = theirs.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(address)
            socket.send_fds(connection, [module.encode()], [reads, stdout, _STDERR])
            self._news = os.dup(connection.fileno())
            weakref.finalize(self, os.close, self._news)
            number = self._read_number()
            if number is None:
                raise ConnectionResetError("the process that forks others has ended")
            self.pid = number
            opened.pop_all()
        self._lock = threading.Lock()
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            watched = select.poll()
            watched.register(self._news, select.POLLIN)
            if not watched.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired("fork", timeout or 0)
            with self._lock:
                if self._code is None:
                    self._code = self._read_code()
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read_code(self) -> int:
        code = self._read_number()
        if code is None:  # the preloader has ended
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            return -signal.SIGKILL
        return code

    def _read_number(self) -> int | None:
        """Read a line; None at the end."""
        line = bytearray()
        while not line.endswith(b"\n"):
            byte = os.read(self._news, 1)
            if not byte:
                return None
            line += byte
        return int(line)


Process = subprocess.Popen[bytes] | ForkedProcess


def fork_children_from(address: str) -> None:
    """Have `start_module` fork processes from the preloader at `address`; empty: from none."""
    global _address
    _address = address


def start_module(module: str, stdout: int | None = None) -> Process:
    """Run a module in a process with its own process group and a pipe as standard input.

    stdout: the descriptor to write to; None: a pipe.
    """
    if _address:
        with contextlib.suppress(OSError):  # the preloader has ended
            return ForkedProcess(_address, module, stdout)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if stdout is None else stdout,
        env=child_environment(),
        process_group=0,  # a terminal's Ctrl-C reaches only the parent, which drains first
    )


class _Forker:
    def __init__(self, listener: socket.socket, address: str) -> None:
        self._listener, self._address = listener, address
        self._woken, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        signal.set_wakeup_fd(self._wakes.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._connections: dict[int, socket.socket] = {}
        """By process id."""
        self._selector = selectors.DefaultSelector()
        for source in (listener, self._woken, sys.stdin.fileno()):
            self._selector.register(source, selectors.EVENT_READ)

    def run(self) -> None:
        """Fork until the parent's end of standard input closes."""
        while sys.stdin.fileno() not in (ready := {key.fileobj for key, _ in self._selector.select()}):
            if self._woken in ready:
                self._woken.recv(4096)
                self._reap()
            if self._listener in ready:
                self._fork(self._listener.accept()[0])
        signal.set_wakeup_fd(-1)  # the sockets close before the last children end

    def _fork(self, connection: socket.socket) -> None:
        message, files, _, _ = socket.recv_fds(connection, _MAX_MESSAGE, 3)
        if len(files) != 3:
            connection.close()
            return
        try:
            pid = os.fork()
        except OSError:  # no memory or process left, which its owner learns from the closed connection
            pid = -1
        if not pid:
            connection.close()
            self._become(message.decode(), files)
        for file in files:
            os.close(file)
        if pid < 0:
            connection.close()
            return
        self._connections[pid] = connection
        self._tell(pid, pid)

    def _become(self, module: str, files: Collection[int]) -> NoReturn:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setpgid(0, 0)
        self._selector.close()
        for own in (self._listener, self._woken, self._wakes, *self._connections.values()):
            own.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        sys.stdin = os.fdopen(0, closefd=False)
        fork_children_from(self._address)
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(process_name(module), "utf-8")
        code = 1
        try:
            code = importlib.import_module(module).main()
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                self._tell(pid, os.waitstatus_to_exitcode(status))
                self._connections.pop(pid).close()

    def _tell(self, pid: int, number: int) -> None:
        with contextlib.suppress(OSError):  # its owner is gone, and it will end
            self._connections[pid].sendall(b"%d\n" % number)


def main(descriptor: str, address: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in (*_FRONTEND, *_ENGINE):
        importlib.import_module(f"vlmserve.{name}")
    freeze_loaded_objects()
    _Forker(socket.socket(fileno=int(descriptor)), address).run()


if __name__ == "__main__":
    # Forks must find this very module, not a copy named __main__.
    importlib.import_module("vlmserve.engine.preload").main(*sys.argv[1:])
