"""A client that leaves stops costing."""

from __future__ import annotations

import socket
import threading
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.live import QUESTION, stream_lines, wait_until

LONG = {"messages": QUESTION, "ignore_eos": True, "max_tokens": 500}


def idle(live) -> bool:
    return live.client.stats.num_running == 0 and live.client.num_unfinished == 0 and live.service.num_answers == 0


def test_leaving_a_stream_aborts_it_in_the_engine(slow):
    with stream_lines(slow.url, {**LONG, "n": 2}) as lines:
        next(lines)
        wait_until(lambda: slow.client.stats.num_running == 2)
    wait_until(lambda: idle(slow))
    assert slow.client.stats.generation_tokens < 500


def test_giving_up_on_a_whole_answer_aborts_it_in_the_engine(slow):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{slow.url}/v1/chat/completions", json=LONG, timeout=0.3)
    wait_until(lambda: idle(slow))


def test_leaving_before_the_first_token_aborts_it_too(live_waiting):
    with stream_lines(live_waiting.url, LONG) as lines:
        next(lines)
        wait_until(lambda: live_waiting.client.stats.num_running == 1)
    wait_until(lambda: idle(live_waiting))
    assert live_waiting.client.stats.generation_tokens == 0


def test_leaving_in_the_middle_of_the_body_leaves_nothing_behind(slow):
    host, port = urlsplit(slow.url).netloc.split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 1000\r\n\r\n{"messages": ['
        )
    wait_until(lambda: idle(slow))
    assert slow.ask(max_tokens=2).status_code == 200


def test_leaving_while_the_prompt_is_prepared_never_reaches_the_engine(slow, monkeypatch):
    preparing, go_on = threading.Event(), threading.Event()
    prepare = slow.service._preparer.chat
    before = slow.client.stats.prompt_tokens

    def hold(messages):
        preparing.set()
        go_on.wait(10)
        return prepare(messages)

    monkeypatch.setattr(slow.service._preparer, "chat", hold)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{slow.url}/v1/chat/completions", json=LONG, timeout=0.3)
    assert preparing.is_set()
    wait_until(lambda: slow.service.num_answers == 0)
    go_on.set()
    monkeypatch.undo()
    assert slow.ask(max_tokens=2).status_code == 200
    # Only the good request's prompt was computed.
    cost = slow.ask(max_tokens=2).json()["usage"]["prompt_tokens"]
    wait_until(lambda: slow.client.stats.prompt_tokens >= before + 2 * cost)
    assert slow.client.stats.prompt_tokens == before + 2 * cost
