"""Routers and blocks of experts against float64, with plain and with rounded weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.native import built
from vlmserve.devices.cpu import NativeCpuDevice
from vlmserve.devices.device import Device
from vlmserve.families.spec import ExpertsSpec
from vlmserve.kernels.extension import selected_isa
from vlmserve.layers.linear import Linear
from vlmserve.models.blocks.experts import Experts, Router
from vlmserve.quant.methods.rtn import round_to_nearest
from vlmserve.quant.model import quantize
from vlmserve.settings.quantization import QuantizationConfig

CPU = torch.device("cpu")


@torch.inference_mode()
def test_correction_chooses_experts_without_weighing_them() -> None:
    spec = ExpertsSpec(count=6, top_k=2, inner_size=8, scores="sigmoid", correction=True, scale=2.5)
    router = Router(spec, 4, device=CPU)
    torch.manual_seed(0)
    router.linear.weight.normal_()
    assert router.bias is not None
    router.bias.copy_(torch.tensor([0.0, 9.0, 0.0, 0.0, 9.0, 0.0]))
    x = torch.randn(5, 4)
    weights, chosen = router(x)
    assert (chosen.sort().values == torch.tensor([1, 4])).all()
    scores = (x.double() @ router.linear.weight.double().T).sigmoid().gather(1, chosen)
    expected = 2.5 * scores / scores.sum(1, keepdim=True)
    torch.testing.assert_close(weights.double(), expected, atol=1e-6, rtol=1e-6)


def rounded(weight: Tensor, bits: int | None, config: QuantizationConfig) -> Tensor:
    if bits is None:
        return weight.double()
    return (
        round_to_nearest(
            weight,
            bits=bits,
            group_size=config.group_size,
            symmetric=config.symmetric,
            zero_points=config.zero_points,
        )
        .dequantize()
        .double()
    )


def make_block(spec: ExpertsSpec) -> Experts:
    block = Experts(spec, 64, "silu", dtype=torch.float32, device=CPU)
    torch.manual_seed(0)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.2)
    return block


def expected_rows(spec: ExpertsSpec, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """What the block computes for float64 rows."""

    def mlp(name: str) -> Tensor:
        gate, up = (x @ weights[f"{name}.gate_up_proj"].T).chunk(2, 1)
        return (F.silu(gate) * up) @ weights[f"{name}.down_proj"].T

    scores, chosen = (x @ weights["router.linear"].T).softmax(1).topk(spec.top_k)
    factors = torch.zeros(len(x), spec.count, dtype=torch.float64)
    factors.scatter_(1, chosen, scores / scores.sum(1, keepdim=True))
    output = (x @ weights["shared_gate"].T).sigmoid() * mlp("shared")
    return output + sum(factors[:, number, None] * mlp(f"experts.{number}") for number in range(spec.count))


# Native kernels round the inputs of 4-bit weights.
@pytest.mark.parametrize(
    ("scheme", "bits", "native"),
    [
        ("none", None, False),
        ("int8", 8, False),
        ("int4", 4, False),
        pytest.param("none", None, True, marks=built),
        pytest.param("int8", 8, True, marks=built),
    ],
)
@torch.inference_mode()
def test_rounded_experts_equal_float64(scheme: Any, bits: int | None, native: bool) -> None:
    spec = ExpertsSpec(count=8, top_k=3, inner_size=32, shared_size=32, shared_gate=True)
    block = make_block(spec)
    config, weights = QuantizationConfig(scheme=scheme), {}
    for name, module in block.named_modules():
        if isinstance(module, Linear):
            weights[name] = rounded(module.weight, None if module.stays_plain else bits, config)
    quantize(nn.ModuleDict({"language_model": block}), config)
    block.arrange(NativeCpuDevice(CPU, selected_isa()) if native else Device(CPU))
    x, residual = torch.randn(11, 64), torch.randn(11, 64)
    last, inputs = block(x)
    expected = residual.double() + expected_rows(spec, weights, x.double())
    torch.testing.assert_close(last(inputs, residual).double(), expected, atol=1e-3 if native else 1e-4, rtol=1e-4)
