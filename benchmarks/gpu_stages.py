"""The stages of `benchmarks.gpu`. Each yields names and what it measured, for JSON; rates are in GB/s or tokens/s.

What a call reads does not lie in a GPU's caches: calls in a row take turns over copies of their weight, or of their
keys and values (`copies`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_timing import copies, per_launch, seconds_of
from vlmserve.devices.choice import open_device
from vlmserve.kernels.attention import (
    AttentionBackend,
    AttentionContext,
    BatchMetadata,
    LayerCache,
    RotaryRows,
    RotatingBackend,
)
from vlmserve.kernels.operations import Epilogue
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.layer_specs import AttentionSpec, CacheType
from vlmserve.quant.methods.rtn import round_to_nearest

BLOCK_SIZE = 16
LINES = 200
"""Of tests that failed, which the report keeps."""
DECODE_TILES = ((64, 4), (64, 2), (32, 2), (32, 1))
"""Keys and warps of programs of decodes, which are measured beside those that the kernel takes by itself. Fewer warps
exchange less, and hide less of what others wait for."""
Measured = Iterator[tuple[str, Any]]


@dataclass(frozen=True)
class Sizes:
    """What is measured. side: of square matrices. config: of the model. streams: requests that decode at once, with
    `context` tokens each."""

    copied_bytes: int
    side: int
    config: dict[str, Any]
    rows: tuple[int, ...]
    streams: tuple[int, ...]
    contexts: tuple[int, ...]
    context: int
    prompt: int
    steps: int
    repeats: int
    dtype: torch.dtype


def _mistral(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "mistral",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        "sliding_window": None,
    }


FULL = Sizes(
    copied_bytes=2**32, side=8192, config=_mistral(4096, 14336, 32, 32, 8, 32000), rows=(1, 8, 64, 128),
    streams=(1, 64, 256), contexts=(1024, 4096), context=1024, prompt=1000, steps=40, repeats=30, dtype=torch.bfloat16,
)  # fmt: skip
TINY = Sizes(
    copied_bytes=2**20, side=64, config=_mistral(64, 128, 2, 4, 2, 256), rows=(1, 8), streams=(1, 4), contexts=(32,),
    context=24, prompt=40, steps=3, repeats=2, dtype=torch.float32,
)  # fmt: skip


def bandwidth(device: torch.device, sizes: Sizes, folder: Path) -> Measured:
    """What a copy, a sum and a product of square matrices reach, over random numbers: zeros take less power, so that
    the clock stays higher."""
    source = torch.randn(sizes.copied_bytes // 4, device=device)
    target = torch.empty_like(source)
    yield "copy_gb_s", 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device, sizes.repeats) / 1e9
    yield "read_gb_s", source.nbytes / seconds_of(source.sum, device, sizes.repeats) / 1e9
    left, right = (torch.randn(sizes.side, sizes.side, dtype=sizes.dtype, device=device) for _ in range(2))
    taken = per_launch([lambda: left @ right], device, -(-sizes.repeats // 3))
    yield "product_tflop_s", 2 * sizes.side**3 / taken.seconds / 1e12


def checks(device: torch.device, sizes: Sizes, folder: Path) -> Measured:
    """The kernels against float64, and pixie's answers against those of a CPU."""
    # Compiling takes most of the time, so each core has a process.
    processes = str(os.cpu_count() or 1)
    marks = ["-m", "gpu", "-n", processes, "--dist", "load"] if device.type == "cuda" else ["-k", "norms"]
    command = [*pytest_command(), *marks, "tests/kernels/triton", "tests/devices"]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            # What is said of a stage that takes too long.
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    yield "tests", lines[-1] if lines else ""
    yield "failed", run.returncode
    yield "failures", [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if run.returncode:
        yield "said", lines[-LINES:]
    yield "pixie_differs", _pixie_differs(device)


def pytest_command() -> list[str]:
    """pytest, which starts where a plugin is missing that the tests for a GPU do without: settings of such a plugin are
    an error otherwise, as is the mention of schemathesis."""
    return [sys.executable, "-m", "pytest", "-q", "-rfE", "-o", "addopts=--import-mode=importlib"]


def _pixie_differs(device: torch.device) -> int:
    """How many of pixie's answers about the shapes are others on the device than on a CPU, in float32."""
    from vlmserve import LLM, SamplingParams

    questions = ["What colour is the circle?", "How many shapes are there?", "Where is the triangle?"]
    answers = []
    for name in ("cpu", str(device)):
        llm = LLM("pixie", device=name, dtype="float32", kv_cache_memory="64MiB")
        parts = [[{"type": "image", "image": "examples/shapes.png"}, {"type": "text", "text": q}] for q in questions]
        results = llm.chat(
            [[{"role": "user", "content": content}] for content in parts], SamplingParams(temperature=0, max_tokens=48)
        )
        answers.append([result.text for result in results])
    return sum(ours != theirs for ours, theirs in zip(*answers, strict=True))


def layer_products(config: dict[str, Any]) -> dict[str, tuple[int, int, Epilogue]]:
    """Outputs, inputs and epilogue of the products of a layer."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv_size = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    return {
        "qkv": (hidden + 2 * kv_size, hidden, Epilogue()),
        "output": (hidden, hidden, Epilogue()),
        "gate and up": (2 * inner, hidden, Epilogue("silu", gated=True)),
        "down": (hidden, inner, Epilogue()),
    }


def products(device: torch.device, sizes: Sizes, folder: Path) -> Measured:
    """The four products of a layer, by kind of weight and rows: which class computes it, microseconds, and the bytes of
    weights that are read a second."""
    on, dtype = open_device(device, "auto", sizes.dtype, automatic=False)
    yield "kernels", on.kernels
    for name, (outputs, inputs, epilogue) in layer_products(sizes.config).items():
        plain = torch.randn(outputs, inputs, device=device, dtype=dtype) / inputs**0.5
        for kind, bits, group in (("plain", 16, 0), ("int8", 8, 0), ("int4", 4, 128), ("int4 in groups of 32", 4, 32)):
            stored = on.linear(weight_of(plain, bits, group), None, epilogue, dtype)
            turns = copies(stored, stored.num_bytes, device)
            for rows in sizes.rows[::2] if group == 32 else sizes.rows:
                x = torch.randn(rows, inputs, device=device, dtype=dtype)
                taken = per_launch([partial(turn, x) for turn in turns], device, sizes.repeats)
                yield (
                    f"{name}, {kind}, {rows} rows",
                    {"by": type(stored).__name__, **taken.named("microseconds")}
                    | {"weight_gb_s": stored.num_bytes / taken.seconds / 1e9},
                )


def weight_of(plain: Tensor, bits: int, group: int = 128) -> Tensor | QuantizedWeight:
    """A plain weight of 16 bits, or as the kernels take fewer: of 8 with one scale for each output and zero in the
    middle, of 4 in groups, which are of 32 where inputs are not whole groups."""
    inputs = plain.shape[1]
    if bits == 16:
        return plain
    if bits == 8:
        return round_to_nearest(plain, bits=8, group_size=inputs, symmetric=True)
    return round_to_nearest(plain, bits=4, group_size=group if inputs % group == 0 else 32, symmetric=False)


def attention(device: torch.device, sizes: Sizes, folder: Path) -> Measured:
    """Attention of one layer's decodes, by their number and context: microseconds, and bytes of keys and values read a
    second; of the largest batch also by tiles that kernels in Triton do not take by themselves, of the smallest with
    a launch for what they write. As in a layer, new keys are rotated and written on the way where the backend can."""
    config = sizes.config
    head = config["hidden_size"] // config["num_attention_heads"]
    spec = AttentionSpec(config["num_attention_heads"], config["num_key_value_heads"], head, head**-0.5)
    kinds: tuple[CacheType, ...] = ("auto", "int8", "fp8") if device.type == "cuda" else ("auto", "int8")
    for kind in kinds:
        suffix = {"auto": "", "int8": ", 8 bits", "fp8": ", fp8"}[kind]
        on, dtype = open_device(device, "auto", sizes.dtype, automatic=False)
        backend = on.attention([spec], dtype, cache_type=kind)
        yield "backend", backend.name
        for streams, context in product(sizes.streams, sizes.contexts):
            name = f"{streams} x {context}{suffix}"
            yield name, _attention_of_decodes(backend, spec, (streams, context), dtype, device, sizes.repeats)
        if backend.name == "triton":
            smallest = sizes.streams[0], sizes.contexts[0]
            with switched(type(backend), writes=False):
                taken = _attention_of_decodes(backend, spec, smallest, dtype, device, sizes.repeats)
            yield f"{smallest[0]} x {smallest[1]}{suffix}, keys by a launch", taken
            yield from _attention_by_tiles(backend, spec, name, (streams, context), dtype, device, sizes.repeats)
            for length, by_library in product(sizes.contexts if kind == "auto" else (), (False, True)):
                with switched(type(backend), by_library=by_library):
                    taken = _attention_of_prompt(backend, spec, 2 * length, dtype, device, sizes.repeats)
                yield f"prompt of {2 * length}{', by the library' if by_library else ''}", taken


def _attention_of_decodes(
    backend: AttentionBackend, spec: AttentionSpec, batch: tuple[int, int], dtype: torch.dtype, device: torch.device,
    repeats: int,
) -> dict[str, float]:  # fmt: skip
    """batch: sequences, and tokens of the context of each."""
    streams, context = batch
    cache = backend.allocate(streams * -(-context // BLOCK_SIZE), BLOCK_SIZE, spec, dtype, device)
    fill(cache)
    metadata = _decodes(streams, context, device)
    plan = backend.prepare(metadata, BLOCK_SIZE, [spec], dtype)
    parts = [
        torch.randn(streams, heads, spec.head_size, device=device, dtype=dtype)
        for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    ]
    attend = partial(backend.attend, *parts)
    if isinstance(backend, RotatingBackend):
        cos, sin = (torch.randn(streams, spec.head_size // 2, device=device) for _ in range(2))
        qkv = torch.cat([part.flatten(1) for part in parts], 1)
        attend = partial(backend.attend_rotated, qkv, RotaryRows(cos, sin, None))
    read = streams * context * backend.block_bytes(BLOCK_SIZE, spec, dtype) // BLOCK_SIZE
    turns = copies(cache, read, device)
    taken = per_launch(
        [partial(attend, AttentionContext(turn, spec, metadata, plan)) for turn in turns], device, repeats
    )
    return taken.named("microseconds") | {"read_gb_s": read / taken.seconds / 1e9}


def _attention_of_prompt(
    backend: AttentionBackend, spec: AttentionSpec, length: int, dtype: torch.dtype, device: torch.device, repeats: int
) -> dict[str, float]:
    """Of one prompt without cached tokens. Half of the scores are computed."""
    blocks = -(-length // BLOCK_SIZE)
    cache = backend.allocate(blocks, BLOCK_SIZE, spec, dtype, device)
    metadata = BatchMetadata.of_chunks([(0, length)], [list(range(blocks))], BLOCK_SIZE, device)
    plan = backend.prepare(metadata, BLOCK_SIZE, [spec], dtype)
    parts = [
        torch.randn(length, heads, spec.head_size, device=device, dtype=dtype)
        for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    ]
    context = AttentionContext(cache, spec, metadata, plan)
    taken = per_launch([partial(backend.attend, *parts, context)], device, repeats)
    work = 2 * spec.num_heads * spec.head_size * length**2
    return taken.named("microseconds") | {"tflop_s": work / taken.seconds / 1e12}


def _attention_by_tiles(
    backend: AttentionBackend, spec: AttentionSpec, name: str, batch: tuple[int, int], dtype: torch.dtype,
    device: torch.device, repeats: int,
) -> Measured:  # fmt: skip
    from vlmserve.kernels.triton.attention import TritonAttention, tile  # Triton need not be there.

    assert isinstance(backend, TritonAttention)
    rule = tile(spec, chunks=False, quantized=backend.cache_type != "auto")
    for keys, warps in DECODE_TILES:
        backend.decode_tile = rule._replace(keys=keys, warps=warps)
        if backend.decode_tile != rule:
            yield (
                f"{name}, {keys} keys by {warps} warps",
                _attention_of_decodes(backend, spec, batch, dtype, device, repeats),
            )
    backend.decode_tile = None


@contextmanager
def switched(kernels: type, **switch: bool) -> Iterator[None]:
    """Have a class's switch so for a while."""
    ((name, value),) = switch.items()
    default = getattr(kernels, name)
    setattr(kernels, name, value)
    try:
        yield
    finally:
        setattr(kernels, name, default)


def fill(cache: LayerCache) -> None:
    """With random keys and values."""
    for tensor in cache.tensors:
        if tensor.is_floating_point():
            tensor.normal_()
        else:
            tensor.random_(-127, 128)


def _decodes(streams: int, context: int, device: torch.device) -> BatchMetadata:
    each = -(-context // BLOCK_SIZE)
    tables = [range(first, first + each) for first in range(0, streams * each, each)]
    return BatchMetadata.of_chunks([(context - 1, context)] * streams, tables, BLOCK_SIZE, device)


def memory(device: torch.device, sizes: Sizes, folder: Path) -> Measured:
    """Bytes of the KV cache at the peak of 64 requests, beside contiguous caches, each of which has room for its
    request's prompt and the longest answer: see `benchmarks.memory`. The model is tiny, since its shape does not change
    the share."""
    from benchmarks import memory as paging

    with tempfile.TemporaryDirectory() as place:
        result = Path(place, "memory.json")
        options = ["--tiny", "--no-peer", "--kv-cache-memory", "64MiB", "--dtype", "float32", "--json", str(result)]
        paging.main(["--device", str(device), *options])
        report = json.loads(result.read_text())
    mixed = report["rows"][0]
    yield "requests", {name: report[name] for name in ("requests", "prompt_lens", "answer_lens")}
    yield "paged", mixed["paged"]
    yield "contiguous", mixed["longest_answer"]
