"""Products with small tiles: each warp of a program multiplies inputs of its own.

Few rows and few outputs give a program work for one warp, and a multiprocessor needs several to issue instructions
while others wait for memory. `PARTS` tiles of inputs lie side by side, one for each warp, and their sums
are added behind the last ones, in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vlmserve.kernels.triton.unpacking import nibbles, shift, signed_bytes


@triton.jit
def groups_of_4_bits(
    x_ptr, weight_ptr, scales_ptr, minimums_ptr, outputs, tokens, rows, first, last, stride_x, in_features,
    out_features, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """As `product_kernels.groups_of_4_bits`. EVEN: as many groups as are whole rounds."""
    HALF: tl.constexpr = GROUP // 2
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    inputs = tl.arange(0, HALF)
    parts = tl.arange(0, PARTS)
    sums = tl.zeros((PARTS, OUTPUTS, TOKENS), tl.float32)
    outputs = tl.minimum(outputs, out_features - 1)
    rows_at = parts[:, None, None] * HALF + outputs.to(tl.int64)[None, :, None] * (in_features // 2)
    weights_at = weight_ptr + rows_at + inputs[None, None, :]
    x_at = x_ptr + parts[:, None, None] * GROUP + tokens[None, None, :] * stride_x + inputs[None, :, None]
    scales_at = parts[:, None] * out_features + outputs[None, :]
    inside = (tokens < rows)[None, None, :]
    for group in tl.range(first, last, PARTS, num_stages=STAGES):
        groups_at = scales_at + group * out_features
        if EVEN:
            packed = tl.load(weights_at + group * HALF)
            low = tl.load(x_at + group * GROUP, inside, 0.0)
            high = tl.load(x_at + group * GROUP + HALF, inside, 0.0)
            scales = tl.load(scales_ptr + groups_at).to(tl.float32)
            minimums = tl.load(minimums_ptr + groups_at).to(tl.float32)
        else:
            there = group + parts < last
            packed = tl.load(weights_at + group * HALF, there[:, None, None], 0)
            low = tl.load(x_at + group * GROUP, inside & there[:, None, None], 0.0)
            high = tl.load(x_at + group * GROUP + HALF, inside & there[:, None, None], 0.0)
            scales = tl.load(scales_ptr + groups_at, there[:, None], 0.0).to(tl.float32)
            minimums = tl.load(minimums_ptr + groups_at, there[:, None], 0.0).to(tl.float32)
        low_weights, high_weights = nibbles(packed, DTYPE, ASSEMBLY)
        products = tl.dot(low_weights, low, tl.zeros((PARTS, OUTPUTS, TOKENS), tl.float32), input_precision="ieee")
        products = tl.dot(high_weights, high, products, input_precision="ieee")
        total = tl.sum(low.to(tl.float32) + high.to(tl.float32), 1)
        shifted = (minimums - shift(DTYPE) * scales)[:, :, None] * total[:, None, :]
        sums += scales[:, :, None] * products + shifted
    return tl.sum(sums, 0)


@triton.jit
def whole_rows(
    x_ptr, weight_ptr, scales_ptr, outputs, tokens, rows, first, last, stride_x, in_features, out_features,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
    BITS: tl.constexpr, STAGES: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """As `product_kernels.whole_rows`. EVEN: the inputs are whole tiles, as many as are whole rounds."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    inputs = tl.arange(0, INPUTS)
    parts = tl.arange(0, PARTS)
    sums = tl.zeros((PARTS, OUTPUTS, TOKENS), tl.float32)
    outputs = tl.minimum(outputs, out_features - 1)
    rows_at = parts[:, None, None] * INPUTS + outputs.to(tl.int64)[None, :, None] * in_features
    weights_at = weight_ptr + rows_at + inputs[None, None, :]
    x_at = x_ptr + parts[:, None, None] * INPUTS + tokens[None, None, :] * stride_x + inputs[None, :, None]
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
    result = tl.sum(sums, 0)
    if BITS == 8:
        result *= tl.load(scales_ptr + outputs).to(tl.float32)[:, None]
    return result
