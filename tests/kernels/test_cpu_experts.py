"""Mixtures of experts in one native call against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType
from torch import Tensor

from tests.kernels.mixtures import Mixture
from tests.kernels.test_superblocks import make
from tests.native import built
from vlmserve.families.spec import ExpertsSpec, NormSpec
from vlmserve.kernels.cpu_experts import NativeExperts, unsupported_reason
from vlmserve.kernels.cpu_native import PackedLinear
from vlmserve.kernels.extension import extension
from vlmserve.kernels.operations import ExpertKernels, RouterWeights
from vlmserve.quant.methods.rtn import round_to_nearest

pytestmark = [built, pytest.mark.usefixtures("isa")]

SPEC = ExpertsSpec(count=9, top_k=3, inner_size=48)
NORMED = replace(SPEC, router_norm=NormSpec(0.1))
SIZE = 64
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"bits": 8, "symmetric": True},
    "int8 in groups": {"bits": 8, "group_size": 16, "symmetric": False},
    "int4": {"bits": 4, "group_size": 16, "symmetric": False},
}


def pack(weight: Tensor, dtype: torch.dtype, form: dict[str, Any], **settings: Any) -> tuple[PackedLinear, Tensor]:
    """A weight as the kernels keep it, and what it stands for in float64."""
    if not form:
        return PackedLinear(weight.to(dtype), **settings), weight.to(dtype).double()
    rounded = round_to_nearest(weight, **{"group_size": weight.shape[1], **form})
    quantized = replace(rounded, input_bits=16)
    return PackedLinear(quantized, dtype=dtype, **settings), quantized.dequantize().double()


class NativeMixture(Mixture):
    """The same by the kernel."""

    def __init__(self, spec: ExpertsSpec, dtype: torch.dtype, form: dict[str, Any], missing: int | None = None) -> None:
        """missing: an expert that another rank has."""
        super().__init__(spec, SIZE)
        packed: dict[int, ExpertKernels] = {}
        for number in range(spec.count):
            up, wide_up = pack(torch.randn(2 * spec.inner_size, SIZE) / 4, dtype, form, activation="silu", gated=True)
            down, wide_down = pack(torch.randn(SIZE, spec.inner_size) / 4, dtype, form)
            if number != missing:
                packed[number], self.experts[number] = (up, down), (wide_up, wide_down)
        weights = RouterWeights(PackedLinear(self.router), self.correction, self.norm, self.input_norm, self.factors)
        self.run = NativeExperts(spec, weights, packed)


@pytest.mark.parametrize(("form", "spec"), [*((form, SPEC) for form in FORMS), ("plain", NORMED)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_experts_equal_float64(dtype: torch.dtype, form: str, spec: ExpertsSpec) -> None:
    mixture = NativeMixture(spec, dtype, FORMS[form])
    x, residual = (torch.randn(300, SIZE).to(dtype) for _ in range(2))
    expected = mixture.expected(x)
    tolerance = 2e-3 if dtype == torch.float32 else 4e-2
    whole = mixture.run(x, residual)
    torch.testing.assert_close(whole.double(), expected + residual.double(), atol=tolerance, rtol=1e-2)
    for rows in (slice(0, 1), slice(5, 17), slice(100, 300)):
        assert torch.equal(mixture.run(x[rows], residual[rows]), whole[rows])
    sums = mixture.run(x, float_output=True)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums.double(), expected, atol=tolerance, rtol=1e-2)


@torch.inference_mode()
def test_superblocks_equal_their_products(isa: str) -> None:
    if not extension().has_superblocks():
        pytest.skip(f"{isa} has no integer products")
    spec = replace(SPEC, inner_size=256)
    router, experts = PackedLinear(torch.randn(spec.count, 256) / 8), {}
    for number in range(spec.count):
        weight = make([(GGMLQuantizationType.Q4_K, 512)], 1, number)
        up = PackedLinear(weight, dtype=torch.float32, activation="silu", gated=True)
        experts[number] = up, PackedLinear(make([(GGMLQuantizationType.Q6_K, 256)], 1, number), dtype=torch.float32)
    x = torch.randn(40, 256)
    scores, chosen = router(x).softmax(1).topk(spec.top_k)
    factors = torch.zeros(40, spec.count).scatter(1, chosen, scores / scores.sum(1, keepdim=True))
    expected = sum(factors[:, number, None] * down(up(x)) for number, (up, down) in experts.items())
    torch.testing.assert_close(NativeExperts(spec, RouterWeights(router), experts)(x), expected)


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, renormalized=False, scale=2.5),
        replace(SPEC, scores="sigmoid", correction=True, scale=1.5),
        replace(NORMED, scale=1.5),
        replace(SPEC, count=3),
        replace(SPEC, count=37, top_k=1),
    ],
    ids=["raw scores", "sigmoids with correction", "norms and factors", "all experts", "one expert"],
)
@torch.inference_mode()
def test_routers_equal_float64(spec: ExpertsSpec) -> None:
    mixture = NativeMixture(spec, torch.float32, {})
    x = torch.randn(40, SIZE)
    torch.testing.assert_close(mixture.run(x).double(), mixture.expected(x), atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_missing_experts_add_nothing() -> None:
    mixture = NativeMixture(SPEC, torch.float32, {}, missing=4)
    x = torch.randn(40, SIZE)
    torch.testing.assert_close(mixture.run(x).double(), mixture.expected(x), atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_equal_scores_choose_lowest_numbers() -> None:
    spec = replace(SPEC, count=4, top_k=2, inner_size=2)
    experts = {
        number: (
            PackedLinear(torch.ones(4, 2), activation="silu", gated=True),
            PackedLinear(torch.full((2, 2), float(10**number))),
        )
        for number in range(4)
    }
    run = NativeExperts(spec, RouterWeights(PackedLinear(torch.zeros(4, 2))), experts)
    one, other = run(torch.ones(1, 2)), run(torch.full((1, 2), float("nan")))
    torch.testing.assert_close(one, torch.full((1, 2), F.silu(torch.tensor(2.0)).item() * 2 * 2 * (1 + 10) / 2))
    assert other.isnan().all()


def test_experts_of_two_forms_are_not_one_call() -> None:
    gated = {"activation": "silu", "gated": True}
    down, _ = pack(torch.randn(SIZE, 48), torch.float32, {})
    plain, rounded = (
        (pack(torch.randn(96, SIZE), torch.float32, FORMS[name], **gated)[0], down) for name in ("plain", "int4")
    )
    router = PackedLinear(torch.randn(2, SIZE))
    assert unsupported_reason(router, {0: plain, 1: plain}) is None
    assert unsupported_reason(router, {0: plain, 1: rounded}) == "experts of a layer are packed differently"
