"""Whatever is wrong with a request, the client is told so in OpenAI's form, and the next request works."""

from __future__ import annotations

import base64
import io
import json
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from PIL import Image

from tests.mock_checkpoint import CONTEXT, make_mock_checkpoint
from tests.server.live import QUESTION, LiveServer, stream_lines
from tests.waiting import wait_until
from vlmserve.frontend.requests import Conversation


@pytest.fixture(autouse=True)
def a_good_request_still_works(live):
    yield
    answer = live.ask()
    assert answer.status_code == 200, answer.text
    assert live.client.alive


def refused(response: httpx.Response, status: int, message: str, *, param: str | None = None, code: str = "") -> None:
    """Check an error response: all of OpenAI's fields, no trace of the inside."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert error["param"] == param
    assert error["code"] == code or not code
    assert "Traceback" not in response.text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"hello", "not valid JSON"),
        (b'{"messages": [', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[1, 2]", "must be a JSON object"),
        (b'{"messages": [], "temperature": NaN}', "not valid JSON"),
        (b'{"messages": [], "temperature": Infinity}', "not valid JSON"),
        (b'{"messages": [], "temperature": 1e999}', "not valid JSON"),
    ],
)
def test_a_body_that_is_not_json(live, body, message):
    refused(live.post(content=body, headers={"content-type": "application/json"}), 400, message, code="invalid_request")


def test_a_form_instead_of_json(live):
    refused(live.post(data={"messages": "hi"}), 415, "application/json", code="unsupported_content_type")


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"messages": []}, "not be empty", "messages"),
        ({"messages": None}, "missing", "messages"),
        ({"messages": "hi"}, "list", "messages"),
        ({"messages": ["hi"]}, "object", "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "'user'", "messages[0].role"),
        ({"messages": [*QUESTION, {"content": "hi"}]}, "missing", "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "content is missing", "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "a string or a list", "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "'image_url'", "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video", "video": []}]}]},
            "empty",
            "messages[0].content[0].video",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video", "video": ["/etc/passwd"]}]}]},
            "must be a URL",
            "messages[0].content[0].video[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": "http://a", "fps": 0}]}]},
            "greater than 0",
            "messages[0].content[0].fps",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "a", "max_pixels": 0}]}]},
            "must be at least 1",
            "messages[0].content[0].max_pixels",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"uri": "x"}}]}]},
            "missing",
            "messages[0].content[0].image_url.url",
        ),
        (
            {"messages": [{"role": "user", "content": "hi", "tool_call": []}]},
            "did you mean tool_calls?",
            "messages[0].tool_call",
        ),
        ({"temperature": -1}, "between 0 and 100", "temperature"),
        ({"temperature": "hot"}, "number", "temperature"),
        ({"temperature": True}, "number", "temperature"),
        ({"top_p": 0}, "greater than 0", "top_p"),
        ({"top_p": 1.5}, "at most 1", "top_p"),
        ({"top_k": -5}, "-1", "top_k"),
        ({"min_p": -0.1}, "between 0 and 1", "min_p"),
        ({"max_tokens": 0}, "1", "max_tokens"),
        ({"max_tokens": -5}, "1", "max_tokens"),
        ({"max_tokens": 1.5}, "must be a whole number", "max_tokens"),
        ({"max_tokens": 10**30}, "must be at most", "max_tokens"),
        ({"max_completion_tokens": 0}, "1", "max_completion_tokens"),
        ({"min_tokens": 512}, "of the context of 512; lower min_tokens", "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "at most max_tokens", "min_tokens"),
        ({"n": 0}, "1", "n"),
        ({"n": 1000}, "16", "n"),
        ({"seed": -2}, "between", "seed"),
        ({"seed": 10**30}, "between", "seed"),
        ({"stop": [""]}, "non-empty", "stop"),
        ({"stop": ["a"] * 17}, "16", "stop"),
        ({"stop": [1]}, "string", "stop[0]"),
        ({"stop_token_ids": [10**30]}, "must be at most", "stop_token_ids[0]"),
        ({"stream": "yes"}, "must be true or false", "stream"),
        ({"stream_options": {"includeUsage": 1}}, "did you mean include_usage?", "stream_options.includeUsage"),
        ({"logprobs": 3}, "must be true or false", "logprobs"),
        ({"top_logprobs": 3}, "needs logprobs", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "at most 20", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "0", "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "missing", "tools[0].function"),
        ({"response_format": {"type": "xml"}}, "json_schema", "response_format"),
        ({"logit_bias": {"5": 101}}, "between -100 and 100", "logit_bias"),
        ({"logit_bias": {"5": "a lot"}}, "number", "logit_bias[5]"),
        ({"logit_bias": {"word": 1}}, "must have token ids as keys, not 'word'", "logit_bias"),
        ({"logit_bias": {"9" * 99: 1}}, "token ids", "logit_bias"),
        ({"logit_bias": {"100000": 1}}, "not in the vocabulary", "logit_bias"),
        ({"logit_bias": [5]}, "must be a JSON object", "logit_bias"),
        ({"logit_bias": {str(number): 1 for number in range(5000)}}, "at most 4096", "logit_bias"),
        ({"presence_penalty": 2.5}, "between -2 and 2", "presence_penalty"),
        ({"frequency_penalty": -3}, "between -2 and 2", "frequency_penalty"),
        ({"repetition_penalty": 0}, "between 0.01 and 100", "repetition_penalty"),
        ({"repeat_last_n": -2}, "-1", "repeat_last_n"),
        ({"no_repeat_ngram_size": 1}, "between 2 and 1024", "no_repeat_ngram_size"),
        ({"no_repeat_ngram_size": 9, "no_repeat_ngram_window": 5}, "or no_repeat_ngram_size", "no_repeat_ngram_window"),
        ({"cache_salt": ""}, "must not be empty", "cache_salt"),
        ({"cache_salt": "a" * 257}, "at most 256", "cache_salt"),
        ({"cache_salt": 5}, "string", "cache_salt"),
        ({"temprature": 1}, "did you mean temperature?", "temprature"),
        ({"max_new_tokens": 5}, "did you mean max_tokens?", "max_new_tokens"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "not supported", "audio"),
        ({"modalities": ["text", "audio"]}, "not supported", "modalities"),
        ({"structured_outputs": {"structural_tag": "x"}}, "not supported", "structured_outputs.structural_tag"),
    ],
)
def test_a_field_that_is_wrong_is_named(live, fields, message, param):
    refused(live.ask(**fields), 400, message, param=param, code="invalid_request")
    refused(live.ask(**fields, **{"stream": True} if "stream" not in fields else {}), 400, message, param=param)


def test_half_a_surrogate_pair_is_no_text(live):
    body = json.dumps({"messages": [{"role": "user", "content": "\ud800"}]}).encode()
    response = live.post(content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_model_that_is_not_served(live):
    refused(live.ask(model="gpt-5"), 404, "'gpt-5'", param="model", code="model_not_found")
    with pytest.raises(openai.NotFoundError):
        live.openai.chat.completions.create(model="gpt-5", messages=QUESTION)


def test_prompt_over_the_context_reports_both_lengths(live):
    too_long = [{"role": "user", "content": "no " * CONTEXT}]
    response = live.post({"messages": too_long})
    tokens = httpx.post(f"{live.url}/tokenize", json={"messages": too_long}).json()["count"]
    words = f"This model's maximum context length is {CONTEXT} tokens. However, your request has {tokens} input tokens"
    refused(response, 400, words, param="messages", code="context_length_exceeded")
    assert '"code": "context_length_exceeded"' in response.text
    anthropic = httpx.post(f"{live.url}/v1/messages", json={"model": "tiny", "messages": too_long, "max_tokens": 5})
    assert anthropic.status_code == 400
    assert anthropic.json()["error"]["message"] == f"prompt is too long: {tokens} tokens > {CONTEXT - 1} maximum"
    assert live.ask(stream=True, messages=[{"role": "user", "content": "no " * CONTEXT}]).status_code == 400


def png(width: int = 4, height: int = 4) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


def bomb() -> bytes:
    """A small file that claims to be 30,000 x 30,000 pixels."""
    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(100_000))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def with_images(*urls: str) -> dict:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]}


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("url", "code"),
    [
        (data_url(b""), "invalid_image"),
        (data_url(b"I am a text file"), "invalid_image"),
        (data_url(png()[:40]), "invalid_image"),
        (data_url(png(64, 64)[:-30]), "invalid_image"),
        (data_url(bomb()), "image_too_large"),
        ("data:image/png;base64,????", "invalid_image"),
        ("data:image/png", "invalid_image"),
        ("/etc/passwd", None),
        ("file:///etc/passwd", None),
        ("http://127.0.0.1:1/image.png", "image_fetch_failed"),
        ("http://169.254.169.254/latest/meta-data", "image_fetch_failed"),
    ],
)
def test_an_image_that_cannot_be_had(live, url, code):
    response = live.post(with_images(url))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].startswith("messages[0].content[0]")
    assert code is None or error["code"] == code


def test_too_many_images(live):
    refused(live.post(with_images(*[data_url(png())] * 3)), 400, "at most 2", param="messages", code="too_many_images")


def test_an_image_for_a_model_that_cannot_see(tmp_path):
    with LiveServer(make_mock_checkpoint(tmp_path, supports_images=False)) as blind:
        refused(blind.post(with_images(data_url(png()))), 400, "takes no", param="messages", code="too_many_images")
        assert blind.ask().status_code == 200


def test_body_over_the_limit_is_rejected_either_way(live):
    refused(live.ask(user="x" * 200_000), 413, "200000 bytes", code="body_too_large")

    def chunks() -> Iterator[bytes]:
        yield from [b" " * 10_000] * 25

    response = live.post(content=chunks(), headers={"content-type": "application/json"})
    refused(response, 413, "200000 bytes", code="body_too_large")


def test_announced_oversized_body_is_rejected_before_sending(live):
    host, port = urlsplit(live.url).netloc.split(":")
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        "Content-Length: 99000000000\r\nExpect: 100-continue\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_too_many_bodies_wait_for_others(folder):
    def chunks() -> Iterator[bytes]:
        yield b" " * 60_000
        assert enough.wait(60)
        yield json.dumps({"messages": QUESTION, "max_tokens": 1}).encode()

    enough = threading.Event()
    slow: list[httpx.Response] = []

    with LiveServer(folder, server={"body_memory": 100_000}) as live:

        def post_slowly() -> None:
            slow.append(live.post(content=chunks(), headers={"content-type": "application/json"}))

        thread = threading.Thread(target=post_slowly, daemon=True)
        thread.start()
        wait_until(lambda: live.service.bodies.used == 60_000)
        large = {"messages": [{"role": "user", "content": "hi"}], "user": "x" * 50_000, "max_tokens": 1}
        response = live.post(large)
        refused(response, 503, "try again later", code="overloaded")
        assert response.headers["retry-after"].isdecimal()
        assert live.service.bodies.used == 60_000
        assert live.ask(max_tokens=1).status_code == 200, "a small one fits"
        enough.set()
        thread.join(60)
        assert slow[0].status_code == 200
        assert live.post(large).status_code == 200
        refused(live.ask(user="x" * 100_000), 413, "100000 bytes", code="body_too_large")
        assert live.service.bodies.used == 0


def test_body_memory_is_free_while_the_answer_comes(slow):
    with stream_lines(slow.url, {"messages": QUESTION, "ignore_eos": True, "max_tokens": 400}) as lines:
        next(lines)
        assert slow.service.bodies.used == 0


def test_client_leaving_mid_body_frees_its_memory(live):
    host, port = urlsplit(live.url).netloc.split(":")
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"{head}Content-Length: 5000\r\n\r\n{' ' * 1000}".encode())
        wait_until(lambda: live.service.bodies.used == 1000)
    wait_until(lambda: live.service.bodies.used == 0)


def test_routes_and_methods_that_do_not_exist(live):
    refused(httpx.get(f"{live.url}/v1/nothing"), 404, "/v1/nothing", code="not_found")
    refused(httpx.get(f"{live.url}/v1/chat/completions"), 405, "GET", code="method_not_allowed")
    assert httpx.get(f"{live.url}/v1/chat/completions").headers["allow"] == "POST"
    refused(httpx.get(f"{live.url}/v1/models/gpt-5"), 404, "gpt-5", param="model", code="model_not_found")


def test_bug_gives_500_with_a_logged_traceback(live, monkeypatch, caplog):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("secret detail")

    with monkeypatch.context() as patch:
        patch.setattr(Conversation, "prompt", broken)
        response = live.ask()
    refused(response, 500, "log", code="internal_error")
    assert "secret" not in response.text
    assert "secret detail" in caplog.text


def test_full_queue_is_429_with_a_retry_time(folder):
    engine = {"max_num_seqs": 1, "max_waiting": 1, "mock_tpot": 0.05}
    with LiveServer(folder, engine=engine) as live:
        long = {"ignore_eos": True, "max_tokens": 400}
        threads = [threading.Thread(target=lambda: live.ask(**long), daemon=True) for _ in range(2)]
        threads[0].start()
        wait_until(lambda: live.service.client.stats.num_running == 1)
        threads[1].start()
        wait_until(lambda: live.service.num_answers == 2)
        response = live.ask()
        refused(response, 429, "try again later", code="overloaded")
        assert response.headers["retry-after"].isdecimal()
        with pytest.raises(openai.RateLimitError):
            live.openai.chat.completions.create(model="tiny", messages=QUESTION)


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("chat/completions", {"messages": QUESTION}, "max_tokens"),
        ("chat/completions", {"messages": QUESTION}, "max_completion_tokens"),
        ("completions", {"prompt": "Hello"}, "max_tokens"),
        ("messages", {"messages": QUESTION}, "max_tokens"),
        ("responses", {"input": "Hello"}, "max_output_tokens"),
    ],
)
def test_max_tokens_beyond_the_context_is_cut(live, route, body, field):
    body = {"model": "tiny", "ignore_eos": True, field: 32_000, **body}
    answer = httpx.post(f"{live.url}/v1/{route}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    names = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "cache_read_input_tokens")
    assert sum(usage.get(name, 0) for name in names) == CONTEXT
