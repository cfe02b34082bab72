"""Requests that are made to hold the server up: within bounds of time and memory, while others are answered."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.mock_checkpoint import make_mock_checkpoint
from tests.server.live import QUESTION
from tests.server.process import ServerProcess, settle

MB = 1_000_000
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = make_mock_checkpoint(tmp_path_factory.mktemp("checkpoint"), context=100_000)
    with ServerProcess(folder) as running:
        assert ask(running, {"messages": QUESTION}).status_code == 200
        yield running


def ask(server: ServerProcess, body: Any, path: str = "/v1/chat/completions") -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body)
    return httpx.post(f"{server.url}{path}", content=content, headers=JSON, timeout=120)


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def tool(description: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "description": description}}


LONG = "a " * (15 * MB)
TEXTS = {
    "a message": ({"messages": said(LONG)}, "/v1/chat/completions"),
    "control tokens": ({"messages": said("<image><" * (2 * MB))}, "/v1/chat/completions"),
    "a description of a tool": ({"messages": QUESTION, "tools": [tool(LONG)]}, "/v1/chat/completions"),
    "a prompt": ({"prompt": LONG}, "/v1/completions"),
    "an input": ({"input": LONG, "store": False}, "/v1/responses"),
    "a message of Anthropic's": ({"messages": said(LONG), "max_tokens": 1}, "/v1/messages"),
    "text to tokenize": ({"prompt": LONG}, "/tokenize"),
}


@pytest.mark.parametrize(("body", "path"), TEXTS.values(), ids=TEXTS.keys())
def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    server: ServerProcess, body: dict[str, Any], path: str
) -> None:
    content = json.dumps(body).encode()
    with server.watched(max_seconds=5, max_growth=400 * MB):
        response = ask(server, content, path)
    assert response.status_code == 400
    assert "tokens" in response.json()["error"]["message"]


COUNTS = {
    "messages": (b'{"messages":[' + b'{"role":"user","content":"a"},' * (MB // 4) + b"0]}", "messages"),
    "parts": (
        b'{"messages":[{"role":"user","content":[' + b'{"type":"text","text":"a"},' * (MB // 10) + b"0]}]}",
        "messages",
    ),
    "wrong messages": (b'{"messages":[' + b"0," * (MB // 2) + b"0]}", "messages[0]"),
    "values": (b'{"prompt":[' + b"0," * (30 * MB) + b"0]}", None),
    "stop strings": (json.dumps({"messages": QUESTION, "stop": ["a" * MB] * 16}).encode(), "stop"),
    "many stop strings": (json.dumps({"messages": QUESTION, "stop": ["a"] * (MB // 2)}).encode(), "stop"),
    "biases": (
        json.dumps({"messages": QUESTION, "logit_bias": {str(n): 1 for n in range(MB // 2)}}).encode(),
        "logit_bias",
    ),
}


@pytest.mark.parametrize(("body", "param"), COUNTS.values(), ids=COUNTS.keys())
def test_what_has_too_many_parts_is_refused_soon(server: ServerProcess, body: bytes, param: str | None) -> None:
    with server.watched(max_seconds=5, max_growth=500 * MB):
        response = ask(server, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_what_a_client_that_left_has_asked_is_not_tokenized(server: ServerProcess) -> None:
    # Each prompt fits by itself.
    content = json.dumps({"prompt": ["a " * 40_000] * 128}).encode()
    settle(server)
    with server.watched(max_seconds=5, max_growth=400 * MB):
        for _ in range(8):
            with socket.create_connection((urlsplit(server.url).hostname, urlsplit(server.url).port)) as connection:
                head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        settle(server)
