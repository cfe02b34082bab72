"""Time to first token of known image questions after `kill -9` of a server with a disk cache, and in memory.

    .venv/bin/python -m benchmarks.restart                  # SmolVLM2-500M's shape, random weights
    .venv/bin/python -m benchmarks.restart --model pixie

The first server answers each question once, then it is killed. The second server reads each question's prompt from
disk, and finds it in memory when the question is repeated at once. Both first answer a question about another image.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from benchmarks.command import model_parser, run, show_rows
from benchmarks.image_reuse import image_file
from benchmarks.random_models import RANDOM_MODELS
from benchmarks.soak import serving

QUESTION = "How many objects are in the image, and which colors do they have?"
WRITTEN = 2.0
"""Seconds without a new file after which all are written."""
ANSWER_SECONDS = 600


class Client:
    """Asks the questions one after the other. Answers have one token."""

    def __init__(self, http: httpx.Client, options: argparse.Namespace) -> None:
        self._http, self._side, self._count = http, options.image_side, options.questions
        self._model = http.get("/v1/models").json()["data"][0]["id"]
        self.ask(-1)

    def ask(self, number: int) -> tuple[float, str]:
        """Seconds to the first token, and the answer."""
        url = "data:image/png;base64," + base64.b64encode(image_file(number, self._side)).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        first, text, started = 0.0, "", time.perf_counter()
        with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    delta = json.loads(line[6:])["choices"][0]["delta"]
                    if delta.get("content"):
                        first = first or time.perf_counter() - started
                        text += delta["content"]
        return first or time.perf_counter() - started, text

    def ask_all(self, repeats: int = 0) -> list[list[tuple[float, str]]]:
        """By question, the first answer and its repetitions."""
        return [[self.ask(number) for _ in range(1 + repeats)] for number in range(self._count)]


@contextmanager
def server(options: argparse.Namespace, folder: Path, disk: Path) -> Iterator[Client]:
    """Kill the server at the end, once no more files are written."""
    flags = ["--disk-cache", str(disk), "--kv-cache-memory", options.kv_cache_memory, "--dtype", options.dtype]
    with serving("serve", str(folder), "--device", options.device, *flags) as (url, process):
        with httpx.Client(base_url=url, timeout=ANSWER_SECONDS) as http:
            yield Client(http, options)
        files, changed = 0, time.monotonic()
        while time.monotonic() - changed < WRITTEN:
            time.sleep(WRITTEN / 10)
            found = sum(1 for _ in disk.iterdir())
            files, changed = found, changed if found == files else time.monotonic()
        process.kill()


def measure(options: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as place:
        disk = options.disk or Path(place)
        if not options.prepared:
            with server(options, folder, disk) as client:
                times["cold"] = [seconds for [(seconds, _)] in client.ask_all()]
            console.print(f"{sum(file.stat().st_size for file in disk.iterdir()) / 1e6:.0f} MB on disk")
        with server(options, folder, disk) as client:
            found = client.ask_all(options.repeats)
    times["after kill -9"] = [first for (first, _), *_ in found]
    times["in memory"] = [seconds for _, *again in found for seconds, _ in again]
    wrong = sum(text != answer for (_, answer), *again in found for _, text in again)
    warm = statistics.median(times["in memory"])
    rows = [
        [name, 1000 * statistics.median(one), 1000 * max(one), statistics.median(one) / warm]
        for name, one in times.items()
    ]
    return {
        "title": "Image questions after a restart",
        "command": " ".join(["python -m benchmarks.restart", *sys.argv[1:]]),
        "columns": ["questions", "median ms", "maximum ms", "ratio"],
        "rows": [[name, *(float(f"{figure:.3g}") for figure in figures)] for name, *figures in rows],
        "different": wrong,
    }


def show(report: dict[str, Any], console: Console) -> None:
    show_rows(report)
    console.print(f"{report['different']} answers in memory differ from those after the restart")


def save_random_smolvlm(folder: Path) -> Path:
    RANDOM_MODELS["smolvlm2"].write(folder)
    return folder


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = model_parser("benchmarks.restart", __doc__, "SmolVLM2-500M's shape with random weights")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of each question in memory")
    parser.add_argument("--image-side", type=int, default=480, help="pixels of an image's side")
    parser.add_argument("--disk", type=Path, help="folder of the disk cache (default: temporary)")
    parser.add_argument("--prepared", action="store_true", help="an earlier run with --disk has asked the questions")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    run(parse(arguments), save_random_smolvlm, measure, show)


if __name__ == "__main__":
    main()
