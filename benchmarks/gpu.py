"""What a GPU makes of the kernels and of a model of Mistral-7B's shape, for a machine that is there for ten minutes.

    .venv/bin/python -m benchmarks.gpu --json build/gpu.json
    .venv/bin/python -m benchmarks.gpu --stages products decode      # only these
    .venv/bin/python -m benchmarks.gpu --device cpu --tiny           # tries the benchmark itself

Each stage is a process with a time limit. The report is written after each, and what a stage measured before it failed
is kept, so that it stays when the machine goes. At the end comes a table of the targets and of what was reached, see
`benchmarks.gpu_targets`. Weights are random; no checkpoint is read.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_decode, gpu_images, gpu_pieces, gpu_stages, gpu_targets
from benchmarks.gpu_stages import Measured, Sizes

LIMITS = {
    "bandwidth": 20,
    "checks": 95,
    "products": 40,
    "attention": 35,
    "decode": 100,
    "images": 65,
    "memory": 25,
    "prompts": 30,
    "pieces": 40,
    "tiles": 75,
    "trace": 15,
}
"""Seconds for each stage, in their order: nine minutes in all."""
KEPT_CHARACTERS = 20_000
"""Of what a failed stage says last."""


def _tiles(device: torch.device, sizes: Sizes, folder: Path) -> Measured:
    from benchmarks import gpu_tiles  # It imports Triton, which need not be there.

    return gpu_tiles.tiles(device, sizes, folder)


MEASURES: dict[str, Callable[[torch.device, Sizes, Path], Measured]] = {
    "bandwidth": gpu_stages.bandwidth,
    "checks": gpu_stages.checks,
    "products": gpu_stages.products,
    "attention": gpu_stages.attention,
    "decode": gpu_decode.decode,
    "images": gpu_images.images,
    "memory": gpu_stages.memory,
    "prompts": gpu_decode.prompts,
    "pieces": gpu_pieces.pieces,
    "tiles": _tiles,
    "trace": gpu_decode.trace,
}


def run_stage(name: str, arguments: Sequence[str], limit: float) -> dict[str, Any]:
    """A stage's report, out of a process of its own; "error" says why it is not whole, "output" what was said last."""
    with tempfile.TemporaryDirectory(prefix="vlmserve-gpu-") as folder:
        result, output = Path(folder, "result.json"), Path(folder, "output")
        start = time.perf_counter()
        with output.open("w") as said:
            code = _run(command_of(name, result, arguments), limit, _environment(arguments), said.fileno())
        report = json.loads(result.read_text()) if result.exists() else {}
        report["seconds"] = round(time.perf_counter() - start, 1)
        if code is None:
            report["error"] = f"took longer than {limit:g} s"
        elif code < 0:
            report["error"] = f"ended by {signal.Signals(-code).name}"
        elif code:
            report["error"] = f"ended with {code}"
        if code != 0:
            report["output"] = output.read_text(errors="replace")[-KEPT_CHARACTERS:]
    return report


def command_of(name: str, result: Path, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu", "--run", name, "--result", str(result), *arguments]


def _run(command: Sequence[str], limit: float, environment: dict[str, str], output: int) -> int | None:
    """A command's exit code; None: it took too long. Processes that it started end with it, so that none of them
    disturbs the next stage."""
    process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment(arguments: Sequence[str]) -> dict[str, str]:
    """Of a stage: on a CPU, kernels in Triton are interpreted. Where a process dies, Python says where it was."""
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    return {**environment, "TRITON_INTERPRET": "1"} if "cpu" in arguments else environment


def run_stages(
    names: Sequence[str], arguments: Sequence[str], output: Path | None, device: torch.device
) -> dict[str, Any]:
    """The reports of all stages, and the targets; written after each."""
    report: dict[str, Any] = {"device": describe(device), "torch": torch.__version__, "stages": {}}
    for name in names:
        report["stages"][name] = run_stage(name, arguments, LIMITS[name])
        print(name, json.dumps(report["stages"][name], indent=1), flush=True)
        report["targets"] = [row._asdict() for row in gpu_targets.rows(report)]
        if output:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(report, indent=2) + "\n")
    print(gpu_targets.table(gpu_targets.rows(report)), flush=True)
    return report


def describe(device: torch.device) -> str:
    """The GPU's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def measure(name: str, device: torch.device, sizes: Sizes, folder: Path, result: Path) -> None:
    """Run a stage in this process; the file has what it measured so far."""
    report: dict[str, Any] = {}
    # Written elsewhere and moved: whoever reads the file of a stage that was ended finds it whole.
    unfinished = result.with_suffix(".unfinished")
    for key, value in MEASURES[name](device, sizes, folder):
        report[key] = value
        unfinished.write_text(json.dumps(report))
        unfinished.replace(result)


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
        print("there is no CUDA device: nothing was measured (--device cpu --tiny tries the stages)", file=sys.stderr)
        return 2
    if options.run:
        sizes = gpu_stages.TINY if options.tiny else gpu_stages.FULL
        kept = options.json.parent if options.json else Path("build")
        measure(options.run, device, sizes, kept, options.result)
        return 0
    passed_on = ["--device", options.device, *(["--tiny"] if options.tiny else [])]
    passed_on += ["--json", str(options.json)] if options.json else []
    report = run_stages(options.stages, passed_on, options.json, device)
    return int(any("error" in stage for stage in report["stages"].values()))


if __name__ == "__main__":
    sys.exit(main())
