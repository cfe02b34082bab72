"""Products with small tiles: each warp of a program multiplies inputs of its own.

Few rows and few outputs give a program work for one warp, and a multiprocessor needs several to issue instructions
while others wait for memory. `PARTS` tiles of inputs lie side by side, one for each warp, and their sums
are added behind the last ones, in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vlmserve.kernels.triton.unpacking import load_groups, nibbles, ones, scaled, signed_bytes

PARTS_BEFORE_ROWS = tl.constexpr(2)
"""How many addresses are said to be neighbors along the parts of a tile, beside 1 along its rows.

It is nothing that a load uses: inputs, along which many more are neighbors, are what is read side by side. But with it
Triton's compiler swizzles a tile's rows in shared memory. Without it, it swizzles parts, and eight threads wait for
each other in each bank.
"""


@triton.jit
def sum_of_parts(sums, PARTS: tl.constexpr, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr):
    """``[PARTS, OUTPUTS, TOKENS]`` added to ``[OUTPUTS, TOKENS]``: halves of the parts, in turn.

    `tl.sum` has each warp store its part so that threads wait for each other's banks.
    """
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
    """As `product_kernels.groups_of_4_bits`. EVEN: as many blocks as are whole rounds."""
    HALF: tl.constexpr = BLOCK // 2
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    inputs = tl.arange(0, HALF)
    parts = tl.arange(0, PARTS)
    sums = tl.zeros((PARTS, OUTPUTS, TOKENS), tl.float32)
    nothing = tl.zeros((PARTS, OUTPUTS, TOKENS), tl.float32)
    outputs = tl.minimum(outputs, out_features - 1)
    width = tl.multiple_of(in_features // 2, 16)
    rows_at = parts[:, None, None] * HALF + outputs.to(tl.int64)[None, :, None] * width
    # See `PARTS_BEFORE_ROWS`.
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
            # By tensor cores: other instructions would need inputs in another order in shared memory.
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
    """As `product_kernels.whole_rows`. EVEN: the inputs are whole tiles, as many as are whole rounds."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    inputs = tl.arange(0, INPUTS)
    parts = tl.arange(0, PARTS)
    sums = tl.zeros((PARTS, OUTPUTS, TOKENS), tl.float32)
    outputs = tl.minimum(outputs, out_features - 1)
    rows_at = parts[:, None, None] * INPUTS + outputs.to(tl.int64)[None, :, None] * in_features
    # See `PARTS_BEFORE_ROWS`.
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
