"""Recognizes out-of-memory errors."""

from __future__ import annotations

import torch

_PHRASES = (
    "out of memory",  # the allocator, CUDA's runtime, and its driver when it loads a kernel or instantiates a graph
    "cudaErrorMemoryAllocation",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "can't allocate memory",  # torch's allocator on a CPU
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error, its cause or its context reports too little memory.

    torch raises `OutOfMemoryError` only from its allocator. CUDA's own failures are `AcceleratorError` or
    `RuntimeError`, and the end of a failed capture raises another error.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(current, RuntimeError) and any(phrase in str(current) for phrase in _PHRASES):
            return True
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return False
