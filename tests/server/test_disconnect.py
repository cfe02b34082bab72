"""A client that leaves stops costing."""

from __future__ import annotations

import contextlib
import gc
import json
import socket
import threading
import weakref
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.server.live import QUESTION, stream_lines
from tests.waiting import wait_until
from vlmserve.frontend.requests import Conversation
from vlmserve.server.body import BodyShare

LONG = {"messages": QUESTION, "ignore_eos": True, "max_tokens": 400}


@contextlib.contextmanager
def sent(live, body: dict, missing: int = 0) -> Iterator[None]:
    """A request on a connection of its own, without its last bytes; leaving closes the connection."""
    data = json.dumps(body).encode()
    host, port = urlsplit(live.url).netloc.split(":")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data[: len(data) - missing])
        yield


def idle(live) -> bool:
    return live.client.stats.num_running == 0 and live.client.num_unfinished == 0 and live.service.num_answers == 0


def test_leaving_a_stream_aborts_it_in_the_engine(slow):
    with stream_lines(slow.url, {**LONG, "n": 2}) as lines:
        next(lines)
        wait_until(lambda: slow.client.stats.num_running == 2)
    wait_until(lambda: idle(slow))
    assert slow.client.stats.generation_tokens < 500


def test_abandoned_whole_answer_is_aborted_in_the_engine(slow):
    with sent(slow, LONG):
        wait_until(lambda: slow.client.stats.num_running == 1)
    wait_until(lambda: idle(slow))


def test_leaving_before_the_first_token_aborts_it_too(live_waiting):
    with stream_lines(live_waiting.url, LONG) as lines:
        next(lines)
        wait_until(lambda: live_waiting.client.stats.num_running == 1)
    wait_until(lambda: idle(live_waiting))
    assert live_waiting.client.stats.generation_tokens == 0


def test_old_client_cannot_wait_silently(live_waiting):
    """Nothing but an answer can be written to a client of HTTP/1.0, so nothing tells whether it has left."""
    data = json.dumps(LONG).encode()
    host, port = urlsplit(live_waiting.url).netloc.split(":")
    head = f"POST /v1/chat/completions HTTP/1.0\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: live_waiting.client.stats.num_running == 1)
        assert connection.recv(1) == b""
        wait_until(lambda: idle(live_waiting))


def test_leaving_mid_body_leaves_nothing_behind(slow):
    with sent(slow, LONG, missing=10):
        pass
    wait_until(lambda: idle(slow))
    assert slow.ask(max_tokens=2).status_code == 200


def test_leaving_during_preparation_never_reaches_the_engine(slow, monkeypatch):
    preparing, go_on = threading.Event(), threading.Event()
    prepare = Conversation.prompt
    before = slow.client.stats.prompt_tokens

    def hold(conversation):
        preparing.set()
        go_on.wait(60)
        return prepare(conversation)

    with monkeypatch.context() as patch:
        patch.setattr(Conversation, "prompt", hold)
        with sent(slow, {**LONG, "messages": [{"role": "user", "content": "Long enough for a thread. " * 100}]}):
            assert preparing.wait(60)
        wait_until(lambda: slow.service.num_answers == 0)
        go_on.set()
    cost = slow.ask(max_tokens=2).json()["usage"]["prompt_tokens"]
    wait_until(lambda: slow.client.stats.prompt_tokens >= before + cost)
    assert slow.client.stats.prompt_tokens == before + cost


@pytest.mark.parametrize("leaves", [True, False], ids=["left", "rejected"])
def test_failed_requests_are_freed_without_garbage_collection(live_waiting, monkeypatch, leaves) -> None:
    """Frames of a request hold its body and images, so a cycle would keep them until the next collection."""
    made, shares = [], weakref.WeakSet()
    make = BodyShare.__init__

    def spy(share, *arguments) -> None:
        make(share, *arguments)
        shares.add(share)
        made.append(1)

    monkeypatch.setattr(BodyShare, "__init__", spy)
    gc.disable()
    try:
        if leaves:
            with sent(live_waiting, LONG):
                wait_until(lambda: live_waiting.client.num_unfinished == 1)
        else:
            assert live_waiting.ask(max_tokens=-1).status_code == 400
        wait_until(lambda: made and not shares, timeout=10)
    finally:
        gc.enable()
