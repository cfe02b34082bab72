"""Mixtures of experts in Triton against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.mixtures import Mixture
from tests.kernels.triton.test_products import made
from vlmserve.families.spec import ExpertsSpec, NormSpec
from vlmserve.kernels.operations import ExpertKernels, RouterWeights
from vlmserve.kernels.triton import experts
from vlmserve.kernels.triton.experts import TritonExperts, unsupported_reason
from vlmserve.kernels.triton.products import TritonLinearKernel

SPEC = ExpertsSpec(count=5, top_k=2, inner_size=32)
NORMED = replace(SPEC, router_norm=NormSpec(0.1), scale=1.5)
SIZE = 64
HALF = torch.float16


class TritonMixture(Mixture):
    """The same by the kernels."""

    def __init__(
        self, spec: ExpertsSpec, dtype: torch.dtype, kind: str, device: torch.device, missing: int | None = None
    ) -> None:
        """missing: an expert that another rank has."""
        super().__init__(spec, SIZE)
        self._device = device
        self.products: dict[int, ExpertKernels] = {}
        for number in range(spec.count):
            up, wide_up = self._made(kind, dtype, 2 * spec.inner_size, SIZE, activation="silu", gated=True)
            down, wide_down = self._made(kind, dtype, SIZE, spec.inner_size)
            if number != missing:
                self.products[number], self.experts[number] = (up, down), (wide_up, wide_down)
        parts = (self.correction, self.norm, self.input_norm, self.factors)
        on_device = [None if part is None else part.to(device) for part in parts]
        self.weights = RouterWeights(TritonLinearKernel(self.router.to(device), dtype=torch.float32), *on_device)
        self._run = TritonExperts(spec, self.weights, self.products)

    def _made(
        self, kind: str, dtype: torch.dtype, outputs: int, inputs: int, **settings: Any
    ) -> tuple[TritonLinearKernel, Tensor]:
        weight, numbers = made(kind, outputs, inputs, self._device)
        return TritonLinearKernel(weight.to(dtype) if kind == "plain" else weight, dtype=dtype, **settings), numbers

    def run(self, x: Tensor, residual: Tensor | None = None, *, float_output: bool = False) -> Tensor:
        added = None if residual is None else residual.to(self._device)
        return self._run(x.to(self._device), added, float_output=float_output).cpu()


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.float32, "plain"), (HALF, "plain"), (HALF, "8 bits"), (HALF, "4 bits"), (torch.float32, "4 bits")],
)
def test_experts_equal_float64(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kind: str
) -> None:
    """One row, few rows, and tiles of many rows with the same bits."""
    monkeypatch.setattr(experts, "MANY_ROWS", 4)
    mixture = TritonMixture(SPEC, dtype, kind, device)
    x, residual = (torch.randn(19, SIZE).to(dtype) for _ in range(2))
    expected = mixture.expected(x)
    tolerance = 1e-4 if dtype == torch.float32 else 4e-3
    whole = mixture.run(x, residual)
    torch.testing.assert_close(whole.double(), expected + residual.double(), atol=tolerance, rtol=tolerance)
    for rows in (slice(0, 1), slice(5, 12)):
        assert torch.equal(mixture.run(x[rows], residual[rows]), whole[rows])
    sums = mixture.run(x[:3], float_output=True)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums.double(), expected[:3], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, renormalized=False, scale=2.5),
        replace(SPEC, scores="sigmoid", correction=True, scale=1.5),
        NORMED,
        replace(SPEC, count=3, top_k=3),
        replace(SPEC, count=37, top_k=1),
    ],
    ids=["raw scores", "sigmoids with correction", "norms and factors", "all experts", "one expert"],
)
def test_routers_equal_float64(device: torch.device, spec: ExpertsSpec) -> None:
    mixture = TritonMixture(spec, torch.float32, "plain", device)
    x = torch.randn(7, SIZE)
    torch.testing.assert_close(mixture.run(x).double(), mixture.expected(x), atol=1e-4, rtol=1e-4)


def test_missing_experts_add_nothing(device: torch.device) -> None:
    mixture = TritonMixture(SPEC, torch.float32, "plain", device, missing=4)
    x = torch.randn(7, SIZE)
    torch.testing.assert_close(mixture.run(x).double(), mixture.expected(x), atol=1e-4, rtol=1e-4)


def test_nan_rows_change_no_other_rows(device: torch.device) -> None:
    mixture = TritonMixture(SPEC, torch.float32, "plain", device)
    x = torch.randn(3, SIZE)
    expected = mixture.run(x)
    x[1] = float("nan")
    result = mixture.run(x)
    assert result[1].isnan().all()
    assert torch.equal(result[::2], expected[::2])


def test_experts_of_two_forms_are_not_one_call(device: torch.device) -> None:
    plain, rounded = (TritonMixture(SPEC, HALF, kind, device) for kind in ("plain", "4 bits"))
    both = {0: plain.products[0], 1: rounded.products[1]}
    assert unsupported_reason(plain.weights, both) == "experts of a layer are stored differently"
    half = replace(plain.weights, product=plain.products[0][0])
    assert unsupported_reason(half, plain.products) == "the router is not in float32"
