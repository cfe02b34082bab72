"""Matmuls with small tiles: each warp of a program multiplies its own inputs, which hides memory latency."""

from __future__ import annotations

import triton
import triton.language as tl

from vlmserve.kernels.triton.unpacking import load_groups, nibbles, ones, scaled, signed_bytes

PARTS_BEFORE_ROWS = tl.constexpr(2)
"""A contiguity hint along the parts of a tile. Rows get 1.

Loads do not use it: they vectorize along inputs. But it makes Triton swizzle a tile's rows in shared memory instead of
its parts, which would cause eight-way bank conflicts.
"""


@triton.jit
def sum_of_parts(sums, PARTS: tl.constexpr, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr):
    """Sum ``[PARTS, OUTPUTS, TOKENS]`` by halving. `tl.sum` would cause bank conflicts."""
    HALF: tl.constexpr = PARTS // 2
    halves = tl.permute(tl.reshape(sums, (2, HALF, OUTPUTS, TOKENS)), (1, 2, 3, 0))
    first, second = tl.split(halves)
    if HALF == 1:
        result = tl.reshape(first + second, (OUTPUTS, TOKENS))
    else:
        result = sum_of_parts(first + second, HALF, OUTPUTS, TOKENS)
    return result


@triton.jit
def groups_of_4_bits(
    x_ptr, weight_ptr, scales_ptr, minimums_ptr, outputs, tokens, rows, first, last, stride_x, in_features,
    out_features, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    PARTS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """See `product_kernels.groups_of_4_bits`. EVEN: the blocks fill whole rounds."""
    HALF: tl.constexpr = BLOCK // 2
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    inputs = tl.arange(0, HALF)
    parts = tl.arange(0, PARTS)
    sums = tl.zeros((PARTS, OUTPUTS, TOKENS), tl.float32)
    nothing = tl.zeros((PARTS, OUTPUTS, TOKENS), tl.float32)
    outputs = tl.minimum(outputs, out_features - 1)
    width = tl.multiple_of(in_features // 2, 16)
    rows_at = parts[:, None, None] * HALF + outputs.to(tl.int64)[None, :, None] * width
    weights_at = tl.max_contiguous(weight_ptr + rows_at + inputs[None, None, :], (PARTS_BEFORE_ROWS, 1, HALF))
    inputs_at = parts[:, None, None] * BLOCK + inputs[None, :, None]
    x_at = tl.max_contiguous(x_ptr + tokens[None, None, :] * stride_x + inputs_at, (PARTS_BEFORE_ROWS, HALF, 1))
    inside = (tokens < rows)[None, None, :]
    at, outputs = tl.minimum(first + parts, last - 1)[:, None], outputs[None, :]
    next_scales, next_minimums = load_groups(scales_ptr, minimums_ptr, at, outputs, out_features, GROUPS, 0)
    if GROUPS == 2:
        high_scales, high_minimums = load_groups(scales_ptr, minimums_ptr, at, outputs, out_features, GROUPS, 1)
    for block in tl.range(first, last, PARTS, num_stages=STAGES):
        scales, minimums = next_scales, next_minimums
        at = tl.minimum(block + PARTS + parts, last - 1)[:, None]
        next_scales, next_minimums = load_groups(scales_ptr, minimums_ptr, at, outputs, out_features, GROUPS, 0)
        if EVEN:
            packed = tl.load(weights_at + block * HALF)
            low = tl.load(x_at + block * BLOCK, inside, 0.0)
            high = tl.load(x_at + block * BLOCK + HALF, inside, 0.0)
        else:
            there = (block + parts < last)[:, None, None]
            packed = tl.load(weights_at + block * HALF, there, 0)
            low = tl.load(x_at + block * BLOCK, inside & there, 0.0)
            high = tl.load(x_at + block * BLOCK + HALF, inside & there, 0.0)
        low_weights, high_weights = nibbles(packed, DTYPE, ASSEMBLY)
        products = tl.dot(low_weights, low, nothing, input_precision="ieee")
        if tl.float32 == DTYPE:
            totals = tl.sum(low, 1)[:, None, :]
        else:
            # other instructions would need another input order in shared memory
            each = ones(packed, DTYPE, ASSEMBLY)
            totals = tl.dot(each, low, nothing)
        if GROUPS == 2:
            sums += scaled(products, totals, scales[:, :, None], minimums[:, :, None], DTYPE)
            scales, minimums = high_scales, high_minimums
            high_scales, high_minimums = load_groups(scales_ptr, minimums_ptr, at, outputs, out_features, GROUPS, 1)
            products, totals = nothing, nothing
        products = tl.dot(high_weights, high, products, input_precision="ieee")
        if tl.float32 == DTYPE:
            totals += tl.sum(high, 1)[:, None, :]
        else:
            totals = tl.dot(each, high, totals)
        sums += scaled(products, totals, scales[:, :, None], minimums[:, :, None], DTYPE)
    return sum_of_parts(sums, PARTS, OUTPUTS, TOKENS)


@triton.jit
def whole_rows(
    x_ptr, weight_ptr, scales_ptr, outputs, tokens, rows, first, last, stride_x, in_features, out_features,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
    BITS: tl.constexpr, STAGES: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """See `product_kernels.whole_rows`. EVEN: the inputs fill whole tiles and rounds."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    inputs = tl.arange(0, INPUTS)
    parts = tl.arange(0, PARTS)
    sums = tl.zeros((PARTS, OUTPUTS, TOKENS), tl.float32)
    outputs = tl.minimum(outputs, out_features - 1)
    rows_at = parts[:, None, None] * INPUTS + outputs.to(tl.int64)[None, :, None] * in_features
    weights_at = tl.max_contiguous(weight_ptr + rows_at + inputs[None, None, :], (PARTS_BEFORE_ROWS, 1, INPUTS))
    inputs_at = parts[:, None, None] * INPUTS + inputs[None, :, None]
    x_at = tl.max_contiguous(x_ptr + tokens[None, None, :] * stride_x + inputs_at, (PARTS_BEFORE_ROWS, INPUTS, 1))
    inside = (tokens < rows)[None, None, :]
    for tile in tl.range(first, last, PARTS, num_stages=STAGES):
        done = tile * INPUTS
        if EVEN:
            stored = tl.load(weights_at + done)
            x = tl.load(x_at + done, inside, 0.0)
        else:
            numbers = tile + parts
            there = (numbers < last)[:, None] & (inputs[None, :] < in_features - numbers[:, None] * INPUTS)
            stored = tl.load(weights_at + done, there[:, None, :], 0)
            x = tl.load(x_at + done, inside & there[:, :, None], 0.0)
        weights = signed_bytes(stored, DTYPE, ASSEMBLY) if BITS == 8 else stored
        sums = tl.dot(weights, x, sums, input_precision="ieee")
    result = sum_of_parts(sums, PARTS, OUTPUTS, TOKENS)
    if BITS == 8:
        result *= tl.load(scales_ptr + outputs).to(tl.float32)[:, None]
    return result
