#!/usr/bin/env python3
"""A newcomer's walk: what the README, the first pages of the documentation and the recipes tell to type, word for word.

Their ``sh`` and ``python`` blocks run in order, in a fresh clone and an empty home. Each must end well and print what
`CHECKS` says. A line that starts a server runs in the background: the next one is typed when it is ready, and it ends
with its block. The first one, `make serve`, stays until the end, as the README says. ``make test`` is left out, since
CI runs it. Only pip's cache is shared with the home of who calls this.

    .ci/walk.py            # of the last commit
    .ci/walk.py --quick    # leaves out recipes and clients, which tests run
    .ci/walk.py --keep     # leaves the folder for a look
    .ci/walk.py --packages build/core    # installs vlmserve alone: the rest is in this environment
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
INSTALL_TIMEOUT = 900.0
BLOCK_TIMEOUT = 180.0
SERVER = re.compile(r"(make serve|\.venv/bin/vlmserve (serve|cluster up))\b.*")
LEFT_OUT = {"make test": "CI runs it"}
RECIPES = (
    "mkdir -p build && .venv/bin/python examples/captions.py", ".venv/bin/python examples/fields.py",
    ".venv/bin/python examples/pages.py", ".venv/bin/python examples/find_in_video.py", "mkdir -p build/photos",
    ".venv/bin/python examples/agent.py", ".venv/bin/vlmserve serve pixie --port 8002",
    ".venv/bin/python examples/shared_image.py", ".venv/bin/python examples/slo.py",
)  # fmt: skip
TESTED_ELSEWHERE = {
    **dict.fromkeys(RECIPES, "tests/test_examples.py"),
    ".venv/bin/python -m pip install --quiet 'vlmserve[ray]'": "tests/scaleout/test_ray.py",
    ".venv/bin/python -m pip install --quiet nbclient": "tests/test_examples.py runs the notebook's cells",
    ".venv/bin/python -m pip install --quiet langchain-openai": "make test-clients",
    ".venv/bin/python -m pip install --quiet litellm": "make test-clients",
    ".venv/bin/python -m pip install --quiet instructor": "make test-clients",
    ".venv/bin/python -m pip install --quiet 'pydantic-ai-slim[openai]'": "make test-clients",
}
"""Blocks that a quick walk leaves out, by how they begin, and what tests the same. Installs of clients take minutes."""
PAGES = ("README.md", "docs/start.md", "docs/python.md", "docs/serving.md", "examples/README.md")
"""In the order in which they are read."""

CHECKS = {
    "make serve": "",
    ".venv/bin/vlmserve ask examples/shapes.png": r"(?i)\bred\b",
    "from vlmserve import LLM": r"(?i)\b(3|three)\b",
    ".venv/bin/vlmserve ask --url": r"(?i)\bred\b",
    "curl -s http://127.0.0.1:8000/v1/chat/completions": r'(?i)"content":\s*"[^"]*\b(3|three)\b',
    ".venv/bin/vlmserve chat": r"(?i)\bred\b",
    ".venv/bin/python -m pip install --quiet openai": "",
    "import base64": r"(?i)circle",
    ".venv/bin/vlmserve ask examples/shapes.pdf": r"(?i)\btriangle\b",
    ".venv/bin/vlmserve batch": r"answers\.jsonl: 2 of 2 rows have an answer",
    "curl -s http://127.0.0.1:8000/metrics": r"(?m)^vlmserve:request_success_total\{",
    ".venv/bin/vlmserve keys add alice": r"(?m)^vlm-[\w-]+",
    ".venv/bin/vlmserve loadtest": r"(?i)\bTTFT\b",
    "from PIL import Image": r"(?i)What colour is the circle\? -> .*\bred\b",
    "import asyncio": r"(?i)^red (3|three)\n.*circle",
    "mkdir -p build && cp -r": "",
    "mkdir -p build\n.venv/bin/vlmserve config": r"max_num_seqs\s+32\s+VLMSERVE_MAX_NUM_SEQS",
    "mkdir -p build && .venv/bin/python examples/captions.py": r"shapes\.png.*\bred\b",
    ".venv/bin/python examples/fields.py": r"count: \d \(\d+%\)",
    ".venv/bin/python examples/pages.py": r"page 2: .*\btriangle\b",
    ".venv/bin/python examples/find_in_video.py": r"^1\.0 s: red\n$",
    "mkdir -p build/photos": r"(?m)^back\.png, front\.png: .*\bred\b",
    ".venv/bin/python examples/agent.py": r"share_of_colour\(.*\) -> [\d.]+ %",
    ".venv/bin/vlmserve serve pixie --port 8002": r"(?m)^corners: 3$",
    ".venv/bin/python examples/shared_image.py": r"^red \(\d+ of .*\n3 \(\d\d+ of",
    ".venv/bin/python -m pip install --quiet 'vlmserve[ray]'": r"(?i)^yes\b.*\nno\b.* \(\d\d+ of",
    ".venv/bin/python examples/slo.py": r"\d+% of 20 requests met",
    ".venv/bin/python -m pip install --quiet nbclient": "",
    ".venv/bin/python -m pip install --quiet langchain-openai": r"^red\n$",
    ".venv/bin/python -m pip install --quiet litellm": r"^red\n$",
    ".venv/bin/python -m pip install --quiet instructor": r"^(red|green|blue|yellow)\n$",
    ".venv/bin/python -m pip install --quiet 'pydantic-ai-slim[openai]'": r"^(red|green|blue|yellow)\n$",
}
"""What a block must print, as a regular expression, by how the block begins."""

INPUTS = {".venv/bin/vlmserve chat": "/image examples/shapes.png\nWhat colour is the circle?\n/quit\n"}
"""What is typed into a block."""


class WalkError(Exception):
    """A step that did not end well."""


class Block(NamedTuple):
    """A fenced block. language: "sh" or "python"."""

    language: str
    text: str

    @property
    def start(self) -> str:
        """How it begins in `CHECKS`. Raises WalkError if it is not there."""
        for start in CHECKS:
            if self.text.startswith(start):
                return start
        raise WalkError(f"there is no check for this block; add one to {Path(__file__).name}:\n{self.text}")


def blocks(root: Path) -> list[Block]:
    """What a newcomer is told to type, in order, but for what is left out. root: of a clone."""
    text = "".join((root / page).read_text("utf-8") for page in PAGES)
    found = [Block(*pair) for pair in re.findall(r"^```(sh|python)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]
    return [block for block in found if block.text.strip() not in LEFT_OUT]


class Newcomer:
    """Someone with an empty home in a fresh clone.

    packages: an environment in which pip finds what vlmserve depends on.
    """

    def __init__(self, folder: Path, packages: Path | None = None) -> None:
        self.home = folder / "home"
        self.clone = folder / "vlmserve"
        self.home.mkdir()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(self.clone)], check=True)
        self.environment = _environment(self.home)
        if packages is not None:
            self._share(packages.absolute())
        self.log = folder / "servers.log"
        self.printed = ""

    def _share(self, packages: Path) -> None:
        """Make the clone's environment, which finds the packages of another one as well."""
        subprocess.run([packages / "bin/python", "-m", "venv", self.clone / ".venv"], check=True)
        [found] = packages.glob("lib/python*/site-packages")
        own = self.clone / ".venv" / found.relative_to(packages)
        (own / "packages.pth").write_text(f"{found}\n", "utf-8")

    def run(self, block: Block) -> None:
        """Type one block. Raises WalkError if it fails, prints something else, or takes too long."""
        start = block.start
        self.printed = ""
        if block.language == "python":
            self._finish([".venv/bin/python", "-c", block.text], start)
        else:
            before, server, after = _split(block.text)
            self._type(before, start)
            if server:
                with self.serving(server) as port:
                    self._check_server(server, port)
                    self._type(after, start)
        if not re.search(CHECKS[start], self.printed):
            raise WalkError(f"what it printed does not match {CHECKS[start]!r}:\n{self.printed}")

    def _type(self, lines: str, start: str) -> None:
        if lines.strip():
            self._finish(["bash", "-e", "-o", "pipefail", "-c", lines], start)

    def _finish(self, words: list[str], start: str) -> None:
        typed = INPUTS.get(start, "")
        done = subprocess.run(
            words, cwd=self.clone, env=self.environment, input=typed, capture_output=True, text=True,
            timeout=INSTALL_TIMEOUT if "pip install" in start else BLOCK_TIMEOUT,
        )  # fmt: skip
        self.printed += done.stdout
        if done.returncode != 0:
            raise WalkError(f"it ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}")

    @contextlib.contextmanager
    def serving(self, line: str) -> Iterator[int]:
        """Run a line that starts a server, from when it is ready; yields its port. Ctrl-C ends it."""
        port = int(match[1]) if (match := re.search(r"--port (\d+)", line)) else 8000
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                raise WalkError(f"port {port} is in use by another program; stop it, since this port is used")
        with self.log.open("ab") as log:
            server = subprocess.Popen(
                ["bash", "-c", line],
                cwd=self.clone,
                env=self.environment,
                start_new_session=True,
                stdout=log,
                stderr=log,
            )
        try:
            self._await_ready(server, port)
            yield port
            os.killpg(server.pid, signal.SIGINT)
            server.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)

    def _await_ready(self, server: subprocess.Popen[bytes], port: int) -> None:
        deadline = time.monotonic() + INSTALL_TIMEOUT
        while _status(f"http://127.0.0.1:{port}/ready") != 200:
            if server.poll() is not None:
                raise WalkError(f"the server ended with status {server.returncode}:\n{self._last_lines()}")
            if time.monotonic() > deadline:
                raise WalkError(f"no server answers at port {port}:\n{self._last_lines()}")
            time.sleep(0.5)

    def _last_lines(self) -> str:
        """The end of what installing and the servers have printed."""
        return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-50:])

    def _check_server(self, line: str, port: int) -> None:
        """A server with keys refuses requests without one, and answers those with one."""
        url = f"http://127.0.0.1:{port}/v1/models"
        if "--api-keys-file" in line:
            key = self.printed.split()[0]
            if (without := _status(url)) != 401 or (status := _status(url, key)) != 200:
                raise WalkError(f"/v1/models is {without} without a key and {status} with one")
        elif (status := _status(url)) != 200:
            raise WalkError(f"/v1/models is {status}")


