"""What the documents tell people to type exists."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.ci_scripts import load
from vlmserve.cli import app
from vlmserve.families.registry import LANGUAGE_FAMILIES
from vlmserve.settings import vllm_flags as vllm
from vlmserve.settings.llama_flags import LLAMA_FLAGS

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "examples/README.md")
    ),
    *sorted(ROOT.glob("docs/**/*.md")),
]


def commands() -> list[list[str]]:
    """The words behind every `vlmserve` in the documents' shell lines."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    lines = re.findall(r"^(?:    )?\.venv/bin/vlmserve (.+)$", text, re.MULTILINE)
    lines += re.findall(r"^    (?:[A-Z_]+=\S+ )?vlmserve (.+)$", text, re.MULTILINE)
    lines += re.findall(r"`(?:\.venv/bin/)?vlmserve ([^`]+)`", text)
    return [shlex.split(line) for line in lines]


def command_called(words: list[str]):
    """The command that some words begin with."""
    found = typer.main.get_command(app)
    for word in words:
        if word.startswith("-") or not hasattr(found, "commands"):
            break
        found = found.commands[word]
    return found


def flags_of(command) -> set[str]:
    inner = {flag for one in getattr(command, "commands", {}).values() for flag in flags_of(one)}
    own = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts) if flag.startswith("-")}
    return inner | own | {"--help"}


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_and_flags_exist(words):
    flags = {word.partition("=")[0] for word in words if word.startswith("-")}
    assert flags - flags_of(command_called(words)) == set()


def test_flags_in_the_text_exist():
    known = {*flags_of(typer.main.get_command(app)), *vllm.FLAGS, *LLAMA_FLAGS, "--flag", "--no-flag"}  # a placeholder
    known.add("--uniform")  # of a benchmark
    for path in DOCUMENTS:
        named = set(re.findall(r"`(--[a-z][a-z0-9-]*[a-z0-9])(?=[ `=])", path.read_text(encoding="utf-8")))
        assert named - known == set(), path.name


def test_groups_of_help_exist():
    named = []
    for path in DOCUMENTS:
        text = " ".join(path.read_text(encoding="utf-8").split())
        for command, groups in re.findall(
            r"`vlmserve (\w+) --help(?:-all)?`,? under ([A-Z]\w*(?: and [A-Z]\w*)*)", text
        ):
            shown = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, [command, "--help-all"]).stdout
            headings = {line.partition(":")[0] for line in shown.splitlines() if re.match(r"\w.*:$", line)}
            named += groups.split(" and ")
            assert set(groups.split(" and ")) <= headings, path.name
    assert {"Server", "Media"} <= set(named)


def test_readme_has_800_to_900_words():
    assert 800 <= len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


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


@pytest.mark.parametrize(
    "path", [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md"], ids=lambda path: path.name
)
def test_files_of_the_package_exist(path):
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+\.(?:py|h|cpp)|(?:[a-z_0-9]+/)+)[`:]", text))
    absent = {name for name in named if not any((base / name).exists() for base in (ROOT, ROOT / "src" / "vlmserve"))}
    assert len(named) > 20
    assert absent <= {"utils.py", "adapters/", "runner/ranks.py"}


def test_architecture_names_every_top_level_module():
    package = ROOT / "src" / "vlmserve"
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py", "__main__.py"}
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    named = set(re.findall(r"`([a-z_]+(?:\.py|/))`", (ROOT / "docs/architecture.md").read_text(encoding="utf-8")))
    assert (modules | folders) - named == set()


def test_guides_have_at_most_900_words():
    guides = re.findall(
        r": ([a-z-]+\.md)", (ROOT / "mkdocs.yml").read_text().split("  - Guides:")[1].split("  - Deploy:")[0]
    )
    words = {name: len((ROOT / "docs" / name).read_text(encoding="utf-8").split()) for name in guides}
    assert len(words) > 10
    assert {name: count for name, count in words.items() if count > 900} == {}


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_headings_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\(((?:[^)#:\s]+\.md)?)#([^)]+)\)", text)
    assert [(file, to) for file, to in links if to not in anchors(path.parent / file if file else path)] == []


def test_python_blocks_compile():
    blocks = [
        (path.name, textwrap.dedent(block))
        for path in DOCUMENTS
        for block in re.findall(r"^ *```python\n(.*?)^ *```", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    ]
    assert len(blocks) > 8
    for name, block in blocks:
        compile(block, name, "exec")


def test_the_walk_checks_every_block():
    walk = load("walk")
    blocks = walk["blocks"](ROOT)
    assert [block.start for block in blocks] == list(walk["CHECKS"])
    assert walk["TESTED_ELSEWHERE"].keys() < walk["CHECKS"].keys()
    for block in blocks:
        if block.language == "python":
            compile(block.text, block.start, "exec")


def test_pages_describe_hybrid_models():
    [row] = re.findall(r"^\| Hybrid models .*$", (ROOT / "docs/compare.md").read_text("utf-8"), re.MULTILINE)
    assert "Qwen3.5, LFM2" in row
    family = LANGUAGE_FAMILIES["qwen3_5_text"]
    spec = family.build({**family.defaults, "num_hidden_layers": 32})
    slot = sum(state.state_bytes(2) for state in spec.states)
    token = sum(2 * 2 * mixer.num_kv_heads * mixer.head_size for mixer in spec.attention)
    text = " ".join((ROOT / "docs/models.md").read_text("utf-8").split())
    assert f"takes {slot / 1e6:.1f} MB, as much as the KV cache of {slot // token:,} tokens" in text


def test_every_image_is_shown():
    text = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    assert [path.name for path in (ROOT / "docs/images").iterdir() if f"images/{path.name}" not in text] == []
