"""Dequantizes 4-bit and 8-bit weights to memory, for matmuls of many rows by the device's library."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vlmserve.kernels.triton.dependent import wait_for_previous
from vlmserve.kernels.triton.host_math import cdiv
from vlmserve.kernels.triton.launching import Kernel
from vlmserve.kernels.triton.unpacking import nibbles, shift, signed_bytes

OUTPUTS = 16
"""Outputs of a program: their float16 scales fill one 32-byte memory transaction."""
BYTES = 256
"""Packed bytes of an output that a program reads."""


@Kernel
@triton.jit
def expand_groups(
    packed_ptr, scales_ptr, minimums_ptr, out_ptr, out_features, blocks, stride, OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, ASSEMBLY: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Dequantize 4-bit blocks (see `product_kernels.groups_of_4_bits`) in float32, rounded once.

    Programs: ``[blocks / BLOCKS, out_features / OUTPUTS]``. scales_ptr, minimums_ptr: float16 ``[groups,
    out_features]`` with row stride `stride`.
    """
    HALF: tl.constexpr = BLOCK // 2
    UNPACKED: tl.constexpr = tl.bfloat16 if ASSEMBLY else tl.float32
    wait_for_previous(DEPENDENT)
    first = tl.program_id(1).to(tl.int64) * OUTPUTS
    outputs = tl.arange(0, OUTPUTS)[:, None]
    numbers = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    inside = (outputs < out_features - first) & (numbers < blocks)
    places = outputs * blocks + numbers
    inputs = tl.arange(0, HALF)[None, None, :]
    packed = tl.load(packed_ptr + first * blocks * HALF + (places[:, :, None] * HALF + inputs), inside[:, :, None], 0)
    scales_ptr, minimums_ptr = scales_ptr + first, minimums_ptr + first
    low, high = nibbles(packed, UNPACKED, ASSEMBLY)
    at = numbers * GROUPS * stride + outputs
    scales = tl.load(scales_ptr + at, inside, 0.0).to(tl.float32)[:, :, None]
    minimums = tl.load(minimums_ptr + at, inside, 0.0).to(tl.float32)[:, :, None]
    # exact: a scale has 11 significant bits, an integer 4
    low = (low.to(tl.float32) - shift(UNPACKED)) * scales + minimums
    if GROUPS == 2:
        scales = tl.load(scales_ptr + at + stride, inside, 0.0).to(tl.float32)[:, :, None]
        minimums = tl.load(minimums_ptr + at + stride, inside, 0.0).to(tl.float32)[:, :, None]
    high = (high.to(tl.float32) - shift(UNPACKED)) * scales + minimums
    out_at = out_ptr + first * blocks * BLOCK + (places[:, :, None] * BLOCK + inputs)
    tl.store(out_at, low.to(out_ptr.dtype.element_ty), inside[:, :, None])
    tl.store(out_at + HALF, high.to(out_ptr.dtype.element_ty), inside[:, :, None])


@Kernel
@triton.jit
def expand_rows(
    packed_ptr, scales_ptr, out_ptr, out_features, in_features, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    ASSEMBLY: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Dequantize 8-bit weights with 128 as zero. scales_ptr: float32 ``[out_features]``.

    Programs: ``[in_features / INPUTS, out_features / OUTPUTS]``.
    """
    wait_for_previous(DEPENDENT)
    first = tl.program_id(1).to(tl.int64) * OUTPUTS
    outputs = tl.arange(0, OUTPUTS)[:, None]
    inputs = tl.program_id(0) * INPUTS + tl.arange(0, INPUTS)[None, :]
    there = outputs < out_features - first
    inside = there & (inputs < in_features)
    places = outputs * in_features + inputs
    packed = tl.load(packed_ptr + first * in_features + places, inside, 0)
    scales = tl.load(scales_ptr + first + outputs, there, 0.0)
    integers = signed_bytes(packed, tl.float16 if ASSEMBLY else tl.float32, ASSEMBLY).to(tl.float32)
    tl.store(out_ptr + first * in_features + places, (integers * scales).to(out_ptr.dtype.element_ty), inside)


def expanded_groups(
    packed: Tensor, scales: Tensor, minimums: Tensor, block: int, dtype: torch.dtype, assembly: bool
) -> Tensor:
    """Dequantize 4-bit ``[out_features, in_features / 2]`` to ``[out_features, in_features]``.

    block: inputs per block. scales, minimums: float16 ``[groups, out_features]``, possibly column slices.
    """
    groups, out_features = scales.shape
    blocks = 2 * packed.shape[1] // block
    out = torch.empty((out_features, blocks * block), dtype=dtype, device=packed.device)
    at_once = 2 * BYTES // block
    expand_groups[(cdiv(blocks, at_once), cdiv(out_features, OUTPUTS))](
        packed, scales, minimums, out, out_features, blocks, scales.stride(0), OUTPUTS=OUTPUTS, BLOCKS=at_once,
        BLOCK=block, GROUPS=groups // blocks, ASSEMBLY=assembly, num_warps=4,
    )  # fmt: skip
    return out


def expanded_rows(packed: Tensor, scales: Tensor, dtype: torch.dtype, assembly: bool) -> Tensor:
    """Dequantize 8-bit ``[out_features, in_features]`` with 128 as zero. scales: float32 ``[out_features]``."""
    out_features, in_features = packed.shape
    out = torch.empty(packed.shape, dtype=dtype, device=packed.device)
    expand_rows[(cdiv(in_features, BYTES), cdiv(out_features, OUTPUTS))](
        packed, scales, out, out_features, in_features, OUTPUTS=OUTPUTS, INPUTS=BYTES, ASSEMBLY=assembly, num_warps=4
    )
    return out
