"""The instruction sets that this machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vlmserve.kernels.choice import choose_kernels
from vlmserve.kernels.extension import supported_isas


@pytest.fixture(params=supported_isas() or ("none",))
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn; afterwards the best one is chosen again."""
    choose_kernels(request.param, torch.float32)
    yield request.param
    choose_kernels(supported_isas()[0], torch.float32)
