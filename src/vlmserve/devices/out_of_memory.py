from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")
MEMORY_ERRORS = (RuntimeError, MemoryError)
"""Types of errors that `is_out_of_memory` recognizes."""
_PHRASES = (
    "out of memory",  # torch's allocators, and CUDA when it loads a kernel or instantiates a graph
    "out_of_memory",  # the driver
    "cudaerrormemoryallocation",
    "alloc_failed",  # cuBLAS, cuSOLVER
    "allocation_failed",  # cuDNN
    "`cublascreate(handle)`",  # CUDA claims not to be initialized
    "allocate memory",  # torch on a CPU, the system
    "not enough memory",
    "bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Reads the error, its cause and its context.

    torch raises `OutOfMemoryError` only from its allocator, and CUDA `AcceleratorError` or `RuntimeError`. The end of a
    failed capture raises another error.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if _is_named(current):
            return True
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return False


def with_less_memory(run: Callable[[], Result], otherwise: Callable[[], Result]) -> Result:
    """`otherwise` must not allocate device memory."""
    try:
        return run()
    except MEMORY_ERRORS as error:
        if not is_out_of_memory(error):
            raise
        return otherwise()


def _is_named(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in _PHRASES)
