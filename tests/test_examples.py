"""The recipes in examples/ do what they say, word for word as somebody would call them."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from PIL import Image, ImageDraw

from tests.server.live import LiveServer
from vlmserve.models.hub import resolve_model
from vlmserve.settings.config import BUILT_IN_MODEL

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SHAPES = str(EXAMPLES / "shapes.png")
MODEL = "tiny"
"""As what the server in these tests offers pixie."""

Run = Callable[..., str]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = {
        "engine": "real", "kv_cache_memory": "64MiB", "num_threads": 1,
        "enable_lora": True, "lora_modules": ("corners=pixie/corners",),
    }  # fmt: skip
    with LiveServer(resolve_model(BUILT_IN_MODEL), engine=engine) as server:
        yield f"{server.url}/v1"


@pytest.fixture
def run(url: str, capsys: pytest.CaptureFixture[str]) -> Run:
    """Calls a recipe with arguments; returns what it prints."""

    def call(name: str, *arguments: str, model: bool = True) -> str:
        main = runpy.run_path(str(EXAMPLES / name))["main"]
        main([*arguments, "--url", url, *(["--model", MODEL] if model else [])])
        return capsys.readouterr().out

    return call


def test_captions_of_a_folder(run: Run, tmp_path: Path) -> None:
    for number in range(3):
        image = Image.new("RGB", (96, 96), (225, 228, 232))
        ImageDraw.Draw(image).ellipse((20, 20, 70, 70), fill=("red", "blue", "green")[number])
        image.save(tmp_path / f"{number}.png")
    (tmp_path / "notes.txt").write_text("no image", "utf-8")
    run("captions.py", str(tmp_path), "--output", str(tmp_path / "captions.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "captions.jsonl").read_text("utf-8").splitlines()]
    assert [row["file"] for row in rows] == ["0.png", "1.png", "2.png"]
    assert all(colour in row["caption"] for colour, row in zip(("red", "blue", "green"), rows, strict=True))


def test_fields_with_their_probabilities(run: Run) -> None:
    lines = run("fields.py", SHAPES, "--check-below", "1.1").splitlines()
    assert [line.partition(":")[0] for line in lines] == ["count", "circle", "square"]
    assert all(re.fullmatch(r"\w+: \w+ \(\d+%\)  <- check this", line) for line in lines)


def test_moments_of_a_video(run: Run, tmp_path: Path) -> None:
    frames = []
    for colour in ("blue", "red", "blue"):
        frame = Image.new("RGB", (96, 96), (225, 228, 232))
        ImageDraw.Draw(frame).ellipse((20, 20, 70, 70), fill=colour)
        frames.append(frame)
    frames[0].save(tmp_path / "video.gif", save_all=True, append_images=frames[1:], duration=1000)
    found = run("find_in_video.py", str(tmp_path / "video.gif"), "What colour is the circle?", "red")
    assert found == "1.0 s: red\n"


def test_pages_of_a_document(run: Run) -> None:
    lines = run("pages.py", str(EXAMPLES / "shapes.pdf"), "What shape is there?").splitlines()
    assert "triangle" in lines[1]
    assert lines[-1].startswith("(")
    assert [line.partition(":")[0] for line in lines[:-1]] == [f"page {page + 1}" for page in range(len(lines) - 1)]


def test_an_agent_calls_its_tool_and_goes_on(run: Run) -> None:
    lines = run("agent.py", SHAPES, "How large is the circle?", "--steps", "2").splitlines()
    called = re.fullmatch(r"share_of_colour\((\{.*\})\) -> ([\d.]+) %", lines[0])
    assert called is not None
    colour = json.loads(called[1])["colour"]
    assert (0 < float(called[2]) < 50) == (colour != "green")
    assert len(lines) > 1


def test_an_adapter_for_each_customer(run: Run) -> None:
    lines = run("adapters.py", SHAPES, "How many corners does the triangle have?", model=False).splitlines()
    answers = dict(line.split(": ", 1) for line in lines)
    assert answers.keys() == {MODEL, "corners"}
    assert answers["corners"] == "3"


def test_a_shared_image_is_cached(run: Run) -> None:
    lines = run("shared_image.py", SHAPES, "What colour is the circle?", "How many shapes are there?").splitlines()
    assert lines[0].startswith("red (")
    assert int(re.search(r"\((\d+) of", lines[1])[1]) > 32


class CountWords(BaseHTTPRequestHandler):
    """A server of embeddings: how often a text has each of some words."""

    WORDS = ("red", "blue", "green", "circle", "square", "triangle", "star")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        vectors = [[float(text.count(word)) for word in self.WORDS] for text in asked["input"]]
        data = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(vectors)]
        body = json.dumps({"object": "list", "model": asked["model"], "data": data}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def test_photos_of_the_same_product(run: Run, tmp_path: Path) -> None:
    for name, colour, left in (("a", "red", 20), ("b", "blue", 30), ("c", "red", 34), ("d", "green", 20)):
        image = Image.new("RGB", (96, 96), (225, 228, 232))
        ImageDraw.Draw(image).ellipse((left, 20, left + 44, 64), fill=colour)
        image.save(tmp_path / f"{name}.png")
    assert re.fullmatch(r"a\.png, c\.png: .*red circle.*\n", run("duplicates.py", str(tmp_path)))
    with HTTPServer(("127.0.0.1", 0), CountWords) as embeddings:
        thread = Thread(target=embeddings.serve_forever)
        thread.start()
        try:
            found = run(
                "duplicates.py", str(tmp_path), "--embeddings-url", f"http://127.0.0.1:{embeddings.server_port}/v1"
            )
        finally:
            embeddings.shutdown()
            thread.join()
    assert re.fullmatch(r"a\.png, c\.png: .*red circle.*\n", found)


def test_a_load_test_that_fails(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        run("slo.py", "--requests", "4", "--slo", "ttft=0.001ms", "--share", "0.1")
    assert capsys.readouterr().out == "0% of 4 requests met ttft=0.001ms\n"


def test_the_notebook(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text("utf-8"))
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert "What colour is the circle? -> red" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "package", "arguments"),
    [
        ("langchain_chat.py", "langchain_openai", ("What colour is the circle?",)),
        ("litellm_chat.py", "litellm", ("What colour is the circle?",)),
        ("instructor_fields.py", "instructor", ()),
        ("pydantic_ai_agent.py", "pydantic_ai", ()),
    ],
)
def test_clients_of_other_projects(run: Run, name: str, package: str, arguments: tuple[str, ...]) -> None:
    pytest.importorskip(package)
    assert run(name, SHAPES, *arguments).strip() in {"red", "green", "blue", "yellow"}


def test_every_recipe_is_named() -> None:
    text = (EXAMPLES / "README.md").read_text("utf-8")
    recipes = [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")]
    assert len(recipes) >= 10
    assert [path.name for path in recipes if f"[`{path.name}`]({path.name})" not in text] == []
