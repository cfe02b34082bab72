"""Matmuls of many rows with 8-bit weights and 8-bit inputs, in integers on tensor cores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vlmserve.kernels.operations import RoundedRows
from vlmserve.kernels.triton.host_math import cdiv
from vlmserve.kernels.triton.launching import Kernel
from vlmserve.kernels.triton.rounding import GROUP

ROWS, OUTPUTS = 64, 128


@Kernel
@triton.jit(do_not_specialize=["rows"])
def multiply_bytes(
    x_ptr, x_scales_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, rows, width, out_features, groups,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Programs: ``[out_features / OUTPUTS, rows / ROWS]``. A tile covers one group, so its sums are converted once."""
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


def rounded_product(x: RoundedRows, values: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply int8 ``[rows, in_features]``. Returns ``[rows, out_features]`` of `dtype`.

    values: uint8 ``[out_features, in_features]``, 128 as zero. scales: float32 ``[out_features]``.
    """
    rows, width = x.values.shape
    out_features, groups = len(values), x.scales.shape[1]
    out = torch.empty((rows, out_features), dtype=dtype, device=values.device)
    if not rows:
        return out
    multiply_bytes[(cdiv(out_features, OUTPUTS), cdiv(rows, ROWS))](
        x.values,
        x.scales,
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
        GROUP=GROUP.value,
        STAGES=3,
        HAS_BIAS=bias is not None,
        num_warps=4,
    )
    return out
