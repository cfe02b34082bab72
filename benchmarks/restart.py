"""Time to first token of known image questions, in memory and after `kill -9` with a disk cache.

    .venv/bin/python -m benchmarks.restart                  # CLIP ViT-L/14-336, random weights
    .venv/bin/python -m benchmarks.restart --model pixie

One process asks each question once, which is cold, and several times more, with all in memory. Then it kills itself.
The next process asks each question once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.command import model_parser, run, show_rows
from benchmarks.image_reuse import image_file, save_random_llava
from vlmserve.engine.engine import Engine
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.settings.config import EngineConfig, MediaConfig
from vlmserve.types import EngineRequest, SamplingParams

QUESTION = "How many objects are in the image, and which colors do they have?"
WRITTEN = 120
"""Seconds that the writing of the disk cache may take."""


class Asker:
    """An engine whose answers have one token."""

    def __init__(self, options: argparse.Namespace, folder: Path, disk: str) -> None:
        settings = {"device": options.device, "dtype": options.dtype, "kv_cache_memory": options.kv_cache_memory}
        config = EngineConfig(model=str(folder), disk_cache=disk, **settings)
        self.engine, self._preparer = Engine(config, folder), RequestPreparer(folder, MediaConfig())
        self._files = [image_file(number, options.image_side) for number in range(options.questions)]
        self.ask(image_file(-1, options.image_side))

    def ask(self, image: bytes) -> float:
        """Seconds from the file to the first token."""
        started = time.perf_counter()
        parts = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
        prompt = self._preparer.chat([{"role": "user", "content": parts}], allow_local=True)
        self.engine.add(EngineRequest("one", prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)))
        while not any(output.finish_reason for output in self.engine.step()):
            pass
        return time.perf_counter() - started

    def ask_all(self) -> list[float]:
        return [self.ask(file) for file in self._files]

    def wait_until_written(self) -> None:
        end = time.monotonic() + WRITTEN
        while self.engine.stats().disk_queued_bytes and time.monotonic() < end:
            time.sleep(0.05)


def serve(options: argparse.Namespace, folder: Path, disk: str, repeats: int, results: Connection) -> None:
    """Send the times of each pass over the questions, then die."""
    asker = Asker(options, folder, disk)
    for _ in range(1 + repeats):
        results.send(asker.ask_all())
        asker.wait_until_written()
    results.send(asker.engine.stats().disk_hits)
    os.kill(os.getpid(), signal.SIGKILL)


def measure(options: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    times: dict[str, list[float]] = {}
    start = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=options.disk) as disk:
        for names in (("cold", "in memory"), ("after kill -9",)):
            results, theirs = start.Pipe(duplex=False)
            repeats = options.repeats if len(names) > 1 else 0
            process = start.Process(target=serve, args=(options, folder, disk, repeats, theirs))
            process.start()
            theirs.close()
            passes = [results.recv() for _ in range(1 + repeats)]
            console.print(f"{names}: {results.recv()} entries read")
            process.join()
            times[names[0]] = passes[0]
            if repeats:
                times[names[-1]] = [seconds for one in passes[1:] for seconds in one]
    warm = statistics.median(times["in memory"])
    rows = []
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        rows.append([name, f"{1000 * middle:.1f}", f"{1000 * max(seconds):.1f}", f"{middle / warm:.2f}"])
    return {"columns": ["questions", "median ms", "maximum ms", "ratio"], "rows": rows, "seconds": times}


def parse() -> argparse.Namespace:
    parser = model_parser("benchmarks.restart", __doc__, "a random LLaVA with CLIP ViT-L/14-336")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3, help="passes with all in memory")
    parser.add_argument("--image-side", type=int, default=480, help="pixels of an image's side")
    parser.add_argument("--disk", help="folder for the disk caches (default: that for temporary files)")
    return parser.parse_args()


def main() -> None:
    options = parse()
    run(options, save_random_llava, measure, lambda report, _: show_rows(report))


if __name__ == "__main__":
    main()
