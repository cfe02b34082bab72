"""Requests that are made to hold the server up: within bounds of time and memory, while others are answered."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from PIL import Image

from tests.media.images_for_tests import encoded
from tests.mock_checkpoint import make_mock_checkpoint
from tests.server.live import QUESTION
from tests.server.process import ServerProcess, settle

MB = 1_000_000
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = make_mock_checkpoint(tmp_path_factory.mktemp("checkpoint"), context=100_000)
    with ServerProcess(folder, "--num-workers", "4", "--decode-memory", "256MiB") as running:
        assert ask(running, {"messages": QUESTION}).status_code == 200
        yield running


def ask(server: ServerProcess, body: Any, path: str = "/v1/chat/completions") -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body)
    return httpx.post(f"{server.url}{path}", content=content, headers=JSON, timeout=120)


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def tool(description: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "description": description}}


TEXTS: dict[str, tuple[Callable[[str], dict[str, Any]], str]] = {
    "a message": (lambda long: {"messages": said(long)}, "/v1/chat/completions"),
    "control tokens": (lambda _: {"messages": said("<image><" * (2 * MB))}, "/v1/chat/completions"),
    "a description of a tool": (lambda long: {"messages": QUESTION, "tools": [tool(long)]}, "/v1/chat/completions"),
    "a prompt": (lambda long: {"prompt": long}, "/v1/completions"),
    "an input": (lambda long: {"input": long, "store": False}, "/v1/responses"),
    "a message of Anthropic's": (lambda long: {"messages": said(long), "max_tokens": 1}, "/v1/messages"),
    "text to tokenize": (lambda long: {"prompt": long}, "/tokenize"),
}
"""What takes a long text, and where. Bodies are made when they are sent, since each process imports all files."""


@pytest.mark.parametrize(("body", "path"), TEXTS.values(), ids=TEXTS.keys())
def test_oversized_text_is_rejected_before_tokenizing(
    server: ServerProcess, body: Callable[[str], dict[str, Any]], path: str
) -> None:
    content = json.dumps(body("a " * (15 * MB))).encode()
    with server.watched(max_seconds=5, max_growth=400 * MB):
        response = ask(server, content, path)
    assert response.status_code == 400
    assert "tokens" in response.json()["error"]["message"]


def question(**fields: Any) -> bytes:
    return json.dumps({"messages": QUESTION, **fields}).encode()


COUNTS: dict[str, tuple[Callable[[], bytes], str | None]] = {
    "messages": (
        lambda: b'{"messages":[' + b'{"role":"user","content":"a"},' * (MB // 4) + b"0]}",
        "messages",
    ),
    "parts": (
        lambda: b'{"messages":[{"role":"user","content":[' + b'{"type":"text","text":"a"},' * (MB // 10) + b"0]}]}",
        "messages",
    ),
    "wrong messages": (lambda: b'{"messages":[' + b"0," * (MB // 2) + b"0]}", "messages[0]"),
    "values": (lambda: b'{"prompt":[' + b"0," * (30 * MB) + b"0]}", None),
    "stop strings": (lambda: question(stop=["a" * MB] * 16), "stop"),
    "many stop strings": (lambda: question(stop=["a"] * (MB // 2)), "stop"),
    "biases": (lambda: question(logit_bias={str(n): 1 for n in range(MB // 2)}), "logit_bias"),
}


@pytest.mark.parametrize(("body", "param"), COUNTS.values(), ids=COUNTS.keys())
def test_what_has_too_many_parts_is_refused_soon(
    server: ServerProcess, body: Callable[[], bytes], param: str | None
) -> None:
    content = body()
    with server.watched(max_seconds=5, max_growth=500 * MB):
        response = ask(server, content)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_requests_of_gone_clients_are_not_tokenized(server: ServerProcess) -> None:
    # Each prompt fits by itself.
    content = json.dumps({"prompt": ["a " * 40_000] * 128}).encode()
    settle(server)
    with server.watched(max_seconds=5, max_growth=400 * MB):
        for _ in range(8):
            with server.sending("/v1/completions", content):
                pass  # and hang up
        settle(server)


def test_streams_of_clients_that_left_hold_up_nobody(server: ServerProcess) -> None:
    content = question(stream=True, ignore_eos=True, max_tokens=1000)
    settle(server)
    with server.watched(max_seconds=20, max_growth=100 * MB):
        with contextlib.ExitStack() as leaving:
            for _ in range(400):
                leaving.enter_context(server.sending("/v1/chat/completions", content))
        settle(server)


FRAMING = {
    "many trailers": (b"0\r\n", b"a: b\r\n"),
    "a long trailer": (b"0\r\na: ", b"b"),
    "a long trailer name": (b"0\r\n", b"a"),
    "a long extension": (b"1;", b"a"),
    "many extensions": (b"", b"1;" + b"a" * 1000 + b"\r\na\r\n"),
}
"""How a chunked body begins, and what it repeats."""


@pytest.mark.parametrize("path", ["/health", "/v1/chat/completions"])
@pytest.mark.parametrize(("begin", "repeated"), FRAMING.values(), ids=FRAMING.keys())
def test_endless_trailers_and_extensions_are_rejected(
    server: ServerProcess, begin: bytes, repeated: bytes, path: str
) -> None:
    piece = repeated * (MB // len(repeated))
    with server.watched(max_seconds=3, max_growth=100 * MB):
        num_sent, answer = send_chunked(server.url, path, begin, piece)
    assert num_sent < 40
    # Linux may discard an answer that is followed by a reset.
    assert answer == b"" or int(answer.split()[1]) in ((200, 431) if path == "/health" else (431,))


def send_chunked(url: str, path: str, begin: bytes, piece: bytes, count: int = 40) -> tuple[int, bytes]:
    """Send a chunked body until the server closes the connection: the number of pieces sent, and the answer."""
    with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=60) as connection:
        method = "GET" if path == "/health" else "POST"
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + begin)
        for number in range(count):
            try:
                connection.sendall(piece)
            except ConnectionError:
                with contextlib.suppress(ConnectionError):
                    return number, connection.recv(65536)
                return number, b""
    return count, b""


def test_compressed_bombs_are_inflated_within_the_limit(server: ServerProcess) -> None:
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(bytes(10 * MB)) for _ in range(20)) + packer.flush()
    headers = JSON | {"content-encoding": "gzip"}
    with server.watched(max_seconds=5, max_growth=400 * MB), ThreadPoolExecutor(4) as pool:
        url = f"{server.url}/v1/chat/completions"
        answers = list(pool.map(lambda _: httpx.post(url, content=bomb, headers=headers, timeout=60), range(4)))
    assert [answer.status_code for answer in answers] == [413] * 4


def shown(data: bytes, kind: str) -> dict[str, Any]:
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


def test_jpeg_repeating_its_last_scan_is_rejected_undecoded(server: ServerProcess) -> None:
    data = encoded(Image.new("RGB", (8000, 7990), "red"), "JPEG", progressive=True)
    with server.watched(max_seconds=20, max_growth=1500 * MB):
        assert ask(server, shown(data, "jpeg")).status_code == 200
        last = data.rindex(b"\xff\xda")
        attack = shown(data[:-2] + data[last:-2] * 500 + data[-2:], "jpeg")
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: ask(server, attack), range(4)))
    assert [answer.status_code for answer in answers] == [400] * 4
    assert answers[0].json()["error"]["code"] == "image_too_large"


def test_large_images_are_not_decoded_all_at_once(server: ServerProcess) -> None:
    # Each takes 256 MB while it is decoded. With salts of their own, each is another image.
    image = shown(encoded(Image.new("RGB", (4000, 3990), "red"), "WEBP", lossless=True, method=0), "webp")
    images = [{**image, "cache_salt": str(number)} for number in range(4)]
    with server.watched(max_seconds=30, max_growth=700 * MB), ThreadPoolExecutor(len(images)) as pool:
        answers = list(pool.map(lambda image: ask(server, image), images))
    assert [answer.status_code for answer in answers] == [200] * len(images)


def test_images_of_clients_that_left_are_not_decoded(server: ServerProcess) -> None:
    settle(server)
    image = shown(encoded(Image.new("RGB", (8000, 7900), "red"), "PNG", compress_level=1), "png")
    with server.watched(max_seconds=12, max_growth=1500 * MB):
        for number in range(24):  # with salts of their own, so that each is another image
            content = json.dumps({**image, "cache_salt": str(number)}).encode()
            with server.sending("/v1/chat/completions", content):
                pass  # and hang up
        settle(server)
