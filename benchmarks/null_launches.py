"""Kernel launches of one layer of Mistral-7B's shape and memory of graphs, by kind of weights, without a GPU.

    python -m benchmarks.null_gpu --run benchmarks.null_launches

The counts are exact: a busy machine does not change them.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks import gpu_decode, null_gpu
from vlmserve.devices.device import Device
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.layers.layer import arrange_layers
from vlmserve.layers.linear import Linear
from vlmserve.settings.quantization import QuantizationConfig

KINDS = {"none": "bfloat16", "int4": "int4", "fp8": "FP8"}
STREAMS = (256, 64, 1)
"""In the order of warm-up: graphs of smaller batches reuse the memory of larger ones."""
PROMPT = 1000
CAPTURED = "memory of graphs, MiB"
LAYERS = (2, 4)
"""Layers of two models: their difference excludes launches outside of layers."""


def float8_weights(modules: nn.Module, on: Device, quantization: QuantizationConfig | None = None) -> None:
    """Fill all layers with float8 zeros, in place of `gpu_decode.random_weights`."""
    for path, module in modules.named_modules():
        if isinstance(module, Linear) and ".layers." in path:
            shape = module.out_features, module.in_features
            values = torch.zeros(shape, dtype=torch.uint8, device=on.torch_device)
            scales = torch.zeros(len(values), 1, device=on.torch_device)
            module.quantize(QuantizedWeight(8, shape[1], values, scales, scales, is_float8=True))
    arrange_layers(modules, on)


def pools() -> dict[tuple[int, int], int]:
    """Bytes of torch's private memory pools, which graphs allocate from."""
    found: dict[tuple[int, int], int] = {}
    for segment in torch.cuda.memory_snapshot():
        pool = tuple(segment["segment_pool_id"])
        if pool != (0, 0):
            found[pool] = found.get(pool, 0) + segment["total_size"]
    return found


def counted(kind: str, layers: int, library: ctypes.CDLL) -> dict[str, float]:
    """Kernels of each step: nodes of the graph of decodes, and the host's launches of a prompt. Memory of graphs."""
    earlier = pools()
    sizes = replace(null_gpu.SIZES, config=null_gpu.SIZES.config | {"num_hidden_layers": layers}, steps=4)
    weights = gpu_decode.random_weights
    gpu_decode.random_weights = float8_weights if kind == "fp8" else weights
    try:
        scheme = "none" if kind == "fp8" else kind
        model = gpu_decode.random_model(torch.device("cuda"), sizes, scheme, eager=False)
    finally:
        gpu_decode.random_weights = weights
    found: dict[str, float] = {}
    for count in STREAMS:
        streams = gpu_decode.Streams(model, sizes, count)
        streams.steps_ahead(2)
        found[f"decode, {count} streams"] = null_gpu.counts(library).nodes
    before = null_gpu.counts(library)
    streams.forget(0)
    streams.prompt(0, PROMPT)
    found[f"prompt of {PROMPT:,} tokens"] = null_gpu.counts(library).launches - before.launches
    found[CAPTURED] = sum(size for pool, size in pools().items() if pool not in earlier) / 2**20
    return found


def main() -> int:
    library = ctypes.CDLL(null_gpu.LIBRARY)
    few, many = ({kind: counted(kind, layers, library) for kind in KINDS} for layers in LAYERS)
    table = Table("step", *KINDS.values())
    for step in few["none"]:
        each = [(many[kind][step] - few[kind][step]) / (LAYERS[1] - LAYERS[0]) for kind in KINDS]
        if step == CAPTURED:
            each = [many[kind][step] for kind in KINDS]
        table.add_row(step, *(f"{number:g}" for number in each))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
