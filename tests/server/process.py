"""A server in a process of its own, of which a test looks at the time and the memory."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil

from tests.forking import ForkedProcess
from tests.server import program

MAX_PAUSE = 0.5
"""Seconds within which /health answers, whatever others ask. Only those count in which the server's process computes
and its threads have cores, which other processes of the machine may take."""


def is_fork_server(process: psutil.Process) -> bool:
    return "isolated_worker" in " ".join(process.cmdline())


def engines_of(pid: int) -> list[psutil.Process]:
    """Processes of a server's engine. A process that just starts looks like one of them."""
    return [child for child in psutil.Process(pid).children() if not is_fork_server(child)]


class ServerProcess:
    """The command ``vlmserve serve`` with a mock engine. Use as a context manager."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._arguments = ["serve", str(folder), "--engine", "mock", "--port", "0", "--storage-url", "none", *flags]

    def _start(self) -> ForkedProcess:
        return ForkedProcess(program.command, self._arguments)

    def __enter__(self) -> ServerProcess:
        self._process = self._start()
        line = self._process.stdout.readline()
        self.url = line.split()[3]
        assert self.url.startswith("http://"), line
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(20)
        finally:
            self._process.close()

    @contextlib.contextmanager
    def sending(self, path: str, content: bytes) -> Iterator[socket.socket]:
        """Send a request, and hang up at the end of the block."""
        with socket.create_connection((urlsplit(self.url).hostname, urlsplit(self.url).port)) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            yield connection

    def fork_servers(self) -> list[psutil.Process]:
        """The server's processes that fork those in `decoders`."""
        return [child for child in psutil.Process(self._process.pid).children() if is_fork_server(child)]

    def decoders(self) -> list[psutil.Process]:
        """Processes in which the server has a file open."""
        found = []
        for child in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = child.parent()
                lines = [" ".join(process.cmdline()) for process in (child, parent) if process is not None]
                if all("isolated_worker" in line for line in lines) and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
        return found

    @property
    def memory(self) -> int:
        """Bytes that the server's process has resident."""
        return int(psutil.Process(self._process.pid).memory_info().rss)

    @property
    def cpu_seconds(self) -> float:
        """Processor time that the server's process has used."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    @property
    def seconds_without_core(self) -> float:
        """Time in which the server's event loop and the calling thread could run but had no core.

        Linux counts it; elsewhere it is 0.
        """
        pid = self._process.pid
        waited = 0
        for thread in (f"/proc/{pid}/task/{pid}", f"/proc/self/task/{threading.get_native_id()}"):
            with contextlib.suppress(FileNotFoundError):
                waited += int(Path(thread, "schedstat").read_text().split()[1])
        return waited / 1e9

    @contextlib.contextmanager
    def watched(self, *, max_seconds: float, max_growth: int) -> Iterator[None]:
        """While the block runs, /health answers in time; then check what the server's process has used in it.

        max_seconds: of processor time. max_growth: bytes of resident memory, at the worst moment.
        """
        over = threading.Event()
        pauses, largest = [0.0], 0
        before, cpu = self.memory, self.cpu_seconds

        def watch() -> None:
            nonlocal largest
            # Each probe has a connection of its own, as those of load balancers do.
            with httpx.Client(timeout=60, headers={"connection": "close"}) as client:
                while True:
                    began, used, waited = time.monotonic(), self.cpu_seconds, self.seconds_without_core
                    client.get(f"{self.url}/health")
                    waited = max(self.seconds_without_core - waited, 0)
                    pauses.append(min(time.monotonic() - began - waited, self.cpu_seconds - used))
                    largest = max(largest, self.memory)
                    if over.wait(0.02):
                        return

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
        slow = [f"{pause:.2f} s" for pause in pauses if pause > MAX_PAUSE]
        assert slow == [], f"/health took {slow}"
        assert self.cpu_seconds - cpu < max_seconds, f"{self.cpu_seconds - cpu:.1f} s of processor time"
        assert largest - before < max_growth, f"{(largest - before) / 1e6:.0f} MB more"


def settle(server: ServerProcess, seconds: float = 30) -> None:
    """Wait until the server's process is idle."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        used = server.cpu_seconds
        time.sleep(0.3)
        if server.cpu_seconds - used < 0.05:
            return
    raise AssertionError(f"process {os.getpid()} still waits for the server to become idle")
