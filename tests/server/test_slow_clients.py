"""Clients that send or read slowly, or not at all."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.server.live import QUESTION, LiveServer
from tests.waiting import wait_until
from vlmserve.server import body, web

MOST = 12
BODY = 200_000
ASKED = json.dumps({"messages": QUESTION, "max_tokens": 1}).encode()


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[LiveServer]:
    limits = {"max_connections": MOST, "max_body_bytes": BODY, "body_memory": 2 * BODY, "send_timeout": 0.3}
    with LiveServer(folder, server=limits) as server:
        yield server


@contextlib.contextmanager
def connections(live: LiveServer, count: int, data: bytes = b"") -> Iterator[list[socket.socket]]:
    url = urlsplit(live.url)
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            one = stack.enter_context(socket.create_connection((url.hostname, url.port), timeout=30))
            one.sendall(data)
            opened.append(one)
        yield opened


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def post(num_bytes: int) -> bytes:
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {num_bytes}\r\n\r\n".encode()


@pytest.mark.parametrize(
    "data", [b"", b"GET /health HTTP/1.1\r\nX-Slow: ", post(1000) + b"{"], ids=["idle", "head", "body"]
)
def test_waiting_connections_give_way(live: LiveServer, data: bytes) -> None:
    with connections(live, 3 * MOST, data) as opened:
        assert live.ask(max_tokens=1).status_code == 200
        wait_until(lambda: sum(map(is_closed, opened)) >= 2 * MOST)
        assert is_closed(opened[0])
        assert not is_closed(opened[-1])


def test_idle_connections_give_way_to_uploads(live: LiveServer) -> None:
    asked, count = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", MOST // 3
    with connections(live, count, post(1000) + b"{") as uploads, connections(live, count, asked) as opened:
        assert all(one.recv(65536).startswith(b"HTTP/1.1 200") for one in opened)
        *idle, busy_again = opened
        busy_again.sendall(post(1000))
        assert live.ask(max_tokens=1).status_code == 200
        with connections(live, MOST - 2 * count + len(idle)):
            wait_until(lambda: all(map(is_closed, idle)))
            assert not any(map(is_closed, [*uploads, busy_again]))


def test_lower_limit_of_connections_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 1000))
    assert web.Waiting(400).max_connections == 400
    assert caplog.text == ""
    assert web.Waiting(600).max_connections == 460
    assert "--max-connections 600: 460 are possible, because the process may open 1000 files" in caplog.text


def test_connections_with_a_request_do_not_give_way(folder: Path) -> None:
    asked = json.dumps({"messages": QUESTION, "stream": True, "ignore_eos": True, "max_tokens": 400}).encode()
    with LiveServer(folder, engine={"mock_tpot": 0.02}, server={"max_connections": 2}) as live:
        with connections(live, 2, post(len(asked)) + asked) as opened:
            assert all(one.recv(12) == b"HTTP/1.1 200" for one in opened)
            refused = httpx.get(f"{live.url}/health")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        wait_until(lambda: live.client.num_unfinished == 0)
        assert live.ask(max_tokens=1).status_code == 200


def test_slow_bodies_give_their_memory_to_others(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BRISK_PATIENCE", 0.1)
    with connections(live, 2, post(BODY) + b" " * (BODY - 1)) as opened:
        wait_until(lambda: live.service.bodies.used == 2 * (BODY - 1))
        time.sleep(0.2)
        assert live.ask(max_tokens=1, user="x" * 1000).status_code == 200
        [status] = [one.recv(12) for one in opened if readable(one)]
        assert status == b"HTTP/1.1 503"


def readable(connection: socket.socket) -> bool:
    connection.settimeout(0.2)
    with contextlib.suppress(TimeoutError):
        return bool(connection.recv(1, socket.MSG_PEEK))
    return False


def test_brisk_bodies_keep_their_memory(live: LiveServer) -> None:
    with connections(live, 2, post(BODY) + b" " * (BODY - 1)) as opened:
        wait_until(lambda: live.service.bodies.used == 2 * (BODY - 1))
        assert live.ask(max_tokens=1, user="x" * 1000).status_code == 503
        assert not any(map(readable, opened))
    wait_until(lambda: live.service.bodies.used == 0)


def ask_much(live: LiveServer) -> tuple[bytes, int]:
    """Requests whose answers are more than sockets buffer, and the bytes of the answers."""
    size = len(httpx.get(f"{live.url}/openapi.json").content)
    count = 16 * 2**20 // size
    return b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * count, count * size


def test_client_that_reads_nothing_is_disconnected(live: LiveServer) -> None:
    asked, size = ask_much(live)
    with connections(live, 1, asked) as [stalled]:
        stalled.recv(1)
        port = stalled.getsockname()[1]
        wait_until(lambda: port not in {one.raddr.port for one in psutil.Process().net_connections() if one.raddr})
        assert sum(map(len, parts(stalled))) < size


def test_client_that_reads_slowly_gets_its_answers(live: LiveServer) -> None:
    asked, size = ask_much(live)
    with connections(live, 1, asked) as [slow]:
        slow.settimeout(5)
        received = 0
        for part in parts(slow, 2**18):
            received += len(part)
            if received > size:
                return
            time.sleep(0.02)
    pytest.fail(f"{received} of {size} bytes came")


def parts(connection: socket.socket, size: int = 2**20) -> Iterator[bytes]:
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(size):
            yield data


def test_upgrade_to_another_protocol_is_refused_quietly(live: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    for asked in (b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
        with connections(live, 1, asked) as [one]:
            assert b"".join(parts(one)).startswith(b"HTTP/1.1 400")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
