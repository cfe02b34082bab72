"""Host time of warm-up at start, for a model of Mistral-7B's shape, on a machine without a GPU.

    python -m benchmarks.null_gpu --run benchmarks.null_start

Runs warm-up twice, in two processes. The second one finds compiled kernels in Triton's cache.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from triton import knobs

from benchmarks import gpu_decode, gpu_stages, null_gpu
from vlmserve.runner.kv import PoolSizes
from vlmserve.runner.runner import ModelRunner
from vlmserve.runner.warm_up import warm_up_steps
from vlmserve.settings.config import EngineConfig

KINDS = {"none": "bfloat16", "int4": "int4", "lora": "bfloat16 with LoRA"}
PARAMETERS = 7.2e9
BYTES = {"none": 14.4e9, "int4": 4.0e9, "lora": 14.4e9}
"""Of the weights."""
READ_RATE, MULTIPLY_RATE = 4.3e12, 200e12
"""Bytes a second of a copy on an H200, and FLOP/s of prompts there. The second one is an estimate."""
SETTINGS = EngineConfig(max_model_len=8192)


def device_seconds(kind: str, rows: list[int]) -> float:
    """Estimate the device's time for passes of so many rows."""
    return sum(max(BYTES[kind] / READ_RATE, 2 * PARAMETERS * count / MULTIPLY_RATE) for count in rows)


def warm_up(kind: str) -> dict[str, float]:
    """Load a random model and warm it up, with the settings' defaults."""
    library, loaded, passes = ctypes.CDLL(null_gpu.LIBRARY), list[str](), list[int]()
    knobs.runtime.jit_post_compile_hook = lambda fn, **rest: loaded.append(fn.name)
    model = gpu_decode.random_model(
        torch.device("cuda"), gpu_stages.FULL, "none" if kind == "lora" else kind, eager=False
    )
    layers = type(model.language_model).forward

    def counted(decoder: Any, embeddings: Tensor, *rest: Any, **options: Any) -> Tensor:
        passes.append(len(embeddings))
        return layers(decoder, embeddings, *rest, **options)

    type(model.language_model).forward = counted  # type: ignore[method-assign]
    adapters = gpu_decode.random_adapter(model, loaded=False) if kind == "lora" else None
    runner = ModelRunner(model, PoolSizes(SETTINGS.block_size, 4000), gpu_decode.no_grammars, adapters)
    loaded.clear()
    before, started = null_gpu.counts(library), (time.perf_counter(), time.process_time())
    warm_up_steps(
        runner,
        max_num_seqs=SETTINGS.max_num_seqs,
        max_num_batched_tokens=SETTINGS.max_num_batched_tokens,
        max_model_len=SETTINGS.max_model_len or 0,
        seconds=3600,
    )
    seconds, processor = time.perf_counter() - started[0], time.process_time() - started[1]
    graphs = null_gpu.counts(library).graphs - before.graphs
    launches = null_gpu.counts(library).launches - before.launches
    found = {"seconds": seconds, "processor": processor, "kernels": len(loaded), "passes": len(passes)}
    return found | {"graphs": graphs, "launches": launches, "device": device_seconds(kind, passes)}


def main(arguments: list[str]) -> int:
    if arguments:
        print(json.dumps(warm_up(arguments[0])))
        return 0
    table = Table(
        "weights", "kernels", "launches", "replays", "cold, s", "warm, s", "warm, CPU s", "device, s (estimate)"
    )
    for kind, name in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            # All of the time is the host's if kernels take none.
            seen = {**os.environ, "TRITON_CACHE_DIR": folder, "NULL_GPU_KERNEL": "0"}
            command = [sys.executable, "-m", "benchmarks.null_start", kind]
            cold, warm = (
                json.loads(subprocess.run(command, env=seen, check=True, stdout=subprocess.PIPE).stdout)
                for _ in range(2)
            )
        counts = (str(warm[count]) for count in ("kernels", "launches", "graphs"))
        times = (cold["seconds"], warm["seconds"], warm["processor"], warm["device"])
        table.add_row(name, *counts, *(f"{one:.1f}" for one in times))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
