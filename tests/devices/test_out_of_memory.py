"""Which errors mean too little memory."""

from __future__ import annotations

import pytest
import torch

from vlmserve.devices.out_of_memory import is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("1 GiB"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: cudaErrorMemoryAllocation"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasLtMatmul(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
        RuntimeError("Not enough memory for workspace!"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("std::bad_alloc"),
        MemoryError(),
    ],
    ids=str,
)
def test_every_form_of_out_of_memory_is_recognized(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("shapes do not match"),
        ValueError("out of memory"),
    ],
    ids=str,
)
def test_other_errors_are_not_out_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_an_error_during_out_of_memory_counts() -> None:
    error = RuntimeError("the capture was invalidated")
    error.__context__ = torch.OutOfMemoryError("1 GiB")
    assert is_out_of_memory(error)
