"""Native attention over a KV cache in one tensor per layer, compared with one buffer of pages for all layers.

    .venv/bin/python -m benchmarks.cache_layout --kernels avx2

A page of the buffer holds a block of all layers, keys and values of one layer after the other. Both layouts hold equal
numbers and give equal outputs. The two are interleaved; figures are medians of processor time in one thread.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import keep
from vlmserve.kernels.attention import AttentionContext, BatchMetadata, LayerCache
from vlmserve.kernels.choice import choose_kernels
from vlmserve.kernels.cpu_attention import CpuAttention
from vlmserve.layer_specs import AttentionSpec

CPU, DTYPE = torch.device("cpu"), torch.bfloat16
CONTEXT, BLOCK_SIZE, CHUNK = 16_000, 16, 16
DECODES = 8
"""Decodes measured for each chunk, because they are shorter."""
SHAPES = {
    "Llama 3.2 1B": [AttentionSpec(32, 8, 64, 64**-0.5)] * 16,
    "Gemma 3 1B": [AttentionSpec(4, 1, 256, 256**-0.5, None if i % 6 == 5 else 512) for i in range(26)],
}


def layouts(layers: Sequence[AttentionSpec]) -> list[tuple[list[LayerCache], int]]:
    """Caches of one tensor per layer, and of one buffer, with the distance of adjacent blocks in blocks.

    Keys and values of a native block of these shapes are equally large. So block ``i`` of a layer is block
    ``2 * layers * i`` of the buffer from that layer's offset on.
    """
    backend, count, pieces = CpuAttention(), CONTEXT // BLOCK_SIZE, 2 * len(layers)
    separate = [backend.allocate(count, BLOCK_SIZE, layer, DTYPE, CPU) for layer in layers]
    buffer = backend.allocate(count * pieces, BLOCK_SIZE, layers[0], DTYPE, CPU).keys.flatten(1)
    pages = buffer.view(count, pieces, -1)
    numbers = torch.randn(pages[:, 0].shape).to(DTYPE)
    for number, cache in enumerate(separate):
        for place, tensor in enumerate((cache.keys, cache.values)):
            tensor.flatten(1).copy_(numbers)
            pages[:, 2 * number + place] = numbers
    joint = [LayerCache(buffer[2 * number :], buffer[2 * number + 1 :], BLOCK_SIZE) for number in range(len(layers))]
    return [(separate, 1), (joint, pieces)]


def attend(contexts: Sequence[AttentionContext], inputs: Sequence[Tensor]) -> tuple[float, list[Tensor]]:
    """Processor seconds and outputs of all layers."""
    backend = CpuAttention()
    started = time.process_time()
    outputs = [backend.attend(*inputs, context) for context in contexts]
    return time.process_time() - started, outputs


def measure(repeats: int) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for name, layers in SHAPES.items():
        both = layouts(layers)
        for order, tokens in itertools.product(("ascending", "shuffled"), (1, CHUNK)):
            blocks = list(range(CONTEXT // BLOCK_SIZE))
            if order == "shuffled":
                random.Random(0).shuffle(blocks)
            contexts = []
            for caches, step in both:
                tables = [[block * step for block in blocks]]
                metadata = BatchMetadata.of_chunks([(CONTEXT - tokens, CONTEXT)], tables, BLOCK_SIZE)
                plan = CpuAttention().prepare(metadata, BLOCK_SIZE, layers, DTYPE)
                contexts.append(
                    [AttentionContext(cache, spec, metadata, plan) for cache, spec in zip(caches, layers, strict=True)]
                )
            spec = layers[0]
            heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
            inputs = [torch.randn(tokens, count, spec.head_size).to(DTYPE) for count in heads]
            outputs = [attend(own, inputs)[1] for own in contexts]
            if not all(map(torch.equal, *outputs)):
                raise AssertionError("the layouts differ in their results")
            seconds = [
                [attend(own, inputs)[0] for own in contexts] for _ in range(repeats * (DECODES if tokens == 1 else 1))
            ]
            separate, joint = (1e3 * statistics.median(column) for column in zip(*seconds, strict=True))
            ratio = statistics.median(one / other for one, other in seconds)
            what = "decode" if tokens == 1 else f"chunk of {tokens}"
            rows.append([f"{name}, {what}, {order} blocks", round(separate, 1), round(joint, 1), round(ratio, 3)])
            print(rows[-1], flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cache_layout")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    options = parser.parse_args(arguments)
    if (isa := choose_kernels(options.kernels, DTYPE)) is None:
        parser.error("--kernels: name native kernels, such as avx2")
    torch.set_num_threads(1)
    rows = measure(options.repeats)
    keep(
        {
            "title": f"Layout of the KV cache, {CONTEXT:,} tokens, {isa}",
            "command": f"python -m benchmarks.cache_layout --kernels {isa} --repeats {options.repeats}",
            "model": "attention of " + " and ".join(SHAPES),
            "weights": "",
            "versions": {"torch": torch.__version__},
            "columns": ["case", "one tensor per layer, ms", "one buffer, ms", "speed of the buffer, ratio"],
            "rows": rows,
        },
        options,
    )


if __name__ == "__main__":
    main()
