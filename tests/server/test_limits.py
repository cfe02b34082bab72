"""Each limit: what a request beyond it is told, and that the next one works."""

from __future__ import annotations

import functools
import io
import json
import socket
import struct
import threading
import time
import zlib
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from PIL import Image

from tests.mock_checkpoint import CONTEXT
from tests.server.live import QUESTION, LiveServer
from tests.server.test_bad_input import data_url, png, refused, with_images
from tests.waiting import wait_until
from vlmserve.frontend.requests import Conversation
from vlmserve.media.images import FORMATS

LONG = {"ignore_eos": True, "max_tokens": 480}


@pytest.fixture(scope="module")
def bounded(folder, tmp_path_factory):
    """A server on which every limit is low."""
    allowed = tmp_path_factory.mktemp("allowed")
    server = {
        "max_body_bytes": 100_000,
        "max_output_tokens": 20,
        "max_header_bytes": 4096,
        "head_timeout": 0.3,
        "body_timeout": 0.3,
    }
    server["storage_url"] = f"sqlite:///{allowed}/history.db"
    media = {"max_images": 2, "max_image_pixels": 10_000, "max_image_bytes": 50_000}
    with LiveServer(folder, server=server, media={**media, "allowed_media_path": str(allowed)}) as live:
        live.allowed = allowed
        yield live


@pytest.fixture(autouse=True)
def a_good_request_still_works(request):
    yield
    if "bounded" in request.fixturenames:
        live = request.getfixturevalue("bounded")
        assert live.ask(max_tokens=2).status_code == 200
        wait_until(lambda: live.service.bodies.used == live.service.num_answers == live.client.num_unfinished == 0)


def image_file(image_format: str, width: int = 40, height: int = 30) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, image_format)
    return file.getvalue()


@pytest.mark.parametrize(
    ("body", "status", "code", "param", "message"),
    [
        ({"user": "x" * 100_000}, 413, "body_too_large", None, "100000 bytes"),
        (with_images(*[data_url(png())] * 3), 400, "too_many_images", "messages", "at most 2"),
        (
            with_images(data_url(png(101, 100))),
            400,
            "image_too_large",
            "messages[0].content[0].image_url.url",
            "10,000",
        ),
        (
            with_images(data_url(bytes(50_001))),
            400,
            "image_too_large",
            "messages[0].content[0].image_url.url",
            "50,000",
        ),
        (
            {"messages": [{"role": "user", "content": "no " * CONTEXT}]},
            400,
            "context_length_exceeded",
            "messages",
            f"maximum context length is {CONTEXT} tokens",
        ),
        ({"min_tokens": 21}, 400, "invalid_request", "min_tokens", "at most 20 tokens"),
    ],
)
def test_fields_beyond_a_limit_are_rejected_by_name(bounded, body, status, code, param, message):
    for stream in (False, True):
        response = bounded.post({"messages": QUESTION, **body, "stream": stream})
        refused(response, status, message, param=param, code=code)
        assert "retry-after" not in response.headers, "trying again does not help"


def test_an_answer_without_a_limit_gets_the_servers(bounded):
    choice = bounded.ask(ignore_eos=True).json()
    assert choice["choices"][0]["finish_reason"] == "length"
    assert choice["usage"]["completion_tokens"] == 20
    assert bounded.ask(ignore_eos=True, max_tokens=20).status_code == 200


def test_higher_limits_are_lowered_to_the_servers(bounded):
    for route, body, field in (
        ("chat/completions", {"messages": QUESTION}, "max_tokens"),
        ("messages", {"messages": QUESTION}, "max_tokens"),
        ("completions", {"prompt": "hi"}, "max_tokens"),
        ("responses", {"input": "hi"}, "max_output_tokens"),
    ):
        body = {"model": "tiny", "ignore_eos": True, field: 21, **body}
        usage = httpx.post(f"{bounded.url}/v1/{route}", json=body, timeout=60).json()["usage"]
        assert usage.get("completion_tokens", usage.get("output_tokens")) == 20


def exchange(live: LiveServer, data: bytes, *, then: bytes = b"", pause: float = 0.0) -> bytes:
    """What comes back on a connection of its own until the server closes it."""
    host, port = urlsplit(live.url).netloc.split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(data)
        received = b""
        while True:
            if then:
                time.sleep(pause)
                try:
                    connection.sendall(then)
                except OSError:
                    return received
            try:
                part = connection.recv(65536)
            except ConnectionError:
                return received
            received += part
            if not part:
                return received


