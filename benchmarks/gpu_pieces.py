"""What a GPU makes of single pieces: pixels, towers of several images, KV offload, chunks over long contexts, and
products other than those of the other stages."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_stages import BLOCK_SIZE, Measured, Sizes, fill, layer_products, weight_of
from benchmarks.gpu_timing import Call, copies, per_launch, seconds_of
from vlmserve.devices.choice import open_device
from vlmserve.kernels import torch_int4
from vlmserve.kernels.attention import AttentionContext, BatchMetadata
from vlmserve.kernels.operations import NO_EPILOGUE
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.kernels.ranges import Ranges
from vlmserve.layer_specs import AttentionSpec
from vlmserve.layers.encoder_attention import EncoderAttention
from vlmserve.layers.stages import StageBudget, run_stages
from vlmserve.levels import Levels
from vlmserve.quant.methods.rtn import round_to_nearest

LEVELS = Levels(1 / 255, (0.5,) * 3, (0.25,) * 3)
TOWER_HEADS, TOWER_HEAD = 16, 80
"""Of Qwen2.5-VL."""
TILE_HEADS, TILE_HEAD, TILE_TOKENS = 16, 64, 577
"""Of LLaVA-1.5, whose towers take torch's attention."""


Report = dict[str, float | str]


def pieces(device: torch.device, sizes: Sizes, folder: Path) -> Measured:
    """Each by itself."""
    tiny = device.type == "cpu"
    yield "pixels", pixels(device, sizes, 56 if tiny else 1008)
    yield "tower", tower(device, sizes, (6, 3) if tiny else (4096, 1024, 2304, 576))
    yield "tiles", tile_attention(device, sizes, 10 if tiny else TILE_TOKENS)
    yield "offload", offload(device, sizes, 2 if tiny else 128)
    yield "chunks", chunks(device, sizes, 48 if tiny else 16384)
    yield "products", products(device, sizes)


def pixels(device: torch.device, sizes: Sizes, side: int) -> Report:
    """Eight images to the device and normalized there: bytes a second, and how long the host takes."""
    on, dtype = open_device(device, "auto", sizes.dtype, automatic=False)
    image = np.random.default_rng(0).integers(0, 256, (1, 3, side, side), np.uint8)
    taken = seconds_of(lambda: [on.upload_pixels(image, dtype, LEVELS) for _ in range(8)], device, sizes.repeats)
    return {"gb_s": 8 * image.nbytes / taken / 1e9, "ms_for_eight": taken * 1e3}


def tower(device: torch.device, sizes: Sizes, lengths: tuple[int, ...]) -> Report:
    """Attention of a layer over images of several sizes, together and one after the other."""
    on, dtype = open_device(device, "auto", sizes.dtype, automatic=False)
    ranges = Ranges.of(list(lengths), device)
    size = TOWER_HEADS * TOWER_HEAD
    qkv = torch.randn(sum(lengths), 3 * size, device=device, dtype=dtype)
    report: Report = {}
    for name, kernels in (
        ("together", on.encoder_ranges(TOWER_HEADS, TOWER_HEAD, dtype)),
        ("one after the other", None),
    ):
        layer = EncoderAttention(size, TOWER_HEADS, dtype=dtype)
        layer.arrange(on)
        layer.range_kernels = kernels
        taken = per_launch(
            [lambda layer=layer: run_stages(layer.over_ranges(qkv, ranges, StageBudget()))],  # type: ignore[misc]
            device, sizes.repeats,
        )  # fmt: skip
        products = sum(map(layer.products, lengths))
        report |= taken.named(f"microseconds, {name}")
        report[f"tflop_s, {name}"] = 2 * products / taken.seconds / 1e12
    return report


def tile_attention(device: torch.device, sizes: Sizes, tokens: int) -> Report:
    """Attention of a layer over images of one size: as towers of tiles take it, and by the kernel for images of several
    sizes."""
    on, dtype = open_device(device, "auto", sizes.dtype, automatic=False)
    layer = EncoderAttention(TILE_HEADS * TILE_HEAD, TILE_HEADS, dtype=dtype)
    layer.arrange(on)
    report: Report = {}
    for images in (1, 8):
        qkv = torch.randn(images, tokens, 3 * TILE_HEADS * TILE_HEAD, device=device, dtype=dtype)
        calls: dict[str, Call] = {"": partial(layer, qkv)}
        if (kernels := layer.range_kernels) is not None:
            calls[", by ranges"] = partial(kernels.attend, qkv.flatten(0, 1), Ranges.of([tokens] * images, device))
        for name, call in calls.items():
            report |= per_launch([call], device, sizes.repeats).named(f"microseconds, {images} images{name}")
    return report


