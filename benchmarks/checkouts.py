"""The engine of another checkout, interleaved with this one's in the same run.

    git worktree add ../before REVISION
    (cd ../before && python setup.py -q build_ext --inplace)
    python -m benchmarks.checkouts ../before --kernels avx2
    python -m benchmarks.checkouts ../before --model pixie --images

Each checkout has a process of its own, which loads the model once and answers the jobs of `benchmarks.engine`. Only one
computes at a time. A ratio is the median over pairs of runs of the same jobs; above 1, this checkout is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.command import run, show_rows
from benchmarks.engine import jobs_parser, save_random_llama

ROOT = Path(__file__).parent.parent
PROCESS = ROOT / "benchmarks/checkout_process.py"
MEASURES = ("tokens/s", "TTFT", "TPOT", "step overhead")


class Checkout:
    """A process that runs jobs with the engine of one checkout. Its errors go to the terminal."""

    def __init__(self, root: Path, options: dict[str, Any]) -> None:
        paths = os.pathsep.join(map(str, (root / "src", root)))
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
        command = [sys.executable, str(PROCESS), json.dumps(options)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def __call__(self, concurrency: int, seed: int) -> dict[str, Any]:
        """Run jobs. Times are in seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{concurrency} {seed}\n".encode())
        self._process.stdin.flush()
        while line := self._process.stdout.readline():
            if line.startswith(b"{"):
                return dict(json.loads(line))
        raise RuntimeError(f"a process of a checkout ended with status {self._process.wait()}")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(checkouts: Sequence[Checkout], concurrency: int, repeats: int) -> list[list[Any]]:
    """Run as many pairs of runs. Returns a row for each measure: both medians and the ratio, larger if the second
    checkout is faster."""
    pairs: list[list[dict[str, Any]]] = []
    for repeat in range(-1, repeats):
        seed = 1000 * concurrency + repeat if repeat >= 0 else -concurrency
        places = (0, 1) if repeat % 2 else (1, 0)
        done = {place: checkouts[place](concurrency, seed) for place in places}
        if repeat >= 0:
            pairs.append([done[0], done[1]])
    same = sum(before["tokens"] == after["tokens"] for before, after in pairs) / len(pairs)
    rows = []
    for name in MEASURES:
        values = [(before[name], after[name]) for before, after in pairs if before[name] and after[name]]
        if values:
            ratios = [after / before if name == "tokens/s" else before / after for before, after in values]
            before, after = (statistics.median(side) for side in zip(*values, strict=True))
            rows.append([concurrency, name, f"{before:.2f}", f"{after:.2f}", f"{statistics.median(ratios):.3f}", same])
    return rows


def measure(options: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    config = {
        name: getattr(options, name) for name in ("device", "dtype", "kernels", "kv_cache_memory", "speculation")
    } | {"num_threads": options.threads}  # fmt: skip
    asked = {
        "folder": str(folder), "images": options.images, "config": config,
        "prompt_lens": options.prompt_lens, "answer_lens": options.answer_lens,
    }  # fmt: skip
    checkouts = [Checkout(root, asked) for root in (options.other.resolve(), ROOT)]
    rows: list[list[Any]] = []
    for concurrency in options.concurrency:
        with console.status(f"{concurrency} at once ..."):
            rows += compare(checkouts, concurrency, options.repeats)
    for one in checkouts:
        one.end()
    return {
        "model": options.model or "random Llama of SmolLM2-135M's shape",
        "columns": ["At once", "Measure", "Other", "This", "Ratio", "Same tokens"],
        "rows": rows,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = jobs_parser(
        "benchmarks.checkouts", __doc__, prompt_lens=(8, 64), answer_lens=(4, 48), dtype="float32",
        kv_cache_memory="1GiB",
    )  # fmt: skip
    parser.add_argument("other", type=Path, help="folder of the other checkout, with its extension built")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--speculation", default="off", help="drafts, in checkouts that have some (default off)")
    parser.add_argument("--threads", type=int, help="CPU threads of each; default: the engine's choice")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--images", action="store_true", help="start every prompt with the same new image")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    run(options, partial(save_random_llama, tiny=options.tiny), measure, lambda report, _: show_rows(report))


if __name__ == "__main__":
    main()
