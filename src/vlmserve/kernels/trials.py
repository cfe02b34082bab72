"""Whether native kernels are as fast as torch's on this machine: tried once, then remembered in a file."""

from __future__ import annotations

import logging
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
import torch
from blake3 import blake3
from torch import Tensor
from torch.nn import functional as F

from vlmserve.folders import cache_folder
from vlmserve.kernels.cpu_native import PackedLinear
from vlmserve.kernels.extension import extension

logger = logging.getLogger(__name__)

SIZE = 1024
"""Input and output features of the product that is tried."""
ROWS = (1, 256)
REPEATS = 5
ENOUGH_SECONDS = 0.05
"""After that the time of a product is known well enough."""


@cache
def is_as_fast_as_torch(isa: str, dtype: torch.dtype, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether products by the selected kernels take no longer than torch's, with few rows and with many.

    isa: the instruction set that is selected. dtype: of inputs and weights. The trial takes some milliseconds. Its
    result is kept in ``$XDG_CACHE_HOME/vlmserve/kernels.json`` (default: ``~/.cache``), so that a later start on this
    processor, with this build and this torch, chooses the same.
    """
    file = cache_folder() / "kernels.json"
    key = f"{isa} {dtype} {_machine(cpuinfo)}"
    known = _read(file)
    if key not in known:
        known[key] = _try(dtype)
        _write(file, known)
    return known[key]


def _try(dtype: torch.dtype) -> bool:
    weight = torch.ones(SIZE, SIZE, dtype=dtype)
    packed = PackedLinear(weight)
    for rows in ROWS:
        x = torch.ones(rows, SIZE, dtype=dtype)
        if _seconds(packed, x) > _seconds(lambda x: F.linear(x, weight), x):
            return False
    return True


def _seconds(product: Callable[[Tensor], Tensor], x: Tensor) -> float:
    times = []
    product(x)
    for _ in range(REPEATS):
        started = time.perf_counter()
        product(x)
        times.append(time.perf_counter() - started)
        if sum(times) > ENOUGH_SECONDS:
            break
    return statistics.median(times)


def _machine(cpuinfo: Path) -> str:
    """A digest of the processor, the kernels' build and torch's, and the number of threads."""
    try:
        lines = cpuinfo.read_text()
    except OSError:  # not Linux
        lines = ""
    processor = sorted(set(re.findall(r"^(?:model name|flags|Features|CPU (?:implementer|part))\s*:.*$", lines, re.M)))
    built = Path(str(extension().__file__)).stat()
    facts = (
        *processor,
        platform.processor(),
        torch.__version__,
        built.st_size,
        built.st_mtime_ns,
        torch.get_num_threads(),
    )
    return blake3(repr(facts).encode()).hexdigest(16)


def _read(file: Path) -> dict[str, bool]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, bool])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("%s cannot be read (%s): kernels are tried again", file, error)
        return {}


def _write(file: Path, known: dict[str, bool]) -> None:
    unfinished = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(known)))
        unfinished.replace(file)
    except OSError as error:
        logger.info("which kernels are faster is not remembered: %s", error)
