"""Help pages and errors of all commands."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator

import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from vlmserve.cli import COMMON_FIELDS, COMMON_LOAD_FIELDS, app
from vlmserve.cli.fields import flag

WIDTHS = (60, 80, 120)


def commands() -> Iterator[tuple[str, ...]]:
    """The words of every command, and of every group."""

    def walk(command, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield words
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, (*words, name))

    yield from walk(typer.main.get_command(app), ())


COMMANDS = list(commands())


def flags_of(words: tuple[str, ...]) -> set[str]:
    command = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]
    params = [param for param in command.params if not getattr(param, "hidden", False)]
    return {name for param in params for name in (*param.opts, *param.secondary_opts) if name.startswith("-")}


def run(*words: str, width: int = 80):
    return CliRunner(env={"COLUMNS": str(width), "TERM": "dumb"}).invoke(app, list(words), prog_name="vlmserve")


def test_shells_complete_choices_of_a_flag():
    words = {"COMP_WORDS": "vlmserve serve --dtype fl", "COMP_CWORD": "3", "_VLMSERVE_COMPLETE": "complete_bash"}
    result = CliRunner(env=words).invoke(app, [], prog_name="vlmserve")
    assert sorted(result.stdout.split()) == ["float16", "float32"]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_flag_is_cut(words, width):
    flags = flags_of(words)
    shown = run(*words, "--help-all" if "--help-all" in flags else "--help", width=width)
    assert shown.exit_code == 0
    names = set(re.findall(r"(?<![\w-])-{1,2}[a-z][a-z-]*(?![\w…-])", shown.stdout))
    assert flags - names == set()
    assert "…" not in shown.stdout


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_only_single_names_exceed_the_terminal(words, width):
    for line in run(*words, "--help", width=width).stdout.splitlines():
        assert len(line) <= width or len(line.split()) <= 4, line


def groups_of(page: str) -> set[str]:
    """Headings of a help page besides those of every command."""
    return set(re.findall(r"^(\S.*):$", page, re.MULTILINE)) - {"Arguments", "Options"}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_fits_a_screen_or_has_groups(words):
    page = run(*words, "--help").stdout
    assert len(page.splitlines()) <= 24 or groups_of(page)


# Examples


def example_of(words: tuple[str, ...]) -> list[str]:
    """The words of the example in a command's help, after `vlmserve`."""
    [example] = re.findall(r"^  Example: vlmserve (.*?)$", run(*words, "--help").stdout, re.MULTILINE)
    return shlex.split(example)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_example_of_help_is_a_valid_line(words):
    example = example_of(words)
    assert tuple(example[: len(words)]) == words
    context = None
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        context = command.make_context(example[0], [example[0]], parent=context, resilient_parsing=True)
        command = command.commands[example.pop(0)]
    command.make_context("example", example, parent=context)  # exits for a wrong line


RUNNABLE = "config models version list cache doctor ask batch embed".split()


