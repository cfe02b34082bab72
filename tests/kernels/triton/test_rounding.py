"""Norms and activations that round their results, beside the same by two launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from vlmserve.kernels.operations import RoundedRows, Rounding
from vlmserve.kernels.triton import rounding
from vlmserve.kernels.triton.gated import Layout, finish
from vlmserve.kernels.triton.norm import TritonNorm
from vlmserve.kernels.triton.rounding import round_rows

KINDS = pytest.mark.parametrize("kind", get_args(Rounding))


def equal(ours: RoundedRows, theirs: RoundedRows) -> bool:
    return torch.equal(ours.values, theirs.values) and torch.equal(
        ours.scales.nan_to_num(-1), theirs.scales.nan_to_num(-1)
    )


def rows(width: int, device: torch.device) -> Tensor:
    """Large, small, zero and infinite ones."""
    x = torch.randn(4, width) * torch.tensor([1.0, 300, 0, 1])[:, None]
    x[3, 7] = torch.inf
    return x.to(device, torch.bfloat16)


@KINDS
@pytest.mark.parametrize("width", [40, 300])
def test_norms_round_to_the_same_bits(kind: Rounding, width: int, device: torch.device) -> None:
    torch.manual_seed(0)
    norm, first = (TritonNorm(torch.randn(width, device=device).bfloat16(), None, 1e-6) for _ in range(2))
    x, residual = rows(width, device), torch.randn(4, width, device=device).bfloat16()
    assert equal(norm.rounded(x, kind), round_rows(norm(x), kind))
    for before in (None, first):
        sums, rounded = norm.rounded_sum(x, residual, before, kind)
        expected = norm.of_sum(x, residual, before)
        assert torch.equal(sums.nan_to_num(), expected.rows.nan_to_num())
        assert equal(rounded, round_rows(expected.normed, kind))
    assert rounded.scales.isnan().any(1).tolist() == [False, False, False, True]


@KINDS
@pytest.mark.parametrize("layout", get_args(Layout))
def test_activations_round_to_the_same_bits(
    kind: Rounding, layout: Layout, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding, "BLOCK", 128)  # several rounds a row
    torch.manual_seed(0)
    x = rows(600 if layout else 300, device)
    rounded = round_rows(x, kind, "gelu", layout)
    assert equal(rounded, round_rows(finish(x, "gelu", layout=layout), kind))
    assert rounded.values.shape == (4, 300)
    gate, up = {"": (x, torch.ones_like(x)), "pairs": (x[:, ::2], x[:, 1::2])}.get(layout) or x.chunk(2, 1)
    wanted = torch.nn.functional.gelu(gate[0].double()) * up[0].double()
    values = rounded.values.view(torch.float8_e4m3fn) if kind == "float8" else rounded.values
    scales = rounded.scales[0].repeat_interleave(300 if kind == "float8" else 128)[:300]
    torch.testing.assert_close(values[0].double() * scales.double(), wanted, atol=0.08, rtol=0.07)


@pytest.mark.parametrize("kind", get_args(Rounding))
def test_no_rows_are_rounded(kind: Rounding, device: torch.device) -> None:
    none = torch.empty(0, 200, device=device)
    made: list[Callable[[], RoundedRows]] = [
        lambda: round_rows(none, kind),
        lambda: TritonNorm(torch.ones(200, device=device), None, 1e-6).rounded(none, kind),
    ]
    assert [one().values.shape for one in made] == [(0, 200)] * 2
