"""torch's own product of 4 bits, beside the weight that it stands for."""

from __future__ import annotations

import pytest
import torch

from vlmserve.kernels.operations import Epilogue
from vlmserve.kernels.torch_int4 import Int4LinearKernel, unsupported_reason
from vlmserve.quant.methods.rtn import round_to_nearest


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_product_is_that_of_the_weight(kind: str, symmetric: bool) -> None:
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    torch.manual_seed(0)
    plain, x, bias = torch.randn(64, 256) / 16, torch.randn(2, 3, 256).bfloat16(), torch.randn(64).bfloat16()
    weight = round_to_nearest(plain.to(kind), bits=4, group_size=32, symmetric=symmetric)
    assert unsupported_reason(weight, torch.bfloat16) is None
    product = Int4LinearKernel(weight, bias.to(kind), Epilogue("silu"))
    ours = product(x.to(kind)).cpu().double()
    expected = torch.nn.functional.silu(x.double() @ weight.dequantize().cpu().double().T + bias.double())
    torch.testing.assert_close(ours, expected, atol=0.03, rtol=0.02)
    assert product.num_bytes == 64 * 256 // 2 + 64 * 8 * 2 * 2


def test_what_torch_cannot_multiply_has_a_reason() -> None:
    weight = round_to_nearest(torch.randn(64, 256), bits=4, group_size=32, symmetric=False)
    assert unsupported_reason(weight, torch.float16) == "torch's 4-bit matmul does not support torch.float16"
    odd = round_to_nearest(torch.randn(60, 256), bits=4, group_size=32, symmetric=False)
    assert unsupported_reason(odd, torch.bfloat16) == "torch's 4-bit matmul does not support 60 x 256 weights"
    octets = round_to_nearest(torch.randn(64, 256), bits=8, group_size=256, symmetric=True)
    assert unsupported_reason(octets, torch.bfloat16) == "torch's 4-bit matmul does not support 8-bit groups of 256"
