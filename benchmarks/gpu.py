"""What a GPU makes of the kernels and of a model of Mistral-7B's shape, for a machine that is there for ten minutes.

    .venv/bin/python -m benchmarks.gpu --json build/gpu.json
    .venv/bin/python -m benchmarks.gpu --stages products decode      # only these
    .venv/bin/python -m benchmarks.gpu --device cpu --tiny           # tries the benchmark itself

Each stage is a process with a time limit, and the report is written after each, so that what was measured stays when
the machine goes. Weights are random; no checkpoint is read.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import gpu_images, gpu_pieces, gpu_stages
from benchmarks.gpu_stages import Sizes

LIMITS = {
    "bandwidth": 20,
    "checks": 100,
    "products": 60,
    "attention": 40,
    "decode": 120,
    "images": 60,
    "pieces": 40,
    "tiles": 80,
    "trace": 20,
}
"""Seconds for each stage, in their order: nine minutes in all."""


def _tiles(device: torch.device, sizes: Sizes, folder: Path) -> dict[str, Any]:
    from benchmarks import gpu_tiles  # It imports Triton, which need not be there.

    return gpu_tiles.tiles(device, sizes, folder)


MEASURES: dict[str, Callable[[torch.device, Sizes, Path], dict[str, Any]]] = {
    "bandwidth": gpu_stages.bandwidth,
    "checks": gpu_stages.checks,
    "products": gpu_stages.products,
    "attention": gpu_stages.attention,
    "decode": gpu_stages.decode,
    "images": gpu_images.images,
    "pieces": gpu_pieces.pieces,
    "tiles": _tiles,
    "trace": gpu_stages.trace,
}


def run_stage(name: str, arguments: Sequence[str], limit: float) -> dict[str, Any]:
    """A stage's report, out of a process of its own; "error" says why there is none."""
    with tempfile.TemporaryDirectory(prefix="vlmserve-gpu-") as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, "-m", "benchmarks.gpu", "--run", name, "--result", str(result), *arguments]
        start = time.perf_counter()
        try:
            run = subprocess.run(
                command, capture_output=True, text=True, timeout=limit, check=False, env=_environment(arguments)
            )
        except subprocess.TimeoutExpired:
            return {"error": f"took longer than {limit:g} s"}
        if run.returncode or not result.exists():
            return {"error": run.stderr[-2000:] or f"ended with {run.returncode}"}
        return {**json.loads(result.read_text()), "seconds": round(time.perf_counter() - start, 1)}


def _environment(arguments: Sequence[str]) -> dict[str, str]:
    """Of a stage: on a CPU, kernels in Triton are interpreted."""
    return {**os.environ, "TRITON_INTERPRET": "1"} if "cpu" in arguments else dict(os.environ)


def run_stages(
    names: Sequence[str], arguments: Sequence[str], output: Path | None, device: torch.device, console: Console
) -> dict[str, Any]:
    """The reports of all stages, written after each."""
    report: dict[str, Any] = {"device": describe(device), "torch": torch.__version__, "stages": {}}
    for name in names:
        report["stages"][name] = run_stage(name, arguments, LIMITS[name])
        console.print(f"[bold]{name}[/]", json.dumps(report["stages"][name], indent=1), highlight=False)
        if output:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(report, indent=2) + "\n")
    return report


def describe(device: torch.device) -> str:
    """The GPU's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a stage has failed, and 2 where there is no device to measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--stages", nargs="+", choices=list(LIMITS), default=list(LIMITS))
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the benchmark itself")
    parser.add_argument("--json", type=Path, help="write the report to this file, after each stage")
    parser.add_argument("--run", choices=list(LIMITS), help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        Console(stderr=True).print(
            "there is no CUDA device: nothing was measured (--device cpu --tiny tries the stages)"
        )
        return 2
    if options.run:
        sizes = gpu_stages.TINY if options.tiny else gpu_stages.FULL
        kept = options.json.parent if options.json else Path("build")
        options.result.write_text(json.dumps(MEASURES[options.run](device, sizes, kept)))
        return 0
    passed_on = ["--device", options.device, *(["--tiny"] if options.tiny else [])]
    passed_on += ["--json", str(options.json)] if options.json else []
    report = run_stages(options.stages, passed_on, options.json, device, Console())
    return int(any("error" in stage for stage in report["stages"].values()))


if __name__ == "__main__":
    sys.exit(main())