@pytest.mark.parametrize(
    "words", [*((name,) for name in RUNNABLE), *(("keys", name) for name in ("add", "list", "remove"))], ids=" ".join
)
def test_example_of_help_runs(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("VLMSERVE_ENGINE", "mock")
    (tmp_path / "photos").mkdir()
    for name in ("photo.png", "photos/a.png"):
        Image.new("RGB", (32, 32), "red").save(name)
    if words[-1] in ("list", "remove"):
        run("keys", "add", "alice")
    result = run(*example_of(words))
    assert result.exit_code == 0 or words == ("doctor",), result.output
    assert "Error" not in result.output


@pytest.mark.parametrize(("command", "common"), [("serve", COMMON_FIELDS), ("loadtest", COMMON_LOAD_FIELDS)])
def test_help_shows_common_flags_and_names_the_rest(command, common):
    short, whole = (run(command, how).stdout for how in ("--help", "--help-all"))
    shown = set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", short, re.MULTILINE))
    assert set(map(flag, common)) <= shown
    assert len(short.splitlines()) < 80
    hidden = int(re.search(rf"vlmserve {command} --help-all shows (\d+) more flags", short)[1])
    assert hidden == len(re.findall(r"^  (?:-\w, )?--[a-z-]+", whole, re.MULTILINE)) - len(shown)
    assert "more flags" not in whole


def test_help_of_a_command_may_come_first():
    assert run("help").stdout == run("--help").stdout
    assert run("help", "keys", "add").stdout == run("keys", "add", "--help").stdout


# Errors


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sevre", "no such command 'sevre'; did you mean 'serve'? See vlmserve --help"),
        ("ps", "there is no command ps: each server serves one model; vlmserve list shows downloaded models"),
        ("bench serve --model x", "there is no command bench serve: type vlmserve loadtest URL"),
        ("collect-env", "there is no command collect-env: vlmserve doctor describes this machine"),
        ("qwen3-vl:2b", "there is no command qwen3-vl:2b: to use the model, type vlmserve serve qwen3-vl:2b or "),
        ("pixie", "there is no command pixie: to use the model, type vlmserve serve pixie or vlmserve run pixie"),
        ("photo.heic", "there is no command photo.heic: to ask about it, type vlmserve ask photo.heic "),
        ("ask --image a.png -p hello", "vlmserve has no --image. Images and the question are arguments: vlmserve ask "),
        ("serve -ngl many", "the layers on the GPU are a whole number, all or auto, not many"),
        ("keys ad", "no such command 'ad'; did you mean 'add'? See vlmserve keys --help"),
        ("serve --prot 3", "there is no flag --prot; did you mean --port? See vlmserve serve --help"),
        ("serve --no-acess-log",
         "there is no flag --no-acess-log; did you mean --no-access-log? See vlmserve serve --help"),
        ("models --foo", "there is no flag --foo. See vlmserve models --help"),
        ("--foo", "there is no flag --foo. See vlmserve --help"),
        ("serve a b", "too many arguments: b. See vlmserve serve --help"),
        ("keys add", "missing argument 'name'. See vlmserve keys add --help"),
        ("ask --max-tokens 0 x", "--max-tokens 0: must be at least 1. See vlmserve ask --help"),
        ("ask --max-tokens many x", "--max-tokens many: must be a whole number. See vlmserve ask --help"),
        ("ask x --max-tokens", "option '--max-tokens' requires an argument. See vlmserve ask --help"),
        ("quantize pixie x --bits 5", "--bits 5: '5' is not one of '8', '4'. See vlmserve quantize --help"),
        ("serve --port eighty", "--port eighty: must be a whole number"),
        ("serve --max-num-seqs 0", "--max-num-seqs 0: must be at least 1"),
        ("serve --dtype half-and-half", "--dtype half-and-half: must be 'auto', 'float32', 'bfloat16' or 'float16'"),
        ("serve --quantize-group-size 33", "--quantize-group-size 33: must be 32, 64 or 128"),
        ("serve --fetch-timeout 0", "--fetch-timeout 0: must be greater than 0"),
        ("serve --quantize-layers int8",
         "--quantize-layers int8: write PATTERN=SCHEME, like 'lm_head=none' (schemes: none, int8, int4), not int8"),
        ("serve --mm-processor-kwargs 5", "--mm-processor-kwargs 5: must be a JSON object"),
        ("serve --mm-processor-kwargs.fps -1", "--mm-processor-kwargs fps -1: must be greater than 0"),
        ("serve --mm-processor-kwargs.max_pixel 1",
         "--mm-processor-kwargs: there is no key max_pixel; use fps, max_pixels, max_tokens, min_pixels"),
    ],
)  # fmt: skip
def test_wrong_line_gets_one_line_with_the_correction(line, message):
    result = run(*line.split(), width=200)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {message}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("eval perplexity pixie --text nope.txt", 2, "--text nope.txt: the file cannot be read: No such file"),
        ("eval perplexity pixie --text {binary}", 2, "--text {binary}: the file is not text in UTF-8"),
        ("eval perplexity pixie --scheme int2", 2, "--scheme int2: must be one of none, int8, int4"),
        ("bench --scheme int2", 2, "--scheme int2: must be one of none, int8, int4"),
        ("ask --max-model-len 5000 hello", 1, "--max-model-len 5000 is more than the model's 4096 positions"),
        ("ask --kv-cache-memory 1MiB --max-model-len 4096 hello", 1, "--kv-cache-memory holds "),
        ("quantize pixie {binary}/out", 1, "{binary}/out: Not a directory"),
        ("quantize pixie {folder}", 2, "{folder} must be a new or an empty folder"),
        ("quantize pixie {folder}/new --layers *=none", 2, "no layer is left to quantize; give some of them int8"),
        ("ask --chat-template nope.jinja hello", 2, "--chat-template nope.jinja: the file cannot be read: No such"),
        ("bench --kernels foo --scheme none", 2, "--kernels foo: not available on this machine; choose one of auto, "),
        (
            "ask --url http://127.0.0.1:9 hello",
            1,
            "there is no server at http://127.0.0.1:9/v1/models: connection refused",
        ),
        (
            "ask --url nonsense hello",
            1,
            "there is no server at nonsense/v1/models: write a URL like http://127.0.0.1:8000",
        ),
        (
            "loadtest http://127.0.0.1:9",
            1,
            "there is no server at http://127.0.0.1:9/v1/models: 127.0.0.1:9 refused the",
        ),
        ("serve --port 0 --storage-path {binary}/x.db", 2, "the history {binary}/x.db cannot be made: "),
        ("keys list --api-keys-file nope.jsonl", 2, "the keys in nope.jsonl cannot be read: No such file"),
        ("keys add bob --api-keys-file {binary}/keys.jsonl", 2, "{binary}/keys.jsonl cannot be written: "),
    ],
)
def test_incapable_command_says_why_in_one_line(tmp_path, line, status, message):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    result = run(*line.format(binary=binary, folder=tmp_path).split(), width=200)
    assert result.stderr.splitlines()[-1].startswith(f"Error: {message.format(binary=binary, folder=tmp_path)}")
    assert (result.exit_code, "Traceback" in result.stderr) == (status, False)


def test_quantize_needs_no_flags(tmp_path):
    shown = run("quantize", "--help").stdout
    assert "[default: 8]" in " ".join(shown.split())
    result = run("quantize", "pixie", str(tmp_path / "small"), width=200)
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == 8
