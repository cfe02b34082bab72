"""Measures which kernels are faster on this machine, and stores the result in a file."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor
from torch.nn import functional as F

from vlmserve.kernels.cpu_native import PackedLinear
from vlmserve.kernels.extension import extension, supported_isas
from vlmserve.kernels.gguf_weight import GGUFRows, GGUFWeight
from vlmserve.kernels.isas import SUPERBLOCK, SUPERBLOCK_BYTES
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.remembered import Remembered

KNOWN = Remembered("kernels.json", bool)
CPUINFO = Path("/proc/cpuinfo")
SIZE = 1024
"""Input and output features of the measured matmul."""
ROWS = (1, 256)
REPEATS = 5
ENOUGH_SECONDS = 0.05
"""Stop measuring a matmul after this time."""
UNCACHED_BYTES = 64 * 2**20
"""Bytes of weights to cycle through, so that they come from memory, as a model's do."""
REPACKED = {12: (4, 32), 14: (8, 16)}
"""Measured GGUF types (Q4_K, Q6_K), with bits and group size of their repacked form."""


@cache
def is_as_fast_as_torch(isa: str, dtype: torch.dtype, cpuinfo: Path = CPUINFO) -> bool:
    """Return whether the kernels are at least as fast as torch, for few and for many rows.

    isa: the selected instruction set. ``$XDG_CACHE_HOME/vlmserve/kernels.json`` (default ``~/.cache``) stores the
    result for this processor, build and torch.
    """
    return KNOWN.get(f"{isa} {dtype} {machine(cpuinfo)}", lambda: _try(dtype))


def _try(dtype: torch.dtype) -> bool:
    weight = torch.ones(SIZE, SIZE, dtype=dtype)
    packed = PackedLinear(weight)
    for rows in ROWS:
        x = torch.ones(rows, SIZE, dtype=dtype)
        if seconds_of(packed, x) > seconds_of(lambda x: F.linear(x, weight), x):
            return False
    return True


@cache
def superblocks_are_as_fast(isa: str, cpuinfo: Path = CPUINFO) -> bool:
    """Compares GGUF superblocks with repacked weights, in less than a second and 80 MiB. See `is_as_fast_as_torch`."""
    return KNOWN.get(f"{isa} superblocks {machine(cpuinfo)}", _try_superblocks)


def _try_superblocks() -> bool:
    for kind, (bits, group_size) in REPACKED.items():
        blocks = torch.zeros(SIZE, SIZE // SUPERBLOCK, SUPERBLOCK_BYTES[kind], dtype=torch.uint8)
        scales = torch.ones(SIZE, SIZE // group_size)
        middle = 0 if bits == 4 else -128
        values = torch.zeros(SIZE, SIZE, dtype=torch.uint8)
        forms = (
            GGUFWeight((GGUFRows(kind, blocks),)),
            QuantizedWeight(bits, group_size, values, scales, middle * scales),
        )
        times = []
        for weight in forms:
            product = PackedLinear(weight, dtype=torch.bfloat16)
            many = torch.ones(ROWS[-1], SIZE, dtype=torch.bfloat16)
            times.append((seconds_of(_one_after_another(product), many[:1]), seconds_of(product, many)))
        if any(own > other for own, other in zip(*times, strict=True)):
            return False
    return True


def _one_after_another(product: PackedLinear) -> Callable[[Tensor], Tensor]:
    count = max(1, UNCACHED_BYTES // product.num_bytes)
    copies = [PackedLinear.restored(product.settings, product.packed.clone(), None) for _ in range(count)]
    return lambda x: [copy(x) for copy in copies][-1]


def seconds_of(product: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Return the shortest time, which other processes disturb least."""
    times = []
    product(x)
    for _ in range(REPEATS):
        started = time.perf_counter()
        product(x)
        times.append(time.perf_counter() - started)
        if sum(times) > ENOUGH_SECONDS:
            break
    return min(times)


def machine(cpuinfo: Path = CPUINFO) -> str:
    try:
        lines = cpuinfo.read_text()
    except OSError:  # not Linux
        lines = ""
    processor = sorted(set(re.findall(r"^(?:model name|flags|Features|CPU (?:implementer|part))\s*:.*$", lines, re.M)))
    built = Path(str(extension().__file__)).stat() if supported_isas() else None
    facts = (
        *processor,
        platform.processor(),
        torch.__version__,
        built and (built.st_size, built.st_mtime_ns),
        torch.get_num_threads(),
    )
    return blake3(repr(facts).encode()).hexdigest(16)
