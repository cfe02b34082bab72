"""Rounds inputs of 8-bit matmuls: rows to float8, groups of a row to int8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vlmserve.kernels.operations import RoundedRows, Rounding
from vlmserve.kernels.triton.dependent import wait_for_previous
from vlmserve.kernels.triton.gated import Layout, load_activated
from vlmserve.kernels.triton.host_math import cdiv, next_power_of_2
from vlmserve.kernels.triton.launching import Kernel
from vlmserve.kernels.triton.unpacking import to_float8

GROUP = tl.constexpr(128)
"""Inputs of a row that share an int8 scale."""
GROUPS_AT_ONCE = 8
BLOCK = 4096
"""Maximum inputs that a program rounding to float8 holds at once."""


@triton.jit
def load_inputs(x_ptr, first, width, ACTIVATION: tl.constexpr, LAYOUT: tl.constexpr, COUNT: tl.constexpr):
    """Load inputs, rounded to the row's dtype. 0 past `width`."""
    x = load_activated(x_ptr, first, width, ACTIVATION, LAYOUT, COUNT)
    inside = first + tl.arange(0, COUNT) < width
    return tl.where(inside, x, 0.0).to(x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def magnitudes(x):
    """Return absolute values, infinity for NaN, which a maximum may ignore."""
    return tl.where(tl.abs(x) < float("inf"), tl.abs(x), float("inf"))


@triton.jit
def float8_scale(largest):
    """The scale, and whether it is finite."""
    is_finite = largest < float("inf")
    return tl.div_rn(tl.where(is_finite, tl.maximum(largest, 1e-12), 1.0), 448.0), is_finite


@triton.jit
def rounded_to_float8(x, scale, is_finite):
    return to_float8(tl.where(is_finite, tl.div_rn(x, scale), 0.0)).to(tl.uint8)


@triton.jit
def rounded_groups(x):
    """Return int8 values of float32 ``[groups, GROUP]`` and scales, NaN for non-finite groups."""
    largest = tl.max(magnitudes(x), 1)
    is_finite = largest < float("inf")
    scaled = x * tl.div_rn(127.0, tl.where(is_finite & (largest > 0), largest, 1.0))[:, None]
    # adding 1.5 * 2^23 rounds to an integer, ties to even
    values = ((tl.where(is_finite[:, None], scaled, 0.0) + 12582912.0) - 12582912.0).to(tl.int8)
    return values, tl.where(is_finite, tl.div_rn(largest, 127.0), float("nan"))


@triton.jit
def store_groups(x, values_ptr, scales_ptr, row, first, width, COUNT: tl.constexpr):
    columns = first + tl.arange(0, COUNT * GROUP)
    numbers = first // GROUP + tl.arange(0, COUNT)
    groups = tl.cdiv(width, GROUP)
    values, scales = rounded_groups(tl.reshape(x, (COUNT, GROUP)))
    tl.store(values_ptr + row * width + columns, tl.reshape(values, (COUNT * GROUP,)), columns < width)
    tl.store(scales_ptr + row * groups + numbers, scales, numbers < groups)


@triton.jit
def store_rounded(
    x, values_ptr, scales_ptr, row, ROUNDS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """x must be 0 past `SIZE`."""
    if ROUNDS == "float8":
        columns = tl.arange(0, BLOCK)
        scale, is_finite = float8_scale(tl.max(magnitudes(x), 0))
        tl.store(values_ptr + row * SIZE + columns, rounded_to_float8(x, scale, is_finite), columns < SIZE)
        tl.store(scales_ptr + row, tl.where(is_finite, scale, float("nan")))
    else:
        store_groups(x, values_ptr, scales_ptr, row, 0, SIZE, BLOCK // GROUP)


@Kernel
@triton.jit
def round_to_float8(
    x_ptr, values_ptr, scales_ptr, stride, width, ACTIVATION: tl.constexpr, LAYOUT: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Non-finite rows get scale NaN."""
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        x = load_inputs(x_ptr + row * stride, start, width, ACTIVATION, LAYOUT, BLOCK)
        largest = tl.maximum(largest, magnitudes(x))
    scale, is_finite = float8_scale(tl.max(largest, 0))
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = load_inputs(x_ptr + row * stride, start, width, ACTIVATION, LAYOUT, BLOCK)
        tl.store(values_ptr + row * width + columns, rounded_to_float8(x, scale, is_finite), columns < width)
    tl.store(scales_ptr + row, tl.where(is_finite, scale, float("nan")))


@Kernel
@triton.jit
def round_to_int8(
    x_ptr, values_ptr, scales_ptr, stride, width, ACTIVATION: tl.constexpr, LAYOUT: tl.constexpr, COUNT: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * (COUNT * GROUP)
    x = load_inputs(x_ptr + row * stride, first, width, ACTIVATION, LAYOUT, COUNT * GROUP)
    store_groups(x, values_ptr, scales_ptr, row, first, width, COUNT)


def allocate_rounded(x: Tensor, rounding: Rounding, width: int | None = None) -> RoundedRows:
    rows, width, device = len(x), width or x.shape[1], x.device
    dtype, scales = (torch.uint8, 1) if rounding == "float8" else (torch.int8, cdiv(width, GROUP.value))
    return RoundedRows(
        torch.empty((rows, width), dtype=dtype, device=device),
        torch.empty((rows, scales), dtype=torch.float32, device=device),
    )


def round_rows(x: Tensor, rounding: Rounding, activation: str | None = None, layout: Layout = "") -> RoundedRows:
    """Round ``[rows, width]``, or activations, in one launch. With gates, x is twice as wide."""
    rows, width = x.shape
    width //= 2 if layout else 1
    if x.stride(1) != 1:
        x = x.contiguous()
    rounded = allocate_rounded(x, rounding, width)
    if not rows:
        return rounded
    arguments = x, rounded.values, rounded.scales, x.stride(0), width
    if rounding == "float8":
        block = min(BLOCK, next_power_of_2(width))
        round_to_float8[(rows,)](
            *arguments, ACTIVATION=activation or "", LAYOUT=layout, BLOCK=block, num_warps=max(1, block // 512)
        )
    else:
        round_to_int8[(rows, cdiv(cdiv(width, GROUP.value), GROUPS_AT_ONCE))](
            *arguments, ACTIVATION=activation or "", LAYOUT=layout, COUNT=GROUPS_AT_ONCE, num_warps=4
        )
    return rounded