def offload(device: torch.device, sizes: Sizes, count: int) -> Report:
    """So many blocks of all layers to host memory and back: bytes a second, and how long the host takes."""
    on, dtype = open_device(device, "auto", sizes.dtype, automatic=False)
    spec = _spec(sizes)
    backend = on.attention([spec], dtype)

    def allocate(blocks: int, where: torch.device) -> list[Any]:
        layers = sizes.config["num_hidden_layers"]
        return [backend.allocate(blocks, BLOCK_SIZE, spec, dtype, where) for _ in range(layers)]

    layers = allocate(count, device)
    host = on.host_blocks(layers, count, allocate)
    num_bytes = sum(tensor.nbytes for layer in layers for tensor in layer.tensors)
    blocks = list(range(count))
    report: Report = {}
    for name, copy in (("save", host.save), ("load", host.load)):
        taken = seconds_of(lambda copy=copy: copy(blocks, blocks), device, sizes.repeats)  # type: ignore[misc]
        report[f"{name}_gb_s"] = num_bytes / taken / 1e9
    return report


def chunks(device: torch.device, sizes: Sizes, context: int) -> Report:
    """Attention of one chunk of few rows over a long cached context: microseconds."""
    on, dtype = open_device(device, "auto", sizes.dtype, automatic=False)
    spec = _spec(sizes)
    backend = on.attention([spec], dtype)
    blocks = -(-context // BLOCK_SIZE)
    cache = backend.allocate(blocks, BLOCK_SIZE, spec, dtype, device)
    fill(cache)
    turns = copies(cache, sum(tensor.nbytes for tensor in cache.tensors), device)
    report: Report = {}
    for rows in (8, 32):
        metadata = BatchMetadata.of_chunks([(context - rows, context)], [range(blocks)], BLOCK_SIZE, device)
        plan = backend.prepare(metadata, BLOCK_SIZE, [spec], dtype)
        parts = [
            torch.randn(rows, heads, spec.head_size, device=device, dtype=dtype)
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        ]
        plans = {"": plan}
        if getattr(plan, "split_chunks", False):
            plans[", not split"] = dataclasses.replace(plan, split_chunks=False, splits=1)  # type: ignore[type-var]
        for name, own in plans.items():
            taken = per_launch(
                [partial(backend.attend, *parts, AttentionContext(turn, spec, metadata, own)) for turn in turns],
                device,
                sizes.repeats,
            )
            report |= taken.named(f"{rows} rows over {context}{name}")
    return report


def products(device: torch.device, sizes: Sizes) -> Report:
    """Many rows beside plain weights, weights of 8 bits, and these with inputs of 8 bits; and torch's 4 bits beside few
    rows, in groups of 32: microseconds."""
    on, dtype = open_device(device, "auto", sizes.dtype, automatic=False)
    outputs, inputs, _ = layer_products(sizes.config)["down"]
    weight = torch.randn(outputs, inputs, device=device, dtype=dtype) / inputs**0.5
    octets = weight_of(weight, 8)
    assert isinstance(octets, QuantizedWeight)
    kinds = {
        "plain": on.linear(weight, None, NO_EPILOGUE, dtype),
        "int8": on.linear(octets, None, NO_EPILOGUE, dtype),
        "w8a8": on.linear(dataclasses.replace(octets, input_bits=8), None, NO_EPILOGUE, dtype),
    }
    report: Report = {}
    for name, product in kinds.items():
        turns = copies(product, product.num_bytes, device)
        for rows in (512, 2048) if device.type == "cuda" else (130,):
            x = torch.randn(rows, inputs, device=device, dtype=dtype)
            taken = per_launch([partial(turn, x) for turn in turns], device, sizes.repeats)
            report |= taken.named(f"{name}, {rows} rows")
    few = round_to_nearest(weight, bits=4, group_size=32, symmetric=False)
    if torch_int4.unsupported_reason(few, dtype) is None:
        own = torch_int4.Int4LinearKernel(few, None, NO_EPILOGUE)
        turns = copies(own, own.num_bytes, device)
        for rows in (1, 8, 64):
            x = torch.randn(rows, inputs, device=device, dtype=dtype)
            taken = per_launch([partial(turn, x) for turn in turns], device, sizes.repeats)
            report |= taken.named(f"torch's int4, {rows} rows")
    return report


def _spec(sizes: Sizes) -> AttentionSpec:
    config = sizes.config
    head = config["hidden_size"] // config["num_attention_heads"]
    return AttentionSpec(config["num_attention_heads"], config["num_key_value_heads"], head, head**-0.5)
