"""Inputs that are rounded to float8 in one launch, beside torch's."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_torch_float8 import made
from vlmserve.kernels.operations import Epilogue
from vlmserve.kernels.torch_float8 import Float8LinearKernel
from vlmserve.kernels.triton import rounding
from vlmserve.kernels.triton.float8 import TritonFloat8LinearKernel


def products(device: torch.device) -> list[Float8LinearKernel]:
    torch.manual_seed(0)
    weight = made(torch.rand(32) / 400, device.type)
    arguments = weight, None, Epilogue(), torch.bfloat16
    return [TritonFloat8LinearKernel(*arguments), Float8LinearKernel(*arguments, by_rows=True)]


def test_rounded_inputs_give_torchs_product(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "BLOCK", 32)  # two rounds a row
    ours, theirs = products(device)
    x = torch.randn(2, 5, 64) * torch.tensor([1e-6, 0.1, 1, 1000, 0])[:, None]
    x[0, 2, ::7], x[1, 1, 3], x[1, 2, 40] = -0.001, torch.nan, torch.inf
    actual, expected = (product(x.to(device, torch.bfloat16)).cpu() for product in (ours, theirs))
    assert actual[1, 1:3].isnan().all()
    assert torch.equal(actual.nan_to_num(), expected.nan_to_num())


def test_inputs_of_any_stride_are_rounded(device: torch.device) -> None:
    ours, theirs = products(device)
    wide = torch.randn(3, 128, device=device).bfloat16()
    assert torch.equal(ours(wide[:, :64]), theirs(wide[:, :64]))
    assert torch.equal(ours(wide[:, ::2]), theirs(wide[:, ::2]))
    assert ours(wide[:0, :64]).shape == (0, 32)
