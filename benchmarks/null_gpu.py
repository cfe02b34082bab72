"""What the host does for a GPU, on a machine that has none: how long it takes for a step, what it launches and copies
outside of graphs, and how often it waits.

    python -m benchmarks.null_gpu                                        # a model of Mistral-7B's shape
    python -m benchmarks.null_gpu --run benchmarks.gpu --stages decode   # another module

`null_gpu.c` stands in for CUDA's libraries: launches, graphs, streams, events and memory are real to torch and Triton.
Kernels compute nothing, so no answer is right. It needs a torch that is built for CUDA, Triton, and a C compiler.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import gpu_decode, gpu_stages

SOURCE = Path(__file__).with_suffix(".c")
FOLDER = Path("build", "null_gpu")
LIBRARY = "libcuda.so.1"
STREAMS = (1, 64, 256)
PROMPTS = (32, 1000)
BESIDE = (64, (32, 400))
"""Streams, and prompts beside their decodes."""
STEPS = 50
REPEATS = 9
SIZES = replace(gpu_stages.FULL, steps=STEPS * (REPEATS + 3) // 2)
"""Requests have blocks for twice these steps: for those that are measured, and the first ones."""

WITHOUT_CUDNN = """import torch

def load():
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
"""
"""cuDNN brings its own copy of CUDA's runtime, which wants the real driver."""


class Counts(NamedTuple):
    """What was launched and waited for. nodes: of the last graph that was launched. busy: nanoseconds of the device."""

    launches: int
    graphs: int
    nodes: int
    copies: int
    waits: int
    busy: int


def headers() -> list[Path]:
    """Folders of CUDA's headers: first those that come with torch, whose version is torch's."""
    folders = {"nvidia": ("cu13/include", "cuda_runtime/include"), "triton": ("backends/nvidia/include",)}
    roots = [(Path(root), name) for root in sys.path for name in folders]
    return [found for root, name in roots for part in folders[name] if (found := root / name / part).is_dir()]


def build(folder: Path) -> Path:
    """Compile the library into a folder, with what switches cuDNN off; returns the library. Raises CalledProcessError
    where it does not compile."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder.resolve() / LIBRARY
    flags = ["-O2", "-Wall", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}"]
    flags += [argument for path in headers() for argument in ("-isystem", str(path))]
    compiler = os.environ.get("CC", "gcc")
    subprocess.run([compiler, *flags, "-o", str(library), str(SOURCE), "-ldl", "-lpthread"], check=True)
    (folder / "null_gpu_backend.py").write_text(WITHOUT_CUDNN)
    entry = folder / "null_gpu_backend-0.dist-info"
    entry.mkdir(exist_ok=True)
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: null_gpu_backend\nVersion: 0\n")
    # torch calls these when it is imported.
    (entry / "entry_points.txt").write_text("[torch.backends]\nnull_gpu = null_gpu_backend:load\n")
    return library


def environment(library: Path) -> dict[str, str]:
    """In which processes see the null GPU."""
    folder = str(library.parent)
    return {
        **os.environ,
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": folder,
        "TRITON_LIBCUDA_PATH": folder,
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")])),
    }


def counts(library: ctypes.CDLL) -> Counts:
    """So far, in this process."""
    values = (ctypes.c_int64 * len(Counts._fields))()
    library.null_gpu_counts(values)
    return Counts(*values)


class Figure(NamedTuple):
    """What the host does for one step. milliseconds: median. nodes: of the graph that the step launches, 0 for none."""

    milliseconds: float
    launches: float
    nodes: int
    copies: float
    waits: float


def figure(work: Callable[[], object], library: ctypes.CDLL, *, repeats: int, steps: int = 1) -> Figure:
    """Of work that is so many steps, in a process that sees the null GPU."""
    work()
    taken, before = [], counts(library)
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        taken.append((time.perf_counter() - start) / steps)
    after = counts(library)

    def each(name: str) -> float:
        return float(getattr(after, name) - getattr(before, name)) / repeats / steps

    nodes = after.nodes if after.graphs > before.graphs else 0
    return Figure(1e3 * statistics.median(taken), each("launches"), nodes, each("copies"), each("waits"))


def figures() -> dict[str, Figure]:
    """Of a model of Mistral-7B's shape in bfloat16, in a process that sees the null GPU."""
    library, device = ctypes.CDLL(LIBRARY), torch.device("cuda")
    model = gpu_decode.random_model(device, gpu_stages.FULL, "none", eager=False)
    found = {}
    for count in STREAMS:
        streams = gpu_decode.Streams(model, SIZES, count)
        found[f"{count} streams"] = decodes(streams, library)
        for length in BESIDE[1] if count == BESIDE[0] else ():
            found[f"{count} streams and a prompt of {length}"] = beside(streams, length, library)
    for length in PROMPTS:
        found[f"prompt of {length}"] = prompts(streams, STREAMS[-1], length, library)
    streams = gpu_decode.Streams(model, SIZES, 1, gpu_decode.random_adapter(model))
    found["1 streams, LoRA"] = decodes(streams, library)
    for length in PROMPTS:
        found[f"prompt of {length}, LoRA"] = prompts(streams, 1, length, library)
    return found


def decodes(streams: gpu_decode.Streams, library: ctypes.CDLL) -> Figure:
    """Of steps that are submitted one ahead."""
    streams.steps_ahead(3)
    return figure(functools.partial(streams.steps_ahead, STEPS), library, repeats=REPEATS, steps=STEPS)


def beside(streams: gpu_decode.Streams, length: int, library: ctypes.CDLL) -> Figure:
    """Of decodes beside a prompt of so many tokens, and of forgetting that."""
    streams.prompt_beside(length)
    return figure(functools.partial(streams.prompt_beside, length), library, repeats=REPEATS)


def prompts(streams: gpu_decode.Streams, number: int, length: int, library: ctypes.CDLL) -> Figure:
    """Of a request with that number and so many tokens."""

    def prompt() -> None:
        streams.prompt(number, length)
        streams.forget(number)

    prompt()
    return figure(prompt, library, repeats=REPEATS)


def show(found: dict[str, Figure], console: Console) -> None:
    """As a table."""
    table = Table("step", "ms", "launches", "nodes", "copies", "waits")
    for name, one in found.items():
        cells = (
            f"{one.milliseconds:.2f}",
            f"{one.launches:.0f}",
            str(one.nodes),
            f"{one.copies:.0f}",
            f"{one.waits:.0f}",
        )
        table.add_row(name, *cells)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """The status of what ran; 2 where torch is not built for CUDA, or there is a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.null_gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--run", nargs=argparse.REMAINDER, metavar="MODULE", help="run this module with its arguments")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        show(figures(), Console())
        return 0
    if torch.version.cuda is None or torch.cuda.is_available():
        why = "this torch is not built for CUDA" if torch.version.cuda is None else "there is a GPU: see benchmarks.gpu"
        Console(stderr=True).print(why)
        return 2
    seen = environment(build(FOLDER))
    if options.run:
        return subprocess.run([sys.executable, "-m", *options.run], env=seen, check=False).returncode
    # Where the device takes no time, all of it is the host's.
    command = [sys.executable, "-m", "benchmarks.null_gpu", "--inside"]
    return subprocess.run(command, env={**seen, "NULL_GPU_KERNEL": "0"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