def parsed(response: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
    head, _, body = response.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return int(status.split()[1]), headers, json.loads(body)["error"]


@pytest.mark.parametrize("complete", [True, False])
def test_a_head_that_is_too_long_is_431(bounded, complete):
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 5000
    head += b"\r\nConnection: close\r\n\r\n" * complete
    status, headers, error = parsed(exchange(bounded, head))
    assert (status, error["code"]) == (431, "head_too_large")
    assert "4096 bytes" in error["message"]
    assert headers["connection"] == "close"


def chunked(*lines: bytes, path: str = "/v1/chat/completions") -> bytes:
    head = [
        b"POST " + path.encode() + b" HTTP/1.1",
        b"Host: x",
        b"Content-Type: application/json",
        b"Connection: close",
    ]
    return b"\r\n".join([*head, b"Transfer-Encoding: chunked", b"", *lines])


@pytest.mark.parametrize(
    "lines",
    [
        [b"0", *[b"a: b"] * 20_000],
        [b"1;" + b"a" * 50_000],
        [line for _ in range(10) for line in (b"1;" + b"a" * 1000, b"a")],
    ],
)
def test_too_many_trailers_or_extensions_are_431(bounded, lines):
    status, headers, error = parsed(exchange_slowly(bounded, chunked(b""), b"\r\n".join(lines)))
    assert (status, error["code"]) == (431, "trailers_too_large")
    assert headers["connection"] == "close"


def exchange_slowly(live: LiveServer, head: bytes, rest: bytes) -> bytes:
    """What comes back until the server closes the connection. The rest arrives after the head."""
    host, port = urlsplit(live.url).netloc.split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head)
        time.sleep(0.1)
        connection.sendall(rest)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_small_chunks_with_trailers_are_read(bounded):
    content = json.dumps({"messages": QUESTION, "max_tokens": 1, "user": "x" * 9000}).encode()
    lines = [line for byte in content for line in (b"1;a=b", bytes([byte]))]
    answer = exchange(bounded, chunked(*lines, b"0", b"Host: evil.example", b"X-Request-Id: trailer", b"", b""))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"x-request-id: req-" in answer


def test_answered_client_must_end_its_body(bounded):
    head = chunked(b"1", b"a", b"", path="/health").replace(b"Connection: close\r\n", b"")
    assert exchange(bounded, head, then=b"1\r\na\r\n", pause=0.05).startswith(b"HTTP/1.1 405 ")


def test_several_host_headers_are_rejected(bounded):
    head = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    status, _, error = parsed(exchange(bounded, head))
    assert (status, error["code"]) == (400, "invalid_http")
    assert "Host" in error["message"]


def test_invalid_http_is_400_in_the_usual_form(bounded):
    status, headers, error = parsed(exchange(bounded, b"\x16\x03\x01hello\r\n\r\n"))
    assert (status, error["code"]) == (400, "invalid_http")
    assert headers["content-type"] == "application/json"


