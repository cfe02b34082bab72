"""Run the main job of client libraries with pixie, each library in an environment of its own.

make test-clients                       # all jobs
make test-clients ARGS="openai ai-sdk"  # two jobs
make test-clients ARGS=--light          # jobs that CI runs

Installs take seconds with uv, and minutes with pip.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import NamedTuple

from tests.server.live import LiveServer
from vlmserve.models.hub import resolve_model
from vlmserve.settings.config import BUILT_IN_MODEL

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "build/clients"
IMAGE = ROOT / "examples/shapes.png"
QUESTION = "What colour is the circle?"
INSTALL_TIMEOUT, LIGHT_INSTALL_TIMEOUT, JOB_TIMEOUT = 600.0, 300.0, 240.0
"""Seconds."""
COLOUR = r"(?i)\b(red|green|blue|yellow)\b"
"""An answer that a schema restricts; pixie may choose any of these colours."""


class Job(NamedTuple):
    """A script that takes an image, --url and --model, and prints what the model says."""

    packages: tuple[str, ...]
    script: str
    arguments: tuple[str, ...] = ()
    prints: str = r"(?i)\bred\b"
    light: bool = False
    """Whether its install and its run compute for at most about 10 s. CI runs it, with pinned packages."""


JOBS = {
    "openai": Job(("openai",), "tests/clients/jobs/openai_sdk.py", light=True),
    "langchain": Job(("langchain-openai",), "examples/langchain_chat.py", (QUESTION,)),
    "langchain-vectors": Job(
        ("langchain-openai", "numpy"), "tests/clients/jobs/langchain_vectors.py", prints="equal vectors"
    ),
    "llama-index": Job(
        (
            "llama-index-embeddings-openai-like",
            "llama-index-llms-openai-like",
            "llama-index-postprocessor-cohere-rerank",
        ),
        "tests/clients/jobs/llama_index_vectors.py",
        prints="equal vectors",
    ),
    "cohere": Job(("cohere",), "tests/clients/jobs/cohere_sdk.py", prints="ranked"),
    "ollama": Job(("ollama",), "tests/clients/jobs/ollama_sdk.py", light=True),
    "qdrant": Job(
        ("openai", "qdrant-client"), "examples/search_photos.py", ("a red circle",), prints=r"\d\.\d+  shapes\.png"
    ),
    "litellm": Job(("litellm",), "examples/litellm_chat.py", (QUESTION,)),
    "instructor": Job(("instructor",), "examples/instructor_fields.py", prints=COLOUR),
    "pydantic-ai": Job(("pydantic-ai-slim[openai]",), "examples/pydantic_ai_agent.py", prints=COLOUR),
    "anthropic": Job(("anthropic",), "tests/clients/jobs/anthropic_sdk.py", light=True),
    "openai-agents": Job(("openai-agents",), "tests/clients/jobs/openai_agents.py"),
    "docling": Job(
        ("docling-slim[convert-core,format-markdown,format-pdf]", "packaging", "torch==2.13.0"),
        "tests/clients/jobs/docling_pipeline.py",
    ),
    "ai-sdk": Job(
        ("ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92", "zod@4.6.7"), "tests/clients/jobs/ai_sdk.mjs", light=True
    ),
}


class JobError(Exception):
    """A job that failed."""


class InstallError(Exception):
    """Packages that cannot be installed here."""


def finish(command: list[str | Path], folder: Path, timeout: float, error: type[Exception] = JobError) -> str:
    """Return the output of a command. Raises the error if the command fails or takes too long."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise error(f"{command[0]} took more than {timeout:.0f} s") from None
    if done.returncode:
        raise error(f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}".strip())
    return done.stdout


def install(name: str) -> list[str | Path]:
    """Install the packages of a job, and return the command that runs its script. Raises InstallError."""
    job = JOBS[name]
    folder = ENVIRONMENTS / name
    folder.mkdir(parents=True, exist_ok=True)
    script = ROOT / job.script
    timeout = LIGHT_INSTALL_TIMEOUT if job.light else INSTALL_TIMEOUT
    if script.suffix == ".mjs":
        npm = shutil.which("npm")
        if npm is None:
            raise InstallError("it needs Node.js 20 or newer with npm")
        finish(
            [npm, "install", "--prefix", ".", "--no-fund", "--no-audit", *job.packages], folder, timeout, InstallError
        )
        return ["node", shutil.copy(script, folder)]  # Node looks for packages beside the script
    python = folder / "bin/python"
    venv.create(folder, symlinks=True)
    uv = shutil.which("uv")
    if uv is None:
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
    else:
        pip = [uv, "pip", "install", "--python", python, "--quiet"]
    pinned = ["--constraint", ROOT / "constraints.txt"] if job.light else []
    finish([*pip, *pinned, *job.packages], folder, timeout, InstallError)
    return [python, script]


def run(name: str, url: str) -> None:
    """Install and run a job. Raises InstallError, or JobError if the job fails or prints something else."""
    job = JOBS[name]
    given = [IMAGE, *job.arguments, "--url", f"{url}/v1", "--model", "tiny"]
    printed = finish([*install(name), *given], ENVIRONMENTS / name, JOB_TIMEOUT)
    if not re.search(job.prints, printed):
        raise JobError(f"its output does not match {job.prints}: {printed}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"{', '.join(JOBS)}; default: all")
    parser.add_argument("--light", action="store_true", help="only jobs with a quick install")
    given = parser.parse_args()
    if unknown := set(given.jobs) - set(JOBS):
        parser.error(f"unknown job {', '.join(unknown)}: use {', '.join(JOBS)}")
    names = given.jobs or [name for name, job in JOBS.items() if job.light or not given.light]
    passed = failed = 0
    with LiveServer(resolve_model(BUILT_IN_MODEL), engine={"engine": "real"}, process=True) as server:
        for name in names:
            began = time.monotonic()
            try:
                run(name, server.url)
            except InstallError as error:
                print(f"SKIP {name}: {error}", flush=True)
            except JobError as error:
                failed += 1
                print(f"FAIL {name}:\n{error}", flush=True)
            else:
                passed += 1
                print(f"ok   {name} ({time.monotonic() - began:.0f} s)", flush=True)
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
