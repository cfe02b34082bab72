"""Products by torch's operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.kernels import torch_products
from vlmserve.kernels.operations import NO_EPILOGUE, Epilogue
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.kernels.torch_products import (
    FEW_ROWS,
    PlainLinearKernel,
    QuantizedLinearKernel,
    UpcastLinearKernel,
    torch_linear,
)
from vlmserve.quant.methods.rtn import round_to_nearest

IN_FEATURES = 64


def quantized(out_features: int, bits: int, *, group_size: int = 32, symmetric: bool = False) -> QuantizedWeight:
    weight = torch.randn(out_features, IN_FEATURES, generator=torch.Generator().manual_seed(0))
    return round_to_nearest(weight, bits=bits, group_size=group_size, symmetric=symmetric)


def inputs(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, IN_FEATURES, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1, 100])
def test_bfloat16_matmul_needs_no_bfloat16_instructions(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    product = torch.nn.functional.linear
    monkeypatch.setattr(torch_products.F, "linear", lambda x, *rest: (computed.append(x.dtype), product(x, *rest))[1])
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(rows, 48, generator=generator), torch.randn(20, 48, generator=generator)
    bias = torch.randn(20, generator=generator)
    x, weight, bias = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
    output = UpcastLinearKernel(weight, bias)(x)
    assert computed == [torch.bfloat16 if rows <= FEW_ROWS else torch.float32]
    assert output.dtype == torch.bfloat16
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(output.double(), exact, rtol=0.02, atol=0.05)


@pytest.mark.parametrize(("has_them", "kind"), [(True, PlainLinearKernel), (False, UpcastLinearKernel)])
def test_plain_layer_knows_the_fast_dtype(
    has_them: bool, kind: type[PlainLinearKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_products, "multiplies_bfloat16", lambda: has_them)
    weight = torch.zeros(8, IN_FEATURES)
    assert type(torch_linear(weight.bfloat16(), None, NO_EPILOGUE, torch.bfloat16)) is kind
    assert type(torch_linear(weight, None, NO_EPILOGUE, torch.float32)) is PlainLinearKernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_rows", [1, 3, 7, 1000])
@pytest.mark.parametrize("out_features", [1, 2, 13, 14])
@pytest.mark.parametrize(("bits", "group_size"), [(8, 32), (4, 32), (4, 24)])
def test_quantized_matmul_equals_dequantized_matmul(
    bits: int, group_size: int, out_features: int, block_rows: int, dtype: torch.dtype
) -> None:
    weight = quantized(out_features, bits, group_size=group_size)
    x, bias = inputs(5, dtype), torch.randn(out_features).to(dtype)
    product = QuantizedLinearKernel(weight, bias, NO_EPILOGUE, dtype, block_elements=block_rows * IN_FEATURES)
    expected = F.linear(x, weight.dequantize().to(dtype), bias)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(product(x), expected, rtol=tolerance, atol=tolerance)
    assert product(x).dtype == dtype
    assert product(x[None]).shape == (1, 5, out_features)
    assert product(x[:0]).shape == (0, out_features)
    ids = torch.tensor([0, out_features - 1, out_features // 2, 0])
    assert torch.equal(product.rows(ids), weight.dequantize()[ids].to(dtype))


def test_matmul_dtype_keeps_the_result_dtype() -> None:
    weight = quantized(6, 8)
    product = QuantizedLinearKernel(weight, None, NO_EPILOGUE, torch.bfloat16, compute=torch.float32)
    output = product(inputs(5, torch.bfloat16))
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, F.linear(inputs(5, torch.bfloat16).float(), weight.dequantize()).bfloat16())


@pytest.mark.parametrize("bits", [4, 8])
def test_epilogues_follow_the_product_whatever_the_weight_is(bits: int) -> None:
    weight, x = quantized(14, bits), inputs(5)
    residual = torch.randn(5, 7)
    for epilogue in (Epilogue("silu", gated=True), Epilogue("gelu"), Epilogue(float_output=True)):
        added = residual if epilogue.gated else None
        plain = PlainLinearKernel(weight.dequantize(), None, epilogue)(x, added)
        torch.testing.assert_close(QuantizedLinearKernel(weight, None, epilogue, torch.float32)(x, added), plain)


@pytest.mark.parametrize("bits", [4, 8])
def test_one_block_is_dequantized_at_a_time(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expanded = []
    product = torch.nn.functional.linear

    def record(x: Tensor, weight: Tensor, *rest: Tensor | None) -> Tensor:
        expanded.append(weight.numel())
        return product(x, weight, *rest)

    monkeypatch.setattr(torch_products.F, "linear", record)
    weight = quantized(300, bits)
    QuantizedLinearKernel(weight, None, NO_EPILOGUE, torch.float32, block_elements=16 * IN_FEATURES)(inputs(3))
    assert max(expanded) == 16 * IN_FEATURES
    assert sum(expanded) == 300 * IN_FEATURES


def test_two_4_bit_weights_share_a_byte() -> None:
    weight = quantized(64, 4, group_size=64)
    product = QuantizedLinearKernel(weight, None, NO_EPILOGUE, torch.float32)
    assert product.num_bytes == 64 * IN_FEATURES // 2 + 2 * 64 * 4
