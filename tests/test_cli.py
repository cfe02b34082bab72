"""The commands as a person types them."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import typer
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

import vlmserve
from tests.blip import make_blip
from tests.checkpoints import change_config
from tests.mock_checkpoint import make_mock_checkpoint
from vlmserve import LLM, SamplingParams
from vlmserve.cli import app
from vlmserve.cli.answers import ServerAnswers, deltas
from vlmserve.cli.chat import TerminalChat
from vlmserve.cli.options import command
from vlmserve.errors import VLMServeError
from vlmserve.settings.config import EngineConfig, MediaConfig, ProcessorOverrides, ServerConfig

GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_mock_checkpoint(tmp_path_factory.mktemp("mock"))


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("my images") / "red.png"
    Image.new("RGB", (40, 30), "red").save(path)
    return path


def run(*arguments: object, stdin: str | None = None):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, [str(one) for one in arguments], input=stdin)


def answer(folder: Path, *parts: object) -> str:
    """What the mock engine answers to a message of these parts."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    [result] = LLM(str(folder), engine="mock").chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
    return result.outputs[0].text


# Flags from settings


def settings_of(*arguments: str) -> dict[str, object]:
    """What a command that takes all settings receives."""
    received: dict[str, object] = {}
    probe = typer.Typer()

    @probe.command()
    @command()
    def serve(engine: EngineConfig, media: MediaConfig, server: ServerConfig, model: str = "pixie") -> None:
        received.update(engine=engine, media=media, server=server, model=model)

    result = CliRunner(env={"VLMSERVE_KERNELS": None}).invoke(probe, list(arguments), catch_exceptions=False)
    return received if result.exit_code == 0 else {"exit_code": result.exit_code, "stderr": result.stderr}


def test_no_flags_are_the_default_settings():
    assert settings_of() == {
        "engine": EngineConfig(),
        "media": MediaConfig(),
        "server": ServerConfig(),
        "model": "pixie",
    }


def test_flags_become_settings():
    flags = (
        "--max-model-len 128 --dtype bfloat16 --kv-cache-memory 2GiB --memory-fraction 0.5 --max-image-bytes 1MiB "
        '--mm-processor-kwargs {"max_pixels":900} '
        "--allowed-media-hosts a --allowed-media-hosts b --port 0 --served-model-name eyes --seed 7"
    )
    received = settings_of(*flags.split())
    assert received["engine"] == EngineConfig(
        max_model_len=128, dtype="bfloat16", kv_cache_memory=2 * 1024**3, memory_fraction=0.5, seed=7
    )
    assert received["media"] == MediaConfig(
        max_image_bytes=1024**2,
        allowed_media_hosts=("a", "b"),
        mm_processor_kwargs=ProcessorOverrides(max_pixels=900),
    )
    assert received["server"] == ServerConfig(port=0, served_model_name="eyes")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "70000"], ["--port", "70000", "65535"]),
        (["--kv-cache-memory", "lots"], ["--kv-cache-memory", "lots", "4GiB"]),
        (["--device", "gpu", "--block-size", "0"], ["--device", "gpu", "--block-size", "0"]),
        (["--fetch-timeout", "0"], ["--fetch-timeout", "greater than 0"]),
        (["--mm-processor-kwargs", "{"], ["--mm-processor-kwargs", "not JSON"]),
        (["--mm-processor-kwargs", '{"pixels": 9}'], ["--mm-processor-kwargs", "no key pixels", "max_pixels"]),
    ],
)
def test_wrong_values_name_their_flags(arguments, words):
    received = settings_of(*arguments)
    assert received["exit_code"] == 2
    assert received["stderr"].count("\n") == 1
    assert all(word in received["stderr"] for word in words)


def test_every_setting_has_a_described_flag():
    shown = re.sub(r"\s+", " ", run("serve", "--help-all").stdout)
    for settings in (EngineConfig, MediaConfig, ServerConfig):
        for name, field in settings.model_fields.items():
            assert f"--{name.replace('_', '-')} " in shown or name == "model"
            assert " ".join(field.description.split()) in shown


# Errors


def test_debug_shows_the_traceback_and_nothing_else_does():
    plain = run("ask", "--model", "./no/such/folder", "hi")
    assert (plain.exit_code, plain.stderr) == (1, "Error: there is no folder or file ./no/such/folder\n")
    debug = run("ask", "--model", "./no/such/folder", "hi", "--debug")
    assert type(debug.exception).__name__ == "CheckpointNotFoundError"


