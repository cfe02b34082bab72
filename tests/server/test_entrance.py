"""Requests that arrive at once."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import json
import os
import socket
import threading
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.server.live import QUESTION, LiveServer
from tests.server.test_slow_clients import connections
from tests.waiting import until
from vlmserve.cancellation import client
from vlmserve.server import web
from vlmserve.server.entrance import PER_ROUND, Entrance
from vlmserve.server.run import bind, event_loop_factory
from vlmserve.server.service import Service
from vlmserve.server.web import WebServer
from vlmserve.settings.config import ServerConfig


def of(name: str, make: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
    """Start a task of a client."""
    context = contextvars.copy_context()
    context.run(client.set, name)
    return asyncio.get_running_loop().create_task(make(), context=context)


async def test_others_run_between_requests() -> None:
    entrance, order = Entrance(), []

    async def request(name: str) -> None:
        await entrance.enter()
        order.append(name)

    flood = [of("flood", lambda: request("flood")) for _ in range(50)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(order) < 4 * PER_ROUND
    await of("honest", lambda: request("honest"))
    assert order.index("honest") < len(flood) // 2
    await asyncio.gather(*flood)
    assert order.count("flood") == len(flood)


async def test_request_that_leaves_gives_its_turn_away() -> None:
    entrance, begun = Entrance(), []

    async def request(number: int) -> None:
        await entrance.enter()
        begun.append(number)

    tasks = [of("a", lambda number=number: request(number)) for number in range(30)]
    await asyncio.sleep(0)
    for task in tasks[10:20]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(begun) == [*range(10), *range(20, 30)]
    await until(lambda: not entrance.is_due)


def test_health_is_answered_between_many_requests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/health comes when the first of many requests is prepared."""
    prepared: list[int] = []
    prepared_before: list[int] = []
    count, body = 150, json.dumps({"messages": QUESTION, "max_tokens": 1}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    asked = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def watch(app: ASGIApp, _: Service) -> ASGIApp:
        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            await app(scope, receive, send)
            if scope["path"] == "/health":
                prepared_before.append(len(prepared))

        return watched

    with LiveServer(folder, wrap=watch) as live, connections(live, 1) as [health]:
        conversation = live.service.preparer.conversation

        def prepare(*arguments: Any, **options: Any) -> Any:
            if not prepared:
                health.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            prepared.append(1)
            return conversation(*arguments, **options)

        monkeypatch.setattr(live.service.preparer, "conversation", prepare)
        release = threading.Event()
        live.loop.call_soon_threadsafe(release.wait, 60)
        with connections(live, count, asked) as opened:
            release.set()
            for one in [health, *opened]:
                one.settimeout(60)
                assert one.recv(15) == b"HTTP/1.1 200 OK"
        assert len(prepared) == count
        [before] = prepared_before
        assert before < count / 2


async def test_shared_listener_never_blocks() -> None:
    """Another process that still accepts would stop in `accept` when this one is faster."""
    with bind(ServerConfig(port=0)) as shared:
        shared.setblocking(False)
        taken_over = socket.socket(fileno=os.dup(shared.fileno()))  # as it comes from another process
        server = WebServer(Response("ok"), ServerConfig(), taken_over)
        server.start()
        assert not os.get_blocking(shared.fileno())
        await server.stop()


def test_many_connections_are_accepted_at_once() -> None:
    """Otherwise each waits for an iteration of the event loop, in which earlier requests compute."""
    count = 200

    async def accept() -> int:
        server = WebServer(Response("ok"), ServerConfig(), bind(ServerConfig(port=0)))
        server.start()
        url, num_iterations = urlsplit(server.url), 0
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                stack.enter_context(socket.create_connection((url.hostname, url.port)))
            while server.num_connections < count:
                await asyncio.sleep(0)
                num_iterations += 1
        await server.leave(0)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((url.hostname, url.port))
        await server.stop()
        return num_iterations

    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        assert runner.run(accept()) < count / 4


def test_requests_of_clients_that_left_start_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    entrance, called = Entrance(0), []
    monkeypatch.setattr(web, "Entrance", lambda _: entrance)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        called.append(scope["path"])
        await Response("ok")(scope, receive, send)

    async def ask() -> None:
        server = WebServer(app, ServerConfig(), bind(ServerConfig(port=0)))
        server.start()
        url = urlsplit(server.url)
        left, stays, health = [await asyncio.open_connection(url.hostname, url.port) for _ in range(3)]
        for path, (_, writer) in {"/left": left, "/stays": stays}.items():
            writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        health[1].write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await health[0].readline()).split()[1] == b"200"
        left[1].transport.abort()
        await until(lambda: server.num_connections < 3)
        assert called == ["/health"]
        entrance.per_round = 1
        assert (await stays[0].readline()).split()[1] == b"200"
        assert called == ["/health", "/stays"]
        stays[1].close()
        health[1].close()
        await server.leave(0)
        await server.stop()

    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(ask())


def test_requests_are_freed_without_garbage_collection() -> None:
    """A body that nobody has read would stay until the next collection."""
    cycles: weakref.WeakSet[Any] = weakref.WeakSet()

    async def app(scope: Scope, receive: Any, send: Send) -> None:
        cycles.add(receive.__self__)
        await Response("ok")(scope, receive, send)

    async def ask() -> int:
        server = WebServer(app, ServerConfig(), bind(ServerConfig(port=0)))
        server.start()
        url = urlsplit(server.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        for _ in range(3):
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody")
            await reader.readuntil(b"ok")
        num_kept = len(cycles)
        writer.close()
        await server.leave(0)
        await server.stop()
        return num_kept

    gc.disable()
    try:
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            assert runner.run(ask()) <= 1, "the connection has the latest one"
    finally:
        gc.enable()


async def test_requests_that_left_take_no_turns() -> None:
    """A few are looked at in each round, so that many take no long one."""
    entrance, begun, failed = Entrance(), [], []

    async def request(number: int, *, has_left: bool) -> None:
        try:
            await entrance.enter(lambda: has_left)
            begun.append(number)
        except ClientDisconnect:
            failed.append(number)

    count = 100 * PER_ROUND
    tasks = [of("a", lambda number=number: request(number, has_left=number < count)) for number in range(count + 1)]
    rounds = 0
    while not begun:
        before = len(failed)
        await asyncio.sleep(0)
        rounds += 1
        assert len(failed) - before < 20 * PER_ROUND
    assert (begun, failed) == ([count], [*range(count)])
    assert rounds < 40
    await asyncio.gather(*tasks)
