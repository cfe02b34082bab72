"""Real coding agents against the mock engine: a first turn with a tool call, and a second turn.

`make agents` installs them. Each runs in an empty home and reaches nothing but the server.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.mock_checkpoint import make_mock_checkpoint
from tests.server.live import LiveServer
from vlmserve.engine.mock import MockEngine
from vlmserve.types import EngineRequest

BIN = Path(__file__).parent / "node_modules" / ".bin"
FIRST = "Run cat note.txt and repeat what it prints."
SECOND = "Repeat it once more."
WORD = "vermilion"
FIRST_ANSWER, SECOND_ANSWER = f"The note says {WORD}.", f"Once more: {WORD}."
SHELLS = {
    "Bash": {"command": "cat note.txt", "description": "Print the note"},
    "exec_command": {"cmd": "cat note.txt"},
    "shell_command": {"command": "cat note.txt"},
    "shell": {"command": ["cat", "note.txt"]},
    "run_shell_command": {"command": "cat note.txt", "description": "Print the note", "is_background": False},
    "bash": {"command": "cat note.txt", "description": "Print the note"},
}
"""Arguments that print the note, by the names that agents give to their shell."""
TIMEOUT = 120.0

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js 20 or newer")


def scripted_answer(prompt: str) -> str | None:
    """What the model says: a call of the agent's shell, then what the shell printed."""
    if SECOND in prompt and FIRST_ANSWER in prompt:
        return SECOND_ANSWER
    if WORD in prompt:
        return FIRST_ANSWER
    shell = next((name for name in SHELLS if f'"name": "{name}"' in prompt), None)
    if FIRST not in prompt or shell is None:
        return None
    return f"<tool_call>\n{json.dumps({'name': shell, 'arguments': SHELLS[shell]})}\n</tool_call>"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[LiveServer]:
    """A server whose mock engine answers as `scripted_answer` says."""
    folder = make_mock_checkpoint(tmp_path_factory.mktemp("mock"), context=1_000_000)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    add = MockEngine.add

    def add_scripted(engine: MockEngine, request: EngineRequest) -> None:
        add(engine, request)
        said = scripted_answer(tokenizer.decode(request.prompt.token_ids, skip_special_tokens=False))
        if said is not None:
            answer, ids = engine.unfinished[request.request_id], tokenizer.encode(said).ids
            answer.tokens, answer.length = itertools.cycle(ids), len(ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MockEngine, "add", add_scripted)
        with LiveServer(folder) as live:
            yield live


class Agent:
    """An agent in an empty home, with a note in its current folder."""

    def __init__(self, name: str, folder: Path, **variables: str) -> None:
        if not (BIN / name).exists():
            pytest.skip(f"{name} is not installed: make agents")
        self._program = str(BIN / name)
        self.home, self._work = folder / "home", folder / "work"
        self.home.mkdir()
        self._work.mkdir()
        (self._work / "note.txt").write_text(f"{WORD}\n")
        self._environment = {"PATH": os.environ["PATH"], "HOME": str(self.home), "TERM": "dumb", **variables}

    def write(self, path: str, text: str) -> None:
        """Write a file of settings into the home."""
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def run(self, *arguments: str) -> str:
        """What the agent prints."""
        done = subprocess.run(
            [self._program, *arguments],
            cwd=self._work,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout


def test_claude_code_calls_a_tool_and_continues(server, tmp_path):
    agent = Agent(
        "claude",
        tmp_path,
        ANTHROPIC_BASE_URL=server.url,
        ANTHROPIC_AUTH_TOKEN="x",
        ANTHROPIC_MODEL="tiny",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_AUTOUPDATER="1",
    )
    assert FIRST_ANSWER in agent.run("-p", FIRST, "--allowedTools", "Bash(cat:*)")
    assert SECOND_ANSWER in agent.run("-p", SECOND, "--continue")


def test_codex_calls_a_tool_and_continues(server, tmp_path):
    agent = Agent("codex", tmp_path)
    agent.write(
        ".codex/config.toml",
        f"""\
model = "tiny"
model_provider = "local"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.local]
name = "local"
base_url = "{server.url}/v1"
wire_api = "responses"
""",
    )
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    assert FIRST_ANSWER in agent.run("exec", *flags, FIRST)
    assert SECOND_ANSWER in agent.run("exec", *flags, "resume", "--last", SECOND)


def test_opencode_calls_a_tool_and_continues(server, tmp_path):
    agent = Agent(
        "opencode",
        tmp_path,
        OPENCODE_DISABLE_AUTOUPDATE="1",
        OPENCODE_DISABLE_MODELS_FETCH="1",
        OPENCODE_DISABLE_DEFAULT_PLUGINS="1",
        OPENCODE_DISABLE_LSP_DOWNLOAD="1",
        npm_config_offline="true",  # else each start asks npm for the types of plugins
    )
    models = {"tiny": {"name": "tiny", "tool_call": True, "limit": {"context": 1_000_000, "output": 4096}}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": "x"},
        "models": models,
    }
    settings = {
        "autoupdate": False,
        "share": "disabled",
        "model": "local/tiny",
        "small_model": "local/tiny",
        "permission": {"bash": "allow"},
        "provider": {"local": provider},
    }
    agent.write(".config/opencode/opencode.json", json.dumps(settings))
    assert FIRST_ANSWER in agent.run("run", FIRST)
    assert SECOND_ANSWER in agent.run("run", "--continue", SECOND)


def test_qwen_code_calls_a_tool_and_continues(server, tmp_path):
    agent = Agent(
        "qwen",
        tmp_path,
        OPENAI_BASE_URL=f"{server.url}/v1",
        OPENAI_API_KEY="x",
        OPENAI_MODEL="tiny",
        QWEN_CODE_NO_RELAUNCH="true",  # else Node starts twice, for a larger heap
    )
    settings = {
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "security": {"auth": {"selectedType": "openai"}},
    }
    agent.write(".qwen/settings.json", json.dumps(settings))
    assert FIRST_ANSWER in agent.run("--yolo", "-p", FIRST)
    assert SECOND_ANSWER in agent.run("--yolo", "--continue", "-p", SECOND)
