"""Multiprocessors of a GPU, and the shared memory of a program."""

from __future__ import annotations

from functools import cache

import torch
from triton.runtime import driver

RESERVED_BYTES = 2 * 1024
"""Bytes per program for CUDA, and for sums of several warps."""
SHARED_BYTES = 112 * 1024
"""For tiles in flight, so that a multiprocessor of an H100 or H200 runs two programs."""
MULTIPROCESSORS = 132
"""Of an H100 or H200."""


@cache
def shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return SHARED_BYTES
    # a program may use a multiprocessor's shared memory, except CUDA's part
    return int(_properties()["max_shared_mem"] + 1024) // 2 - RESERVED_BYTES


@cache
def multiprocessors(device: torch.device) -> int:
    return MULTIPROCESSORS if device.type != "cuda" else int(_properties()["multiprocessor_count"])


def _properties() -> dict[str, int]:
    properties: dict[str, int] = driver.active.utils.get_device_properties(torch.cuda.current_device())
    return properties
