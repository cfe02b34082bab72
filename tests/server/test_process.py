"""Servers that tests watch: a busy event loop is noticed."""

from __future__ import annotations

import contextlib
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.forking import ForkedProcess
from tests.server.process import MAX_PAUSE, ServerProcess
from tests.waiting import wait_until


class Busy(BaseHTTPRequestHandler):
    """Computes before it answers."""

    def do_GET(self) -> None:
        until = time.process_time() + 2 * MAX_PAUSE
        while time.process_time() < until:
            pass
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Write nothing."""


def serve_busily() -> None:
    with HTTPServer(("127.0.0.1", 0), Busy) as server, contextlib.suppress(KeyboardInterrupt):
        print(f"busy server at http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()


class BusyServer(ServerProcess):
    def _start(self) -> ForkedProcess:
        return ForkedProcess(serve_busily)


def test_process_of_grammars_starts_with_the_server(folder: Path) -> None:
    with ServerProcess(folder) as server:
        wait_until(server.fork_servers)


def test_pauses_of_a_busy_loop_count(tmp_path: Path) -> None:
    with (
        BusyServer(tmp_path) as server,
        pytest.raises(AssertionError, match="/health took"),
        server.watched(max_seconds=60, max_growth=10**9),
    ):
        pass
