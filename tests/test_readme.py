"""What the documents tell people to type exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vlmserve.cli import app

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    ROOT / name
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/architecture.md",
        "docs/caching.md",
        "docs/metrics.md",
        "docs/page.md",
        "docs/settings.md",
        "docs/api.md",
        "docs/operations.md",
        "docs/loadtest.md",
    )
]


def commands() -> list[list[str]]:
    """The words behind every `vlmserve` in the documents' shell lines."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    lines = re.findall(r"^(?:    )?\.venv/bin/vlmserve (.+)$", text, re.MULTILINE)
    lines += re.findall(r"^    (?:[A-Z_]+=\S+ )?vlmserve (.+)$", text, re.MULTILINE)
    lines += re.findall(r"`(?:\.venv/bin/)?vlmserve ([^`]+)`", text)
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_and_flags_exist(words):
    names = [word for word in words if not word.startswith("-")]
    command = names[:2] if names[:1] in (["eval"], ["keys"]) else names[:1]
    shown = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, [*command, "--help"])
    assert shown.exit_code == 0
    assert all(word in shown.stdout for word in words if word.startswith("-"))


def test_there_are_commands_to_check():
    assert {"serve", "ask", "chat", "models", "eval"} <= {words[0] for words in commands()}


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    mentioned = {name for path in DOCUMENTS for name in re.findall(r"`?make ([a-z]+)[` \n]", path.read_text())}
    assert {"serve", "test", "lint", "format"} <= mentioned & set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_python_in_the_readme_compiles():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        compile(block, "README.md", "exec")
