"""Thousands of mixed requests against a real server: does its memory stay flat, do its pools return to idle?

    .venv/bin/python -m benchmarks.soak                            # 20,000 requests to pixie

Starts `vlmserve serve` with small caches and sends new and known images, two images, text alone, several answers,
streams, clients that hang up, tenants' salts and requests that are refused. At the end nothing may be held, and in the
second half the resident memory of server and engine may grow by at most 2% or 20 MB. Exits with 1 if it does.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from benchmarks.command import keep

GROWTH_BYTES = 20_000_000
GROWTH_SHARE = 0.02
KINDS = {"new": 30, "known": 30, "two": 8, "text": 12, "several": 4, "salted": 4, "hang up": 6, "refused": 6}
"""Kinds of requests with how many of a hundred there are."""


@dataclass(frozen=True)
class Sample:
    """Resident bytes after a number of requests."""

    requests: int
    server: int
    engine: int


def server(flags: Sequence[str]) -> AbstractContextManager[tuple[str, psutil.Process]]:
    """A server on a free port: its URL and its process. Raises RuntimeError if it does not get ready."""
    return serving("serve", "--enable-debug", *flags)


@contextlib.contextmanager
def serving(*words: str) -> Iterator[tuple[str, psutil.Process]]:
    """A command of vlmserve that serves on a free port: its URL and its process. Raises RuntimeError if it ends."""
    command = [sys.executable, "-m", "vlmserve", *words, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if ready := re.search(r"vlmserve is ready: (http\S+)", line):
                yield ready[1], psutil.Process(process.pid)
                return
        raise RuntimeError(f"vlmserve {words[0]} exited with code {process.wait()}")
    finally:
        process.terminate()
        process.communicate()


def image_url(number: int) -> str:
    """A data URL of 64 x 64 pixels of noise, another one for each number."""
    from PIL import Image

    file = io.BytesIO()
    Image.frombytes("RGB", (64, 64), random.Random(number).randbytes(64 * 64 * 3)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def make_body(kind: str, number: int, draw: random.Random) -> dict[str, Any]:
    """A request of a kind; equal arguments give equal requests."""
    urls = {"text": [], "two": [image_url(number), image_url(draw.randrange(40))]}.get(
        kind, [image_url(draw.randrange(40) if kind in ("known", "several") else number)]
    )
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts.append({"type": "text", "text": draw.choice(("What is this?", "Describe the image.", "Count the stars."))})
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": draw.randint(1, 12), "temperature": 0}
    if kind == "several":
        body["n"] = 3
    if kind == "salted":
        body["cache_salt"] = f"tenant {number % 7}"
    if kind == "refused":
        parts[0]["image_url"]["url"] = draw.choice(("data:image/png;base64,AAAA", "file:///etc/passwd", urls[0][:-40]))
    if kind == "hang up":
        body |= {"max_tokens": 100, "ignore_eos": True}
    body["stream"] = kind == "hang up" or draw.random() < 0.5
    return body


async def send(client: httpx.AsyncClient, kind: str, body: dict[str, Any]) -> str:
    """Send a request; what came of it."""
    if kind != "hang up":
        response = await client.post("/v1/chat/completions", json=body)
        expected = 400 if kind == "refused" else 200
        return kind if response.status_code == expected else f"{kind}: unexpected status {response.status_code}"
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for _ in response.aiter_lines():
            return kind
    return f"{kind}: an empty stream"


def sample(requests: int, process: psutil.Process) -> Sample:
    engines = process.children()
    return Sample(requests, process.memory_info().rss, sum(child.memory_info().rss for child in engines))


async def soak(url: str, process: psutil.Process, options: argparse.Namespace) -> tuple[list[Sample], Counter[str]]:
    """Send everything, `concurrency` requests at a time, and measure the memory twenty times."""
    draw = random.Random(options.seed)
    kinds = iter(draw.choices(tuple(KINDS), tuple(KINDS.values()), k=options.requests))
    samples: list[Sample] = []
    outcomes: Counter[str] = Counter()
    every = max(1, options.requests // 20)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Sending", total=options.requests)

        async def work(client: httpx.AsyncClient) -> None:
            for kind in kinds:
                number = outcomes.total()
                outcomes[await send(client, kind, make_body(kind, number + 1000, random.Random(number)))] += 1
                progress.advance(task)
                if outcomes.total() % every == 0:
                    samples.append(sample(outcomes.total(), process))

        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            await asyncio.gather(*(work(client) for _ in range(options.concurrency)))
            await asyncio.sleep(1)
            samples.append(sample(outcomes.total(), process))
    return samples, outcomes


def problems(samples: Sequence[Sample], outcomes: Counter[str], state: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    found = [f"{count} x {outcome}" for outcome, count in outcomes.items() if ": " in outcome]
    second_half = samples[len(samples) // 2 :]
    for name in ("server", "engine"):
        sizes = [getattr(one, name) for one in second_half]
        growth = sizes[-1] - sizes[0]
        if growth > max(GROWTH_BYTES, GROWTH_SHARE * sizes[0]):
            found.append(f"the {name}'s memory grew by {growth / 1e6:.1f} MB in the second half")
    if state["requests"] or state["kv_blocks"]["used"] or state["encoder_cache"]["pinned_images"]:
        found.append(f"the server is not idle: {json.dumps(state)}")
    return found


def show(samples: Sequence[Sample], outcomes: Counter[str], console: Console) -> None:
    console.print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())), highlight=False)
    table = Table("requests", "server MB", "engine MB")
    for one in samples:
        table.add_row(f"{one.requests:,}", f"{one.server / 1e6:.1f}", f"{one.engine / 1e6:.1f}")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the samples to this file")
    parser.add_argument("flags", nargs="*", help="further flags of vlmserve serve, behind --")
    options = parser.parse_args(arguments)
    small = ["--kv-cache-memory", "8MiB", "--kv-offload-memory", "8MiB", "--encoder-cache-memory", "4MiB"]
    small += ["--image-cache-memory", "8MiB"]
    with server([*small, *options.flags]) as (url, process):
        samples, outcomes = asyncio.run(soak(url, process, options))
        state = httpx.get(f"{url}/debug/cache").json()
    console = Console()
    show(samples, outcomes, console)
    found = problems(samples, outcomes, state)
    keep(
        {"samples": [asdict(one) for one in samples], "outcomes": outcomes, "problems": found, "state": state}, options
    )
    for problem in found:
        console.print(problem, style="red", highlight=False)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