def _split(text: str) -> tuple[str, str, str]:
    """The lines before the one that starts a server, that line, and those after it."""
    lines = text.splitlines()
    at = next((number for number, line in enumerate(lines) if SERVER.fullmatch(line)), len(lines))
    return "\n".join(lines[:at]), "".join(lines[at : at + 1]), "\n".join(lines[at + 1 :])


def _environment(home: Path) -> dict[str, str]:
    """The caller's variables without those that lead into its home or change what the commands do."""
    ours = re.compile(
        r"(VLMSERVE|HF|XDG|CUDA|TORCH|OPENAI|PYTEST)_"
        r"|(VIRTUAL_ENV|PYTHONPATH|PYTHONHOME|PYTHONDONTWRITEBYTECODE|MAKEFLAGS)$"
    )
    kept = {name: value for name, value in os.environ.items() if not ours.match(name)}
    cache = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True)
    if cache.returncode == 0:
        kept.setdefault("PIP_CACHE_DIR", cache.stdout.strip())
    for file in (Path("~/.config/pip/pip.conf").expanduser(), Path("~/.pip/pip.conf").expanduser()):
        if file.is_file():
            kept.setdefault("PIP_CONFIG_FILE", str(file))  # which index to use belongs to the machine
    return kept | {"HOME": str(home)}


