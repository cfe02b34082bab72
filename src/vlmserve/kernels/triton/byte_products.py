"""Products of many rows whose inputs are rounded to 8 bits beside weights of 8 bits: tensor cores add integers up.

Each `GROUP` inputs of a row have a scale of their own, as on a CPU; a tile of the product is over one such group, so
that its integers become floats once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vlmserve.kernels.triton.host_math import cdiv
from vlmserve.kernels.triton.launching import Kernel

GROUP = 128
"""Inputs of a row that share a scale."""
GROUPS_AT_ONCE = 8
ROWS, OUTPUTS = 64, 128


@Kernel
@triton.jit
def round_rows(
    x_ptr, values_ptr, scales_ptr, stride, width, groups, GROUP: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """`COUNT` groups of a row a program. A group with something that is not finite has NaN for a scale."""
    row = tl.program_id(0).to(tl.int64)
    numbers = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    columns = numbers[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = columns < width
    x = tl.load(x_ptr + row * stride + columns, inside, 0.0).to(tl.float32)
    magnitude = tl.abs(x)
    largest = tl.max(magnitude, 1)
    finite = tl.sum(tl.where(magnitude < float("inf"), 0, 1), 1) == 0
    scaled = x * tl.div_rn(127.0, tl.where(finite & (largest > 0), largest, 1.0))[:, None]
    scaled = tl.where(finite[:, None], scaled, 0.0)
    # Adding 1.5 * 2^23 rounds to an integer, ties to even ones.
    rounded = ((scaled + 12582912.0) - 12582912.0).to(tl.int8)
    tl.store(values_ptr + row * width + columns, rounded, inside)
    scales = tl.where(finite, tl.div_rn(largest, 127.0), float("nan"))
    tl.store(scales_ptr + row * groups + numbers, scales, numbers < groups)


@Kernel
@triton.jit(do_not_specialize=["rows"])
def multiply_bytes(
    x_ptr, x_scales_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, rows, width, out_features, groups,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Programs ``[out_features / OUTPUTS, rows / ROWS]``. Weights are uint8 with 128 for zero."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tokens = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inputs = tl.arange(0, GROUP)
    there = tokens < rows
    x_at = x_ptr + tokens.to(tl.int64)[:, None] * width + inputs[None, :]
    kept = tl.minimum(outputs, out_features - 1)
    weights_at = weight_ptr + kept.to(tl.int64)[:, None] * width + inputs[None, :]
    scales_at = x_scales_ptr + tokens.to(tl.int64) * groups
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for group in tl.range(0, groups, num_stages=STAGES):
        done = group * GROUP
        inside = (inputs < width - done)[None, :]
        x = tl.load(x_at + done, there[:, None] & inside, 0)
        weights = (tl.load(weights_at + done, inside, 128) ^ 128).to(tl.int8, bitcast=True)
        products = tl.dot(x, tl.trans(weights), out_dtype=tl.int32)
        sums += products.to(tl.float32) * tl.load(scales_at + group, there, 0.0)[:, None]
    result = sums * tl.load(scales_ptr + kept)[None, :]
    if HAS_BIAS:
        result += tl.load(bias_ptr + kept).to(tl.float32)[None, :]
    places = tokens.to(tl.int64)[:, None] * out_features + outputs[None, :]
    tl.store(out_ptr + places, result.to(out_ptr.dtype.element_ty), there[:, None] & (outputs < out_features)[None, :])


def rounded_product(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """``[rows, in_features]`` to ``[rows, out_features]``, of the type of x.

    values: uint8 ``[out_features, in_features]``, 128 for zero. scales: float32 ``[out_features]``.
    """
    rows, width = x.shape
    out_features, groups = len(values), cdiv(width, GROUP)
    integers = torch.empty((rows, width), dtype=torch.int8, device=x.device)
    x_scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    out = torch.empty((rows, out_features), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    round_rows[(rows, cdiv(groups, GROUPS_AT_ONCE))](
        x, integers, x_scales, x.stride(0), width, groups, GROUP=GROUP, COUNT=GROUPS_AT_ONCE, num_warps=4
    )
    multiply_bytes[(cdiv(out_features, OUTPUTS), cdiv(rows, ROWS))](
        integers,
        x_scales,
        values,
        scales,
        out if bias is None else bias,
        out,
        rows,
        width,
        out_features,
        groups,
        ROWS=ROWS,
        OUTPUTS=OUTPUTS,
        GROUP=GROUP,
        STAGES=3,
        HAS_BIAS=bias is not None,
        num_warps=4,
    )
    return out
