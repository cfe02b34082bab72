"""torch's own product of float8, beside the weight that it stands for."""

from __future__ import annotations

import pytest
import torch

from vlmserve.kernels.operations import Epilogue
from vlmserve.kernels.quantized import FLOAT8, QuantizedWeight
from vlmserve.kernels.torch_float8 import LARGEST, Float8LinearKernel, unsupported_reason
from vlmserve.quant.formats.scaled import from_tensors


def made(scales: torch.Tensor, kind: str = "cpu") -> QuantizedWeight:
    """A random weight with these scales of outputs."""
    values = (torch.randn(len(scales), 64) * 50).to(FLOAT8)
    weight = from_tensors({"weight": values, "weight_scale": scales})
    assert isinstance(weight, QuantizedWeight)
    assert torch.equal(weight.dequantize(), values.float() * scales.reshape(-1, 1))
    parts = (part.to(kind) for part in (weight.values, weight.scales, weight.minimums))
    return QuantizedWeight(8, 64, *parts, is_float8=True)


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_matmul_rounds_inputs_first(kind: str, by_rows: bool) -> None:
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    torch.manual_seed(0)
    scales = torch.rand(32) / 400 if by_rows else torch.full((32,), 0.002)
    weight, bias = made(scales, kind), torch.randn(32).bfloat16()
    product = Float8LinearKernel(weight, bias.to(kind), Epilogue("silu"), torch.bfloat16, by_rows=by_rows)
    assert product.num_bytes == 32 * 64 + 4 * (32 if by_rows else 1)
    x = torch.randn(2, 5, 64).bfloat16() * torch.tensor([0.1, 1, 10, 100, 1])[:, None].bfloat16()
    largest = x.double().abs().amax(2, keepdim=True) if by_rows else x.double().abs().amax()
    rounded = (x.float() / (largest / LARGEST).float()).to(FLOAT8).double() * largest / LARGEST
    plain = weight.dequantize().cpu().double()
    expected = torch.nn.functional.silu(rounded @ plain.T + bias.double())
    torch.testing.assert_close(product(x.to(kind)).cpu().double(), expected, atol=0.05, rtol=0.02)
    places = torch.tensor([3, 0, 3])
    torch.testing.assert_close(product.rows(places.to(kind)).cpu(), plain[places].bfloat16())


def test_what_a_gpu_cannot_multiply_has_a_reason() -> None:
    one, several = made(torch.full((32,), 0.5)), made(torch.rand(32))
    assert unsupported_reason(one, (8, 9)) is None
    assert unsupported_reason(several, (9, 0)) is None
    assert "per output need compute capability 9.0" in str(unsupported_reason(several, (8, 9)))
    assert "this GPU has 8.0" in str(unsupported_reason(one, (8, 0)))
    assert "24 x 64" in str(unsupported_reason(made(torch.rand(24)), (9, 0)))
    octets = QuantizedWeight(8, 64, one.values, one.scales, -128 * one.scales)
    assert unsupported_reason(octets, (9, 0)) == "it is not float8"


def test_float8_is_neither_integers_nor_joined_with_them() -> None:
    weight = made(torch.rand(32))
    assert not weight.is_supported
    assert not weight.is_in_byte_groups
    joined = QuantizedWeight.join([weight, weight]).in_smaller_groups()
    assert torch.equal(joined.dequantize(), torch.cat([weight.dequantize()] * 2))
    octets = QuantizedWeight(8, 64, weight.values, weight.scales, -128 * weight.scales)
    with pytest.raises(ValueError, match="float8"):
        QuantizedWeight.join([weight, octets])
