"""Kernels in Triton run on a GPU where there is one, and through Triton's interpreter on a CPU elsewhere."""

from __future__ import annotations

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

pytest.importorskip("triton", reason="triton is not installed: pip install triton (Linux only)", exc_type=ImportError)


@pytest.fixture(
    params=[
        pytest.param(
            "cpu",
            marks=pytest.mark.skipif(HAS_GPU, reason="there is a GPU: the same cases run there"),
            id="interpreter",
        ),
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="there is no CUDA device")],
            id="gpu",
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where kernels run."""
    return torch.device(request.param)
