"""Rounds inputs of float8 matmuls in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vlmserve.kernels.quantized import FLOAT8
from vlmserve.kernels.torch_float8 import Float8Product
from vlmserve.kernels.triton.dependent import wait_for_previous
from vlmserve.kernels.triton.host_math import next_power_of_2
from vlmserve.kernels.triton.launching import Kernel
from vlmserve.kernels.triton.unpacking import to_float8

BLOCK = 4096
"""Maximum number of inputs that a program holds at a time."""


@Kernel
@triton.jit
def round_to_float8(
    x_ptr, values_ptr, scales_ptr, stride, width, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False
):  # fmt: skip
    """One row a program. The scale of a row with numbers that are not finite is NaN."""
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    magnitudes = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + columns < width
        magnitude = tl.abs(tl.load(x_ptr + row * stride + start + columns, inside, 0.0).to(tl.float32))
        # A maximum may pass over NaN.
        magnitudes = tl.maximum(magnitudes, tl.where(magnitude < float("inf"), magnitude, float("inf")))
    largest = tl.max(magnitudes, 0)
    is_finite = largest < float("inf")
    scale = tl.div_rn(tl.where(is_finite, tl.maximum(largest, 1e-12), 1.0), 448.0)
    for start in range(0, width, BLOCK):
        inside = start + columns < width
        x = tl.load(x_ptr + row * stride + start + columns, inside, 0.0).to(tl.float32)
        rounded = to_float8(tl.where(is_finite, tl.div_rn(x, scale), 0.0))
        tl.store(values_ptr + row * width + start + columns, rounded.to(tl.uint8), inside)
    tl.store(scales_ptr + row, tl.where(is_finite, scale, float("nan")))


class TritonFloat8Product(Float8Product):
    """A `Float8Product` with a scale for each row."""

    def _round(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows, width = x.shape
        values = torch.empty((rows, width), dtype=torch.uint8, device=x.device)
        scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
        if x.stride(1) != 1:
            x = x.contiguous()
        if rows:
            block = min(BLOCK, next_power_of_2(width))
            round_to_float8[(rows,)](x, values, scales, x.stride(0), width, BLOCK=block, num_warps=8)
        return values.view(FLOAT8), scales
