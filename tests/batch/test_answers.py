"""Batches that a server or the engine in this process answers."""

from __future__ import annotations

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

from vlmserve.batch.answers import ServerAnswers
from vlmserve.batch.journal import Result
from vlmserve.cli import app
from vlmserve.errors import VLMServeError
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
            data = json.dumps(body).encode()
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


def asks(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


def test_an_overloaded_server_is_asked_again_and_a_wrong_row_is_not() -> None:
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
        results = dict(answers.answer([asks("a"), asks("busy"), asks("wrong"), asks("b")], params))
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
            list(answers.answer([asks("a")], SamplingParams()))
    with pytest.raises(VLMServeError, match="no server at"):
        ServerAnswers(url, None, 1)


def test_a_folder_is_captioned_by_the_engine_in_this_process(tmp_path: Path) -> None:
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
