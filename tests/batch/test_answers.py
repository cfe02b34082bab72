"""Batches that a server or the engine in this process answers."""

from __future__ import annotations

import base64
import codecs
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from vlmserve.batch.answers import Chat, ServerAnswers
from vlmserve.batch.journal import Result
from vlmserve.cli import app
from vlmserve.errors import VLMServeError
from vlmserve.server.schema.batches import BatchLine, read_line
from vlmserve.types import Grammar, SamplingParams

SHAPES = Path(__file__).parents[2] / "examples" / "shapes.png"


@contextmanager
def served(answer: Any) -> Iterator[str]:
    """A server; answer: from a body to a status, headers and a body."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, {}, {"data": [{"id": "m"}]})

        def do_POST(self) -> None:
            self._send(*answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def _send(self, status: int, headers: dict[str, str], body: Any) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def said(text: str) -> tuple[int, dict[str, str], Any]:
    choice = {"message": {"content": text}, "finish_reason": "stop"}
    return 200, {}, {"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}


def asks(text: str, params: SamplingParams | None = None) -> Chat:
    content = [{"type": "text", "text": text}]
    return Chat([{"role": "user", "content": content}], params or SamplingParams())


def line(id_: str, url: str = "/v1/chat/completions", **body: Any) -> BatchLine:
    return read_line(json.dumps({"custom_id": id_, "method": "POST", "url": url, "body": body}).encode())


def test_overloaded_server_is_retried_wrong_row_is_not() -> None:
    bodies: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        bodies.append(body)
        text = body["messages"][-1]["content"][0]["text"]
        if text == "wrong":
            return 400, {}, {"error": {"message": "no such thing", "param": None}}
        if text == "busy" and sum(body["messages"][-1]["content"][0]["text"] == "busy" for body in bodies) == 1:
            return 429, {"Retry-After": "0.01"}, {"error": {"message": "busy"}}
        return said(text.upper())

    schema = {"type": "object"}
    params = SamplingParams(temperature=0.5, seed=4, max_tokens=9, grammar=Grammar.json(schema))
    with served(answer) as url:
        answers = ServerAnswers(url, None, 2)
        results = dict(answers.answer([asks(text, params) for text in ("a", "busy", "wrong", "b")]))
    assert results == {
        0: Result("A", "stop", "", 5, 1),
        1: Result("BUSY", "stop", "", 5, 1),
        2: Result(error="no such thing"),
        3: Result("B", "stop", "", 5, 1),
    }
    assert len(bodies) == 5
    fields = {name: bodies[0][name] for name in ("model", "temperature", "seed", "max_tokens")}
    assert fields == {"model": "m", "temperature": 0.5, "seed": 4, "max_tokens": 9}
    assert bodies[0]["response_format"]["json_schema"]["schema"] == schema


def test_a_key_that_is_refused_ends_the_batch() -> None:
    with served(lambda _: (401, {}, {"error": {"message": "wrong key"}})) as url:
        answers = ServerAnswers(f"{url}/v1/", "other", 2)
        assert answers.name == "other"
        with pytest.raises(VLMServeError, match="wrong key"):
            list(answers.answer([asks("a")]))
    with pytest.raises(VLMServeError, match="no server at"):
        ServerAnswers(url, None, 1)


def test_requests_are_sent_as_they_are() -> None:
    sent: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        sent.append(body)
        if "input" in body:
            content = [{"type": "output_text", "text": "four"}]
            output = [{"type": "message", "content": content}]
            usage = {"input_tokens": 2, "output_tokens": 1}
            return 200, {}, {"object": "response", "status": "completed", "output": output, "usage": usage}
        if "prompt" in body:
            return 200, {}, {"choices": [{"text": "three", "finish_reason": "length"}]}
        return said("two")

    requests = [
        line("a", model="gpt", messages=[], top_k=3),
        line("b", "/v1/completions", prompt="one, two,"),
        line("c", "/v1/responses", input="?"),
        line("d", messages=[], n=2),
    ]
    with served(answer) as url:
        results = dict(ServerAnswers(url, None, 1).answer(requests))
        ServerAnswers(url, "mine", 1).ask(requests[0])
    assert results[0] == Result("two", "stop", "", 5, 1)
    assert results[1] == Result("three", "length")
    assert results[2] == Result("four", "stop", "", 2, 1)
    assert results[3].error.startswith("n is not supported here")
    assert sent[0] == {"model": "gpt", "messages": [], "top_k": 3}
    assert sent[1]["model"] == "m"
    assert sent[3]["model"] == "mine"


CHOICE = {"message": {"content": "x"}, "finish_reason": "stop"}


@pytest.mark.parametrize(
    "body",
    [
        b"<html>Sign in</html>",
        b"",
        b"\xff",
        b"[" * 100_000,
        [],
        {},
        {"choices": []},
        {"choices": [7]},
        {"choices": [{"message": {"content": [1]}}]},
        {"choices": [CHOICE], "usage": {"prompt_tokens": "many"}},
    ],
    ids=lambda body: str(body)[:20],
)
@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/responses"])
def test_mismatched_answer_kind_fails_its_row(url: str, body: Any) -> None:
    def answer(sent: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        return (200, {"Content-Type": "text/html"}, body) if sent.get("seed") == 1 else said("fine")

    with served(answer) as server:
        results = dict(ServerAnswers(server, None, 2).answer([line("a", url, seed=1), line("b")]))
    assert results[1] == Result("fine", "stop", "", 5, 1)
    assert results[0].error.startswith(f"{server}{url} answered 200 with text/html, not an answer of this API")


def test_rows_of_a_foreign_server_fail_in_words(tmp_path: Path) -> None:
    source, output = tmp_path / "requests.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}) + "\n"
    )
    with served(lambda _: (200, {"Content-Type": "text/html"}, b"<html>")) as url:
        result = CliRunner().invoke(app, ["batch", str(source), "--url", url, "--output", str(output)])
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    [row] = map(json.loads, output.read_text().splitlines())
    assert row["id"] == "a"
    assert "answered 200 with text/html" in row["error"]


def test_requests_are_answered_by_the_local_engine(tmp_path: Path) -> None:
    encoded = base64.b64encode(SHAPES.read_bytes()).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}

    def ask(id_: str, text: str, **fields: Any) -> dict[str, Any]:
        content = [image, {"type": "text", "text": text}]
        body = {"model": "gpt-4o", "messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
        return {"custom_id": id_, "method": "POST", "url": "/v1/chat/completions", "body": body}

    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    json_schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    requests = [
        ask("circle", "What colour is the circle?"),
        ask("object", "What colour is the circle?", response_format=json_schema, max_tokens=32),
        ask("thinking", "How many shapes are there?", chat_template_kwargs={"enable_thinking": False}),
        ask("wrong", "?", temperature=-1),
        ask("calls", "?", tools=[{"type": "function", "function": {"name": "f"}}]),
        {**ask("text", "?"), "url": "/v1/completions"},
    ]
    source = tmp_path / "requests.jsonl"
    source.write_text("".join(json.dumps(request) + "\n" for request in requests))
    arguments = ["batch", str(source), "--kv-cache-memory", "64MiB", "--output", str(tmp_path / "out.jsonl")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output
    answers = {row["id"]: row for row in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert list(answers) == [request["custom_id"] for request in requests]
    assert answers["circle"] == {"id": "circle", "answer": "red", "finish_reason": "stop"}
    assert answers["object"]["answer"]["colour"] in ("red", "blue")
    assert answers["thinking"]["answer"] == "3"
    assert "temperature" in answers["wrong"]["error"]
    assert "tools" in answers["calls"]["error"]
    assert "--url" in answers["text"]["error"]
    result = CliRunner().invoke(app, [*arguments, "--prompt", "?"])
    assert result.exit_code != 0
    assert "leave out --prompt" in result.output


def test_schema_file_shapes_all_answers(tmp_path: Path) -> None:
    rows, schema, output = tmp_path / "rows.jsonl", tmp_path / "schema.json", tmp_path / "out.jsonl"
    rows.write_text('{"number": 1}\n{"number": 2}\n')
    properties = {"colour": {"enum": ["red", "blue"]}}
    wanted = {"type": "object", "properties": properties, "required": ["colour"], "additionalProperties": False}
    schema.write_bytes(codecs.BOM_UTF8 + json.dumps(wanted).encode())
    arguments = ["batch", str(rows), "--prompt", "Colour {number}?", "--schema", str(schema), "--output", str(output)]
    result = CliRunner().invoke(app, [*arguments, "--kv-cache-memory", "64MiB"])
    assert result.exit_code == 0, result.output
    answers = [json.loads(line)["answer"] for line in output.read_text().splitlines()]
    assert [answer["colour"] in ("red", "blue") for answer in answers] == [True, True]


@pytest.mark.parametrize("content", [b"{'type': 'object'}", b"[1]", b"\xff\xfe{"])
def test_unreadable_schema_is_named(tmp_path: Path, content: bytes) -> None:
    rows, schema = tmp_path / "rows.jsonl", tmp_path / "schema.json"
    rows.write_text('{"number": 1}\n')
    schema.write_bytes(content)
    arguments = ["batch", str(rows), "--prompt", "?", "--schema", str(schema), "--output", str(tmp_path / "out.jsonl")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert f"--schema {schema}" in result.stderr
    assert "must hold a JSON schema" in result.stderr


def test_folder_is_captioned_by_the_local_engine(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    image = Image.open(SHAPES)
    image.save(folder / "a.png")
    image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(folder / "b.png")
    (folder / "c.png").write_text("no image")
    arguments = ["batch", str(folder), "--prompt", "What colour is the circle?", "--kv-cache-memory", "64MiB"]
    result = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "out.csv")])
    assert result.exit_code == 1, result.output
    heading, first, second, third = (tmp_path / "out.csv").read_text().splitlines()
    assert heading == "id,image,answer,finish_reason,error"
    assert first == f"a.png,{folder}/a.png,red,stop,"
    assert second == f"b.png,{folder}/b.png,red,stop,"
    assert third.startswith(f"c.png,{folder}/c.png,,,")
    assert "not an image" in third