def test_a_head_that_does_not_end_is_408(bounded):
    status, _, error = parsed(exchange(bounded, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"))
    assert (status, error["code"]) == (408, "head_timeout")


def test_a_head_that_drips_gains_no_time(bounded):
    before = time.monotonic()
    host, port = urlsplit(bounded.url).netloc.split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nX-Slow: ")
        connection.settimeout(0.05)
        while time.monotonic() < before + 30:
            try:
                connection.sendall(b"x")
                if connection.recv(100).startswith(b"HTTP/1.1 408 "):
                    return
            except TimeoutError:
                continue
    pytest.fail("it was never refused")


def test_a_connection_on_which_nothing_comes_is_closed(bounded):
    assert exchange(bounded, b"") == b""


def test_an_idle_connection_stays_open_between_requests(bounded):
    with httpx.Client() as client:
        first = client.get(f"{bounded.url}/health")
        time.sleep(0.5)  # longer than a head may take
        second = client.get(f"{bounded.url}/health")
        streams = [response.extensions["network_stream"] for response in (first, second)]
        assert streams[0].get_extra_info("client_addr") == streams[1].get_extra_info("client_addr")


POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n"


UPLOAD = POST.replace(b"chat/completions", b"files").replace(b"application/json", b"multipart/form-data; boundary=x")


@pytest.mark.parametrize("asked", [POST, UPLOAD], ids=["JSON", "upload"])
def test_a_body_that_stops_is_408(bounded, asked):
    status, headers, error = parsed(exchange(bounded, asked + b"Connection: close\r\n\r\n--x"))
    assert (status, error["code"]) == (408, "body_timeout")
    assert headers["x-request-id"]


@pytest.mark.parametrize("asked", [POST, UPLOAD], ids=["JSON", "upload"])
def test_a_body_that_drips_is_408(bounded, asked):
    response = exchange(bounded, asked + b"Connection: close\r\n\r\n--x", then=b" ", pause=0.05)
    wait_until(lambda: bounded.service.bodies.used == 0)
    assert response == b"" or parsed(response)[0] == 408


def test_a_full_queue_is_429_and_empties(folder):
    with LiveServer(folder, engine={"max_num_seqs": 1, "max_waiting": 1, "mock_tpot": 0.005}) as live:
        threads = [threading.Thread(target=lambda: live.ask(**LONG), daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: live.client.stats.num_waiting == 1)
        response = live.ask()
        refused(response, 429, "try again later", code="overloaded")
        assert int(response.headers["retry-after"]) >= 1
        for thread in threads:
            thread.join(60)
        assert live.ask().status_code == 200


def test_best_of_samples_count_as_answers(folder):
    with LiveServer(folder, engine={"max_num_seqs": 1, "max_waiting": 3}) as live:
        refused(live.ask(n=2, best_of=5, max_tokens=2), 429, "try again later", code="overloaded")
        answer = live.ask(n=2, best_of=3, max_tokens=2, ignore_eos=True).json()
        assert (len(answer["choices"]), answer["usage"]["completion_tokens"]) == (2, 6)


@pytest.fixture(scope="module")
def impatient(folder):
    """A server with one place, in which a request may wait for a quarter of a second."""
    with LiveServer(folder, engine={"max_num_seqs": 1, "mock_tpot": 0.01}, server={"max_wait": 0.25}) as live:
        yield live


def test_request_waiting_too_long_is_503_and_gone(impatient):
    longest = {"ignore_eos": True, "max_tokens": 480}
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(impatient.ask(**longest)), daemon=True)
    thread.start()
    wait_until(lambda: impatient.client.stats.num_running == 1)
    response = impatient.ask()
    refused(response, 503, "waited for 0.25 s", code="queue_timeout")
    assert int(response.headers["retry-after"]) >= 1
    with pytest.raises(openai.InternalServerError) as caught:
        impatient.openai.chat.completions.create(model="tiny", messages=QUESTION)
    assert caught.value.code == "queue_timeout"
    events = impatient.ask(stream=True, n=2).text
    assert json.loads(events.strip().rsplit("data: ", 1)[1])["error"]["code"] == "queue_timeout"
    refused(impatient.ask(use_beam_search=True, n=2), 503, "waited for 0.25 s", code="queue_timeout")
    wait_until(lambda: impatient.client.num_unfinished == 1 and impatient.client.stats.num_waiting == 0)
    thread.join(60)
    assert answers[0].status_code == 200, "it has run for longer than requests may wait"
    assert answers[0].json()["usage"]["completion_tokens"] == longest["max_tokens"]
    assert impatient.ask(max_tokens=2).status_code == 200


def test_prompt_preparation_waiting_too_long_is_503(impatient, monkeypatch):
    go_on = threading.Event()
    prepare = Conversation.prompt

    def hold(conversation):
        go_on.wait(60)
        return prepare(conversation)

    with monkeypatch.context() as patch:
        patch.setattr(Conversation, "prompt", hold)
        # Short texts are prepared at once.
        body = {"messages": [{"role": "user", "content": "no " * 2000}]}
        for stream in (False, True):
            refused(impatient.ask(**body, stream=stream), 503, "waited for 0.25 s", code="queue_timeout")
        go_on.set()
    wait_until(lambda: impatient.service.num_answers == impatient.service.bodies.used == 0)
    assert impatient.ask(max_tokens=2).status_code == 200


def test_running_request_has_no_first_token_limit(folder):
    with LiveServer(folder, engine={"mock_ttft": 0.6}, server={"max_wait": 0.1}) as live:
        assert live.ask(max_tokens=2).status_code == 200


@pytest.mark.parametrize("image_format", FORMATS)
def test_every_format_is_detected_inline_and_uploaded(bounded, image_format):
    data = image_file(image_format)
    path = bounded.allowed / f"an image.{image_format}"
    path.write_bytes(data)
    for url in (data_url(data), path.as_uri()):
        response = bounded.post(with_images(url))
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["prompt_tokens_details"]["images"] == 1


@pytest.mark.parametrize("image_format", ["PPM", "ICO", "TGA", "PCX", "EPS", "JPEG2000"])
def test_other_formats_are_refused_kindly(bounded, image_format):
    response = bounded.post(with_images(data_url(image_file(image_format))))
    refused(response, 400, "PNG, JPEG", param="messages[0].content[0].image_url.url", code="invalid_image")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_with(*chunks: bytes, size: int) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND", b"")


def resized(image_format: str, old: bytes, new: bytes) -> bytes:
    """A small image whose header says another size."""
    data = image_file(image_format)
    assert old in data
    return data.replace(old, new, 1)


def tiff(width: int, height: int) -> bytes:
    """Deflated zeros that claim to be so many pixels."""
    data = zlib.compress(bytes(100_000), 9)
    tags = {
        256: width,
        257: height,
        258: 8,
        259: 8,
        262: 1,
        273: 8 + 2 + 9 * 12 + 4,
        277: 1,
        278: height,
        279: len(data),
    }
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + data


@functools.cache
def bombs() -> dict[str, tuple[bytes, str]]:
    """Files and the codes of their errors."""
    zeros = zlib.compress(bytes(20_000_000), 9)
    return {
        "PNG": (png_with(chunk(b"IDAT", zeros), size=4400), "image_too_large"),
        "PNG's text": (png_with(chunk(b"zTXt", b"a\0\0" + zeros), chunk(b"IDAT", b""), size=8), "invalid_image"),
        "PNG's profile": (png_with(chunk(b"iCCP", b"a\0\0" + zeros), chunk(b"IDAT", b""), size=8), "invalid_image"),
        "GIF": (resized("GIF", struct.pack("<HH", 40, 30), struct.pack("<HH", 65535, 65535)), "image_too_large"),
        "BMP": (resized("BMP", struct.pack("<ii", 40, 30), struct.pack("<ii", 2**30, 2**30)), "image_too_large"),
        "JPEG": (resized("JPEG", struct.pack(">HH", 30, 40), struct.pack(">HH", 65500, 65500)), "image_too_large"),
        "WebP": (image_file("WEBP", 3000, 3000), "image_too_large"),
        "TIFF": (tiff(2**20, 2**20), "image_too_large"),
    }


@pytest.mark.parametrize("name", ["PNG", "PNG's text", "PNG's profile", "GIF", "BMP", "JPEG", "WebP", "TIFF"])
def test_small_exploding_files_are_rejected_undecoded(bounded, name):
    data, code = bombs()[name]
    assert len(data) < 40_000
    response = bounded.post(with_images(data_url(data)))
    refused(response, 400, "image", param="messages[0].content[0].image_url.url", code=code)


def test_http_without_headers_is_refused(bounded):
    status, _, error = parsed(exchange(bounded, b"GET /health\r\n\r\n"))
    assert (status, error["code"]) == (505, "http_version_not_supported")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_client_that_stops_sending_reads_its_answer(bounded, version):
    body = json.dumps({"messages": QUESTION, "max_tokens": 2}).encode()
    head = f"POST /v1/chat/completions HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    host, port = urlsplit(bounded.url).netloc.split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        connection.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    final = received.replace(b"HTTP/1.1 102 Processing\r\n\r\n", b"")
    assert (b"102 Processing" in received) <= (version == "1.1")
    head, _, answer = final.decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK")
    assert json.loads(answer)["choices"][0]["message"]["content"]


def test_bias_of_many_digits_is_rejected_readably(bounded):
    for key in ("0" * 5000, "9" * 5000):
        refused(bounded.ask(logit_bias={key: 1}), 400, "token ids", param="logit_bias")