def _status(url: str, key: str | None = None) -> int:
    """The status of an answer; 0: there is none."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def walk(folder: Path, quick: bool, packages: Path | None) -> None:
    """Type everything, or what a quick walk types. Raises WalkError for the first step that fails."""
    newcomer = Newcomer(folder, packages)
    first, *others = blocks(newcomer.clone)
    print(f"$ {first.text.strip()}", flush=True)
    started = time.monotonic()
    with newcomer.serving(first.text.strip()):
        print(f"(ready, {time.monotonic() - started:.0f} s)", flush=True)
        for block in others:
            print("\n".join(f"$ {line}" for line in block.text.splitlines()), flush=True)
            if block.text.startswith("curl ") and shutil.which("curl") is None:
                print("(skipped: curl is not installed here)", flush=True)
                continue
            if quick and block.start in TESTED_ELSEWHERE:
                print(f"(left out: {TESTED_ELSEWHERE[block.start]})", flush=True)
                continue
            started = time.monotonic()
            newcomer.run(block)
            print(f"(ok, {time.monotonic() - started:.0f} s)", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="leave the clone and the home for a look")
    parser.add_argument("--quick", action="store_true", help="leave out blocks that other tests run")
    parser.add_argument("--packages", type=Path, help="an environment that has vlmserve's dependencies")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="walk-"))
    started = time.monotonic()
    try:
        walk(folder, given.quick, given.packages)
    except (WalkError, subprocess.SubprocessError) as error:
        print(f"The newcomer's walk failed: {error}", file=sys.stderr)
        return 1
    finally:
        if not given.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"The newcomer's walk passed in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
