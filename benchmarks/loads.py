"""Seconds until a GGUF file of a published size answers, compared with llama.cpp: interleaved starts of new processes.

    python -m benchmarks.loads
    python -m benchmarks.loads --shape qwen3-4b --kind Q8_0 --turns 6 --json report.json

Before each start the file leaves the system's file cache. A virtual machine's host may still have it, so the order of
systems changes with each turn. "mapped": vlmserve's next start, from its cache of packed weights, which stays in the
file cache. "Ratio" is the median of the turns' ratios to llama.cpp. Store a report in
`benchmarks/results/engines/MACHINE`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import keep, show_rows
from benchmarks.peers import is_installed, versions
from benchmarks.sizes import SHAPES, Job, gguf_file, run_job

COLUMNS = ("system", "seconds to ready", "ratio")
PEER = "llama.cpp"


def forget(file: Path) -> None:
    """Drop a file from the system's file cache."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def seconds_to_ready(system: str, file: Path, vocabulary: int, options: Mapping[str, Any], *, cold: bool) -> float:
    if cold:
        forget(file)
    job = Job(system, str(file), options, vocabulary, False, 1, 1, (1, 1), only_start=True)
    return float(run_job(job)["ready"])


def rows_of(file: Path, vocabulary: int, cache: Path, turns: int) -> list[list[Any]]:
    """Measure every system in each turn. cache: folder of packed weights."""
    packed = {"weights_cache": str(cache)}
    starts: dict[str, tuple[str, Mapping[str, Any], bool]] = {
        "vlmserve": ("vlmserve", {"weights_cache_size": 0}, True),
        "vlmserve, mapped": ("vlmserve", packed, False),
    }
    if is_installed("llama-cpp-python"):
        starts[PEER] = (PEER, {}, True)
    seconds_to_ready("vlmserve", file, vocabulary, packed, cold=False)  # fills the cache
    taken: dict[str, list[float]] = {name: [] for name in starts}
    for turn in range(turns):
        for name in sorted(starts, reverse=turn % 2 == 1):
            system, options, cold = starts[name]
            taken[name].append(seconds_to_ready(system, file, vocabulary, options, cold=cold))
    rows = []
    for name, seconds in taken.items():
        ratios = [own / peer for own, peer in zip(seconds, taken.get(PEER, []), strict=False)]
        ratio = float(f"{statistics.median(ratios):.3g}") if ratios else None
        rows.append([name, float(f"{statistics.median(seconds):.3g}"), ratio])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one file and show a table."""
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loads", description=description)
    parser.add_argument(
        "--shape", choices=[name for name, shape in SHAPES.items() if not shape.vision], default="llama-8b"
    )
    parser.add_argument("--kind", default="Q4_K_M", help="type of the GGUF file, or a mixture (default Q4_K_M)")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="keep files here and use those that are there")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    options = parser.parse_args(arguments)
    shape = SHAPES[options.shape]
    with tempfile.TemporaryDirectory(prefix="vlmserve-loads-") as temporary:
        file = gguf_file(options.folder or Path(temporary), options.shape, options.kind)
        rows = rows_of(file, shape.text["vocab_size"], Path(temporary) / "cache", options.turns)
        size = file.stat().st_size
    report = {
        "title": "Starts of a GGUF file, and llama.cpp",
        "command": " ".join(["python -m benchmarks.loads", *(sys.argv[1:] if arguments is None else arguments)]),
        "model": f"{options.shape}, {options.kind}, {size / 1e9:.1f} GB",
        "weights": "random",
        "versions": versions("llama-cpp-python"),
        "columns": list(COLUMNS),
        "rows": rows,
    }
    show_rows(report)
    keep(report, options)


if __name__ == "__main__":
    main()
