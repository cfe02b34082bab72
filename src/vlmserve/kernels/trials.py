"""Whether native kernels are as fast as torch's on this machine: tried once, then remembered in a file."""

from __future__ import annotations

import platform
import re
import statistics
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
from vlmserve.remembered import Remembered

KNOWN = Remembered("kernels.json", bool)
CPUINFO = Path("/proc/cpuinfo")
SIZE = 1024
"""Input and output features of the product that is tried."""
ROWS = (1, 256)
REPEATS = 5
ENOUGH_SECONDS = 0.05
"""After that the time of a product is known well enough."""


@cache
def is_as_fast_as_torch(isa: str, dtype: torch.dtype, cpuinfo: Path = CPUINFO) -> bool:
    """Whether products by the selected kernels take no longer than torch's, with few rows and with many.

    isa: the instruction set that is selected. dtype: of inputs and weights. The trial takes some milliseconds. Its
    result is kept in ``$XDG_CACHE_HOME/vlmserve/kernels.json`` (default: ``~/.cache``), so that a later start on this
    processor, with this build and this torch, chooses the same.
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


def seconds_of(product: Callable[[Tensor], Tensor], x: Tensor) -> float:
    times = []
    product(x)
    for _ in range(REPEATS):
        started = time.perf_counter()
        product(x)
        times.append(time.perf_counter() - started)
        if sum(times) > ENOUGH_SECONDS:
            break
    return statistics.median(times)


def machine(cpuinfo: Path = CPUINFO) -> str:
    """A digest of the processor, the kernels' build and torch's, and the number of threads."""
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