def test_a_checkpoint_without_weights_cannot_be_served(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    result = run("serve", tmp_path, "--port", "0")
    assert result.exit_code == 1
    assert "no weights" in result.stderr


# ask


def test_ask_prints_the_answer(folder, image):
    result = run("ask", "--engine", "mock", "--model", folder, image, "What is this?")
    assert (result.exit_code, result.stdout) == (0, answer(folder, image, "What is this?") + "\n")


def test_ask_takes_no_images_or_several(folder, image):
    for images in ([], [image, image]):
        result = run("ask", "--engine", "mock", "--model", folder, *images, "Well?")
        assert (result.exit_code, result.stdout) == (0, answer(folder, *images, "Well?") + "\n")


def test_ask_wants_a_question_after_the_image(image):
    result = run("ask", image)
    assert result.exit_code == 2
    assert "question" in result.stderr


def test_ask_lets_a_captioning_model_describe_an_image(tmp_path, image):
    folder = make_blip(tmp_path)

    def caption(*words: object) -> str:
        result = run("ask", "--model", folder, "--max-tokens", "6", image, *words)
        assert result.exit_code == 0, result.output
        return result.stdout

    llm = LLM(str(folder))
    asked = {"prompt": "", "multi_modal_data": {"image": image}}
    [described] = llm.generate(asked, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    assert caption() == caption("") == described.outputs[0].text + "\n"
    assert described.num_images_encoded == 1
    assert caption("the brown fox") != caption()
    change_config(folder, architectures=["BlipForQuestionAnswering"])
    result = run("ask", "--model", folder, image)
    assert (result.exit_code, "question" in result.stderr) == (2, True)


def test_ask_names_an_image_that_is_broken(folder, image, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    result = run("ask", "--engine", "mock", "--model", folder, image, broken, "What is this?")
    assert result.exit_code == 1
    assert str(broken) in result.stderr
    assert str(image) not in result.stderr


def test_ask_names_an_image_that_is_not_there():
    result = run("ask", "nowhere.png", "What is this?")
    assert (result.exit_code, "nowhere.png" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    "words", [("ask", "Hi"), ("chat",), ("run", "pixie", "Hi"), ("batch", "{image}", "--prompt", "Hi", "-o", "a.csv")]
)
def test_answering_commands_take_a_draft_model(words, image, tmp_path):
    result = run(*(word.format(image=image) for word in words), "--draft-model", tmp_path / "small")
    assert f"there is no folder or file {tmp_path / 'small'}" in result.stderr


def test_ask_stops_after_max_tokens(folder):
    whole = answer(folder, "Well?")
    result = run("ask", "--engine", "mock", "--model", folder, "--max-tokens", "2", "Well?")
    assert len(result.stdout.strip()) < len(whole)
    assert whole.strip().startswith(result.stdout.strip())


# chat


def chat(folder: Path, *lines: object) -> str:
    text = "".join(f"{line}\n" for line in lines)
    result = run("chat", "--engine", "mock", "--model", folder, stdin=text)
    assert result.exit_code == 0
    return result.stdout


def test_chat_answers_and_remembers(folder):
    shown = chat(folder, "Hello?", "And now?", "/quit")
    first = answer(folder, "Hello?")
    llm = LLM(str(folder), engine="mock")
    messages = [
        {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And now?"},
    ]
    second = llm.chat(messages, GREEDY, use_tqdm=False)[0].outputs[0].text
    assert first in shown
    assert second in shown.partition(first)[2]


def test_chat_forgets_after_clear(folder):
    shown = chat(folder, "Something else", "/clear", "Hello?")
    assert answer(folder, "Hello?") in shown.partition("new conversation")[2]


@pytest.mark.parametrize("write", [str, lambda path: f"'{path}'", lambda path: str(path).replace(" ", "\\ ")])
def test_chat_shows_an_image_with_the_next_message(folder, image, write):
    assert answer(folder, image, "What is this?") in chat(folder, f"/image {write(image)}", "What is this?")


def test_chat_goes_on_after_mistakes(folder, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    shown = chat(folder, "/jump", "/image", "/image nowhere.png", f"/image {tmp_path / 'text.png'}", "What?", "Hello?")
    for mistake in ("no command /jump", "Write a path or a URL", "nowhere.png"):
        assert mistake in shown
    assert answer(folder, "Hello?") in shown


@pytest.mark.parametrize("command", ["/quit", "/exit", "/bye"])
def test_chat_ends_with_a_command(folder, command):
    shown = chat(folder, command, "Hello?")
    assert "no command" not in shown
    assert answer(folder, "Hello?") not in shown


def test_chat_ends_with_its_input(folder):
    assert "/help" in chat(folder)


class InterruptedAnswers:
    """Says one word, then Ctrl-C is pressed; remembers what it was asked."""

    def __init__(self) -> None:
        self.conversations: list[list[dict[str, object]]] = []

    def stream(self, messages, params, *, on_thought=None):
        self.conversations.append(messages)
        yield "half"
        raise KeyboardInterrupt


def test_chat_keeps_answers_that_ctrl_c_stopped():
    lines = iter(["first", "second", "/quit"])
    answers = InterruptedAnswers()
    shown = io.StringIO()
    TerminalChat(answers, GREEDY, Console(file=shown), lambda prompt: next(lines)).run()
    assert shown.getvalue().count("(stopped)") == 2
    assert [message["role"] for message in answers.conversations[1]] == ["user", "assistant", "user"]
    assert answers.conversations[1][1]["content"] == "half"


# A running server


class FakeServer(BaseHTTPRequestHandler):
    """Answers the number of images it got, in pieces; thinks about the question "hard", refuses "bad"."""

    bodies: list[dict[str, object]]
    paths: list[str]
    key: str | None = None

    def do_GET(self) -> None:
        self.paths.append(self.path)
        if self.key is not None and self.headers["authorization"] != f"Bearer {self.key}":
            self._send(401, json.dumps({"error": {"message": "wrong key"}}))
            return
        self._send(200, json.dumps({"data": [{"id": "far-away"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append(body)
        self.paths.append(self.path)
        content = body["messages"][-1]["content"]
        if content[-1]["text"] == "bad":
            error = {"message": "that was bad", "param": "messages[0].content[1].image_url.url"}
            self._send(400, json.dumps({"error": error}))
            return
        pieces = [str(len(content) - 1), " ima", "ges"]
        events = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
        if content[-1]["text"] == "too hard":
            events = [{"choices": [{"delta": {"reasoning_content": "Hm."}}]}]
        if content[-1]["text"] == "hard":
            events = [{"choices": [{"delta": {"reasoning_content": thought}}]} for thought in ("Hm", "m.")] + events
        events = [{"choices": [{"delta": {"role": "assistant"}}]}, *events, {"choices": [], "usage": {}}]
        events.insert(1, {"choices": None})
        written = ["", *map(json.dumps, events), "[DONE]"]
        self._send(200, "".join(f"data: {event}\n\n" for event in written))

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    FakeServer.bodies, FakeServer.paths = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", "/team/a", "/team/a/v1/"])
def test_ask_can_ask_a_server(server, image, end):
    url = f"http://127.0.0.1:{server.server_port}{end}"
    result = run("ask", "--url", url, image, "https://example.com/b.png", "How many?")
    assert (result.exit_code, result.stdout) == (0, "2 images\n")
    [body] = FakeServer.bodies
    prefix = "/team/a/v1" if "team" in end else "/v1"
    assert FakeServer.paths == [f"{prefix}/models", f"{prefix}/chat/completions"]
    assert (body["model"], body["stream"], body["temperature"]) == ("far-away", True, 0)
    first, second, _ = body["messages"][0]["content"]
    assert first["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert second["image_url"]["url"] == "https://example.com/b.png"


def test_thoughts_are_shown_beside_the_answer(server):
    url = f"http://127.0.0.1:{server.server_port}"
    result = run("ask", "--url", url, "hard")
    assert (result.stdout, result.stderr) == ("0 images\n", "Hmm.\n")
    endless = run("ask", "--url", url, "too hard")
    assert (endless.stdout, endless.stderr) == ("\n", "Hm.\n")
    assert "Hmm.\n0 images\n" in run("chat", "--url", url, stdin="hard\n").stdout
    assert (
        "".join(ServerAnswers(url).stream([{"role": "user", "content": [{"type": "text", "text": "hard"}]}], GREEDY))
        == "0 images"
    )


def test_a_server_error_names_its_file(server, image):
    url = f"http://127.0.0.1:{server.server_port}"
    result = run("ask", "--url", url, "bad")
    assert (result.exit_code, result.stderr) == (1, "Error: that was bad\n")
    assert run("ask", "--url", url, image, image, "bad").stderr == f"Error: {image}: that was bad\n"
    shown = run("chat", "--url", url, stdin="bad\nHow many?\n").stdout
    assert "that was bad" in shown
    assert "0 images" in shown


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["<html>Sign in</html>"], "answered without a stream of events; give the URL of an OpenAI-compatible API"),
        ([], "answered without a stream of events"),
        (["data: <html>"], "sent an event that is no chat completion chunk: <html>"),
        (["data: 7"], "no chat completion chunk"),
        (["data: " + "[" * 100_000], "no chat completion chunk"),
        (['data: {"choices": [{"delta": 7}]}'], "no chat completion chunk"),
        (['data: {"error": "overheated"}'], "overheated"),
        (['data: {"error": {"message": "overheated"}}'], "overheated"),
    ],
)
def test_stream_of_another_kind_is_an_error(lines, words):
    with pytest.raises(VLMServeError, match=re.escape(words)):
        list(deltas("http://127.0.0.1:9", iter(lines), None))


def test_deltas_without_text_are_skipped():
    events = [
        '{"choices": null}',
        '{"choices": [{"delta": null}]}',
        '{"choices": [{"delta": {"content": "a"}}]}',
        "[DONE]",
    ]
    assert list(deltas("", iter(["", ": ping", *(f"data: {event}" for event in events)]), None)) == ["a"]


def test_servers_key_is_in_a_variable(server, monkeypatch):
    monkeypatch.setattr(FakeServer, "key", "secret")
    words = ("ask", "--url", f"http://127.0.0.1:{server.server_port}", "How many?")
    for key in ("", "other"):
        monkeypatch.setenv("VLMSERVE_API_KEY", key)
        result = run(*words)
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert "wrong key; set VLMSERVE_API_KEY" in result.stderr
    monkeypatch.setenv("VLMSERVE_API_KEY", "secret")
    assert run(*words).stdout == "0 images\n"


def test_no_server_at_the_url_is_one_line():
    result = run("ask", "--url", "http://127.0.0.1:9", "hello")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "no server at http://127.0.0.1:9/v1/models" in result.stderr


# eval


def test_eval_writes_the_card(tmp_path):
    folder = make_mock_checkpoint(tmp_path)
    card = folder / "README.md"
    arguments = ["eval", "pixie", "--engine", "mock", "--model", folder, "--per-task", "1"]
    result = run(*arguments, "--write")
    assert result.exit_code == 2
    assert "model card" in result.stderr
    card.write_text("before\n<!-- evaluation: begin -->\nold\n<!-- evaluation: end -->\nafter\n")
    result = run(*arguments, "--write", "--mistakes", "1")
    assert result.exit_code == 0
    assert "| **mean** | core |" in result.stdout
    assert re.search(r"^count \d+: '.*' instead of '.*'$", result.stdout, re.MULTILINE)
    before, table, after = re.split(r"<!-- evaluation: \w+ -->\n", card.read_text())
    assert (before, after) == ("before\n", "after\n")
    assert table in result.stdout


def test_eval_names_an_unknown_task():
    result = run("eval", "pixie", "--task", "chess")
    assert (result.exit_code, "chess" in result.stderr, "count" in result.stderr) == (2, True, True)


def test_reading_tasks_need_new_fonts(monkeypatch):
    monkeypatch.setattr("vlmserve.pixie.fonts.held_out_fonts_are_missing", lambda: True)
    result = run("eval", "pixie", "--task", "total")
    assert (result.exit_code, "vlmserve[pixie]" in result.stderr) == (2, True)


def test_eval_asks_about_documents(tmp_path, monkeypatch):
    monkeypatch.setattr("vlmserve.pixie.fonts.held_out_fonts_are_missing", lambda: False)
    folder = make_mock_checkpoint(tmp_path)
    result = run("eval", "pixie", "--engine", "mock", "--model", folder, "--per-task", "1", "--task", "text")
    assert result.exit_code == 0
    assert re.search(r"^\| character \| text \| \d+ \|", result.stdout, re.MULTILINE)


# The rest


def test_version_is_the_packages():
    assert {run(word).stdout for word in ("version", "--version", "-v")} == {vlmserve.__version__ + "\n"}


def test_the_package_runs_as_a_module():
    shown = subprocess.run([sys.executable, "-m", "vlmserve", "version"], capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stdout) == (0, vlmserve.__version__ + "\n")


def test_models_shows_whole_names_on_narrow_terminals():
    from vlmserve.models.names import MODELS

    shown = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"}).invoke(app, ["models"]).stdout
    assert {model.name for model in MODELS} <= set(shown.split())


def test_models_lists_all_families_as_the_documentation_does():
    from vlmserve.families.registry import LANGUAGE_FAMILIES, architectures

    assert "pixie" in run("models").stdout
    table = run("models", "--markdown").stdout
    assert all(f"| {name} |" in table for name in architectures())
    assert all(family.models in table for family in LANGUAGE_FAMILIES.values())
    names, families = table.split("\n\n")
    assert "| qwen3-vl:2b | Qwen/Qwen3-VL-2B-Instruct |" in names
    assert names in Path("docs/models.md").read_text("utf-8")
    assert families in Path("docs/models.md").read_text("utf-8")
