"""Processes that have imported a decoder's library and fork a process for each file.

A fork takes milliseconds; starting Python and the library takes as long as several small images. A fork server reads no
files, so a file affects only its own process (`isolated_worker.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections import Counter, deque
from pathlib import Path
from typing import Literal, TypeAlias

from vlmserve.errors import UnavailableError

COMMAND = [sys.executable, "-I", "-S", "-u", str(Path(__file__).with_name("isolated_worker.py"))]
"""Isolated, without site packages: it gets this process's `sys.path`."""
_INHERITED = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
"""Environment variables that the processes get. Keys and passwords are not among them."""
_OWN = {"MALLOC_ARENA_MAX": "1"}
"""Otherwise each thread reserves address space, which is limited."""
TIMEOUT = 60.0
"""Seconds until a server counts as hung. The first answer includes the import of the library."""
_LAST_TIMEOUT = 5.0
"""Seconds to end."""
_KILLED = 9
"""Exit status of a process after its server ended."""

FileKind: TypeAlias = Literal["pdf", "image", "video", "grammar"]
ServerKey: TypeAlias = tuple[FileKind, str]
"""Kind and argument of the decoder; the argument is empty for decoders of files."""


class ForkServer:
    """Forks processes for files of one kind. Thread-safe. Raises UnavailableError if it cannot start."""

    def __init__(self, kind: FileKind, setup: str = "") -> None:
        self._lock = threading.Lock()
        self._has_forked = False
        self._abandoned: deque[int] = deque()
        with contextlib.ExitStack() as ours:
            try:
                self._socket, theirs = socket.socketpair()
                ours.enter_context(self._socket).settimeout(TIMEOUT)
                with theirs:
                    self._process = subprocess.Popen(
                        COMMAND,
                        stdin=theirs.fileno(),
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        cwd="/",
                        env={name: os.environ[name] for name in _INHERITED if name in os.environ} | _OWN,
                        start_new_session=True,
                    )
                path = [os.path.abspath(entry) for entry in sys.path]
                self._socket.sendall(json.dumps({"kind": kind, "setup": setup, "path": path}).encode() + b"\n")
            except OSError as error:
                raise UnavailableError(f"no process could be started to decode files: {error}") from error
            ours.pop_all()

    def fork(self, *files: int) -> int:
        """Return the process id. Raises OSError if this server has ended."""
        with self._lock:
            while self._abandoned:
                self._ask(f"{self._abandoned.popleft()}\n".encode())
            self._has_forked = True
            return self._ask(b"\n", *files)

    def end(self, pid: int) -> int:
        """Return the exit code, or the negative signal number."""
        try:
            with self._lock:
                return self._ask(f"{pid}\n".encode())
        except OSError:
            return -_KILLED  # of the server and its processes

    def abandon(self, pid: int) -> None:
        """End a process with the next fork. Takes no lock."""
        self._abandoned.append(pid)

    def close(self) -> None:
        self._socket.close()
        if not self._has_forked:
            self._process.kill()  # it may still import
        try:
            self._process.wait(_LAST_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, line: bytes, *files: int) -> int:
        try:
            socket.send_fds(self._socket, [line], files)
            answer = bytearray()
            while not answer.endswith(b"\n"):
                received = self._socket.recv(64)
                if not received:
                    raise ConnectionResetError("the process that starts others has ended")
                answer += received
        except OSError:
            self._socket.close()  # a late answer must not be read as the next one
            raise
        return int(answer)


_lock = threading.Lock()
_servers: dict[ServerKey, ForkServer] = {}
_owners: Counter[ServerKey] = Counter()
"""Owners of each server."""
_disowned: deque[ServerKey] = deque()
"""Owners to remove with the next fork."""


def fork_for(kind: FileKind, stdin: int, stdout: int, setup: str = "", *memory: int) -> tuple[ForkServer, int]:
    """Returns also the server. memory: file of `pixel_memory`. Raises UnavailableError."""
    end_disowned()
    key = (kind, setup)
    for _ in range(2):  # replaces a server that was ended from outside
        with _lock:
            server = _server_for(key)
        try:
            return server, server.fork(stdin, stdout, *memory)
        except OSError:
            with _lock:
                if _servers.get(key) is server:
                    del _servers[key]
            server.close()
    raise UnavailableError("no process could be started to decode the file")


def start_server(kind: FileKind, setup: str = "") -> None:
    """Start a server before its first file, without waiting for it. Raises UnavailableError."""
    with _lock:
        _server_for((kind, setup))


def _server_for(key: ServerKey) -> ForkServer:
    """Call it with the lock."""
    server = _servers.get(key)
    if server is None:
        server = _servers[key] = ForkServer(*key)
    return server


def own_server(kind: FileKind, setup: str) -> None:
    """Add an owner; the server lives until its last owner disowns it."""
    with _lock:
        _owners[kind, setup] += 1


def disown_server(kind: FileKind, setup: str) -> None:
    """Remove an owner with the next fork. Finalizers may call this: it takes no lock and does not wait."""
    _disowned.append((kind, setup))


def end_disowned() -> None:
    ended = []
    with _lock:
        while _disowned:
            key = _disowned.popleft()
            _owners[key] -= 1
            if not _owners[key]:
                del _owners[key]
                ended.append(_servers.pop(key, None))
    for server in ended:
        if server is not None:
            server.close()


@atexit.register
def end_servers() -> None:
    with _lock:
        ended = [_servers.pop(key) for key in list(_servers)]
    for server in ended:
        server.close()


def _forget_servers() -> None:
    global _lock
    _lock = threading.Lock()
    _servers.clear()


os.register_at_fork(after_in_child=_forget_servers)
