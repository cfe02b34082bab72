"""An hour of light load on a cluster: does the memory of its gateway, its workers and Ray stay flat?

    .venv/bin/python -m benchmarks.cluster_soak                    # 3,600 s, 1.5 requests a second

Starts `vlmserve cluster up` with mock engines, which cache nothing, and small caches of images; flags behind `--` name
other engines. It gets the requests of `benchmarks.soak` at a steady rate. Exits with 1 if a request had an unexpected
answer, or if in the second half the resident memory of a part grew by more than 2% and 20 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.soak import GROWTH_BYTES, GROWTH_SHARE, KINDS, make_body, send, serving

PARTS = ("gateway", "workers", "engines", "controller", "replicas", "directory", "gcs", "raylet", "rest")
"""Of a cluster, as columns: processes of vlmserve, those of Ray Serve, and those of Ray."""
_FORMS = {
    "engines": "vlmserve.engine.process",
    "controller": "ray::ServeController",
    "replicas": "ray::ServeReplica",
    "directory": "ray::Directory",
    "gcs": "gcs_server",
    "raylet": "raylet/raylet",
}
"""What is in the command line of a part's processes."""
COUNTS = {"prompt_tokens": "gateway_prompt_tokens_total", "cached_tokens": "gateway_cached_tokens_total"}
"""Columns and metrics of the gateway: what the workers found in their caches."""
Row = dict[str, float]


def part_of(process: psutil.Process) -> str:
    """The part that a process is of."""
    line = " ".join(process.cmdline())
    if "vlmserve.scaleout.member" in line:
        return "workers" if process.children() else "gateway"
    return next((part for part, form in _FORMS.items() if form in line), "rest")


def measure(root: psutil.Process) -> Row:
    """Resident bytes of each part, and the seconds of processor time of all."""
    row = dict.fromkeys((*PARTS, "cpu"), 0.0)
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended meanwhile
            row[part_of(process)] += process.memory_info().rss
            row["cpu"] += sum(process.cpu_times()[:2])
    return row


def counts(metrics: str) -> Row:
    """Sums of the gateway's counters, by its answer of /metrics."""
    return {
        column: sum(float(value) for value in re.findall(rf"^[\w:]*{name}(?:{{.*}})? (\S+)$", metrics, re.MULTILINE))
        for column, name in COUNTS.items()
    }


async def soak(
    url: str, root: psutil.Process, options: argparse.Namespace, file: TextIO
) -> tuple[list[Row], Counter[str]]:
    """Send requests at the rate, whether or not those before them are answered, and measure now and then."""
    draw = random.Random(options.seed)
    rows: list[Row] = []
    outcomes: Counter[str] = Counter()
    writer = csv.DictWriter(file, ("seconds", "requests", "unexpected", "cpu", *COUNTS, *PARTS))
    writer.writeheader()
    begun = time.monotonic()

    async def note() -> None:
        unexpected = sum(count for outcome, count in outcomes.items() if ": " in outcome)
        row = {"seconds": round(time.monotonic() - begun, 1), "requests": outcomes.total(), "unexpected": unexpected}
        rows.append({**row, **counts((await client.get("/metrics")).text), **measure(root)})
        writer.writerow(rows[-1])
        file.flush()

    async def one(kind: str, number: int) -> None:
        try:
            outcomes[await send(client, kind, make_body(kind, number + 1000, random.Random(number)))] += 1
        except httpx.HTTPError as error:
            outcomes[f"{kind}: {type(error).__name__}"] += 1

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        async with asyncio.TaskGroup() as sending:
            for number in range(int(options.seconds * options.rate)):
                if number % max(1, round(options.every * options.rate)) == 0:
                    await note()
                kind = draw.choices(tuple(KINDS), tuple(KINDS.values()))[0]
                sending.create_task(one(kind, number))
                await asyncio.sleep(max(0.0, begun + (number + 1) / options.rate - time.monotonic()))
        await note()
    return rows, outcomes


def problems(rows: Sequence[Row], outcomes: Counter[str]) -> list[str]:
    """What is not as it should be."""
    found = [f"{count} x {outcome}" for outcome, count in outcomes.items() if ": " in outcome]
    half = rows[len(rows) // 2]
    for part in PARTS:
        growth = rows[-1][part] - half[part]
        if growth > max(GROWTH_BYTES, GROWTH_SHARE * half[part]):
            found.append(f"the memory of {part} grew by {growth / 1e6:.1f} MB in the second half")
    return found


def show(rows: Sequence[Row], outcomes: Counter[str], console: Console) -> None:
    """A table of ten of the rows, in MB."""
    console.print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())), highlight=False)
    console.print(f"processor time: {(rows[-1]['cpu'] - rows[0]['cpu']) / rows[-1]['seconds']:.2f} cores")
    table = Table("seconds", "requests", *PARTS)
    step = max(1, len(rows) // 10)
    for row in (*rows[:-1:step], rows[-1]):
        sizes = (f"{row[part] / 1e6:.0f}" for part in PARTS)
        table.add_row(f"{row['seconds']:,.0f}", f"{row['requests']:,.0f}", *sizes)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster_soak", description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--rate", type=float, default=1.5, help="requests a second")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two measurements")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, default=Path("cluster_soak.csv"), help="where the measurements go")
    parser.add_argument("flags", nargs="*", help="further flags of vlmserve cluster up, behind --")
    options = parser.parse_args(arguments)
    words = ("cluster", "up", "--engine", "mock", "--image-cache-memory", "8MiB", *options.flags)
    with serving(*words) as (url, root), options.csv.open("w", newline="") as file:
        rows, outcomes = asyncio.run(soak(url, root, options, file))
    console = Console()
    show(rows, outcomes, console)
    found = problems(rows, outcomes)
    for problem in found:
        console.print(problem, style="red", highlight=False)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
