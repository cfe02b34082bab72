"""How many multiprocessors a GPU has, and how much of their shared memory programs may take."""

from __future__ import annotations

from functools import cache

import torch
from triton.runtime import driver

RESERVED_BYTES = 2 * 1024
"""Of each program: what CUDA takes, and what sums of several warps take beside tiles."""
SHARED_BYTES = 112 * 1024
"""For tiles on their way to one program, so that a multiprocessor of an H100 or H200 has two."""
MULTIPROCESSORS = 132
"""Of an H100 or H200."""


@cache
def shared_bytes(device: torch.device) -> int:
    """`SHARED_BYTES` of a GPU."""
    if device.type != "cuda":
        return SHARED_BYTES
    # One program may have all that a multiprocessor has, but for what CUDA takes.
    return int(_properties()["max_shared_mem"] + 1024) // 2 - RESERVED_BYTES


@cache
def multiprocessors(device: torch.device) -> int:
    """`MULTIPROCESSORS` of a GPU."""
    return MULTIPROCESSORS if device.type != "cuda" else int(_properties()["multiprocessor_count"])


def _properties() -> dict[str, int]:
    properties: dict[str, int] = driver.active.utils.get_device_properties(torch.cuda.current_device())
    return properties
