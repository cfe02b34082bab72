"""Products with few rows: weights are the rows of the tile, tokens its columns.

What follows on a product (bias, activation, gate, residual) is in the same launch. Sums have a fixed order: no two
programs add to the same number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vlmserve.kernels.triton import divided_inputs
from vlmserve.kernels.triton.activations import activate
from vlmserve.kernels.triton.dependent import wait_for_previous
from vlmserve.kernels.triton.launching import Kernel
from vlmserve.kernels.triton.unpacking import dequantized, load_groups, signed_bytes


@triton.jit
def dot(weights, x, sums):
    """``[outputs, inputs]`` by ``[inputs, tokens]`` onto float32 sums. float32 is not rounded to fewer bits."""
    return tl.dot(weights, x, sums, input_precision="ieee")


@triton.jit
def groups_of_4_bits(
    x_ptr, weight_ptr, scales_ptr, minimums_ptr, outputs, tokens, rows, first, last, stride_x, in_features,
    out_features, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr, BLOCK: tl.constexpr,
    GROUPS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Float32 sums ``[OUTPUTS, TOKENS]`` over tiles of INPUTS inputs, ``first <= tile < last``, of one or more blocks.
    EVEN: the inputs are whole tiles.

    Byte i of a block holds its inputs i and i + BLOCK / 2, which are of one group, or each of its own: GROUPS. Weights
    are rounded to the type of x, as the library gets them: to scale the products of each group instead takes as many
    instructions for each row.
    """
    HALF: tl.constexpr = BLOCK // 2
    BLOCKS: tl.constexpr = INPUTS // BLOCK
    WIDTH: tl.constexpr = INPUTS // 2
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    at_once = tl.arange(0, WIDTH)
    blocks = tl.arange(0, BLOCKS)
    sums = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    outputs = tl.minimum(outputs, out_features - 1)
    width = tl.multiple_of(in_features // 2, 16)
    weights_at = weight_ptr + outputs.to(tl.int64)[:, None] * width + at_once[None, :]
    low_inputs = at_once // HALF * BLOCK + at_once % HALF
    x_at = x_ptr + tokens[None, :] * stride_x + low_inputs[:, None]
    inside = tokens[None, :] < rows
    outputs = outputs[:, None]
    last_block = in_features // BLOCK - 1
    # Scales and minimums are loaded a round before they are needed. Triton does that for what tensor cores multiply
    # alone.
    at = tl.minimum(first * BLOCKS + blocks, last_block)[None, :]
    next_scales, next_minimums = load_groups(scales_ptr, minimums_ptr, at, outputs, out_features, GROUPS, 0)
    next_high_scales, next_high_minimums = next_scales, next_minimums
    if GROUPS == 2:
        next_high_scales, next_high_minimums = load_groups(
            scales_ptr, minimums_ptr, at, outputs, out_features, GROUPS, 1
        )
    for tile in tl.range(first, last, num_stages=STAGES):
        scales, minimums = next_scales.to(tl.float32)[:, :, None], next_minimums.to(tl.float32)[:, :, None]
        high_scales, high_minimums = scales, minimums
        at = tl.minimum((tile + 1) * BLOCKS + blocks, last_block)[None, :]
        next_scales, next_minimums = load_groups(scales_ptr, minimums_ptr, at, outputs, out_features, GROUPS, 0)
        if GROUPS == 2:
            high_scales = next_high_scales.to(tl.float32)[:, :, None]
            high_minimums = next_high_minimums.to(tl.float32)[:, :, None]
            next_high_scales, next_high_minimums = load_groups(
                scales_ptr, minimums_ptr, at, outputs, out_features, GROUPS, 1
            )
        done = tile * INPUTS
        if EVEN:
            packed = tl.load(weights_at + done // 2)
            low_x = tl.load(x_at + done, inside, 0.0)
            high_x = tl.load(x_at + done + HALF, inside, 0.0)
        else:
            there = at_once < (in_features - done) // 2
            packed = tl.load(weights_at + done // 2, there[None, :], 0)
            low_x = tl.load(x_at + done, inside & there[:, None], 0.0)
            high_x = tl.load(x_at + done + HALF, inside & there[:, None], 0.0)
        packed = tl.reshape(packed, (OUTPUTS, BLOCKS, HALF))
        low, high = dequantized(packed, scales, minimums, high_scales, high_minimums, DTYPE, ASSEMBLY)
        sums = dot(tl.reshape(low, (OUTPUTS, WIDTH)), low_x, sums)
        sums = dot(tl.reshape(high, (OUTPUTS, WIDTH)), high_x, sums)
    return sums


@triton.jit
def whole_rows(
    x_ptr, weight_ptr, scales_ptr, outputs, tokens, rows, first, last, stride_x, in_features, out_features,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr, EVEN: tl.constexpr, BITS: tl.constexpr,
    STAGES: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Float32 sums ``[OUTPUTS, TOKENS]`` over tiles of INPUTS inputs, ``first <= tile < last``, of plain weights or of
    8 bits with a scale for each output. EVEN: the inputs are whole tiles."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    inputs = tl.arange(0, INPUTS)
    sums = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    outputs = tl.minimum(outputs, out_features - 1)
    weights_at = weight_ptr + outputs.to(tl.int64)[:, None] * in_features + inputs[None, :]
    x_at = x_ptr + tokens[None, :] * stride_x + inputs[:, None]
    inside = tokens[None, :] < rows
    for tile in tl.range(first, last, num_stages=STAGES):
        done = tile * INPUTS
        if EVEN:
            stored = tl.load(weights_at + done)
            x = tl.load(x_at + done, inside, 0.0)
        else:
            there = inputs < in_features - done
            stored = tl.load(weights_at + done, there[None, :], 0)
            x = tl.load(x_at + done, inside & there[:, None], 0.0)
        sums = dot(signed_bytes(stored, DTYPE, ASSEMBLY) if BITS == 8 else stored, x, sums)
    if BITS == 8:
        sums *= tl.load(scales_ptr + outputs).to(tl.float32)[:, None]
    return sums


@triton.jit
def store_results(
    sums, bias_ptr, residual_ptr, out_ptr, first_output, tokens, rows, out_features, OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """What follows on sums ``[OUTPUTS, TOKENS]``, and its end in memory."""
    outputs = first_output + tl.arange(0, OUTPUTS)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + outputs, outputs < out_features, 0.0).to(tl.float32)[:, None]
    if GATED:
        pairs = tl.permute(tl.reshape(sums, (OUTPUTS // 2, 2, TOKENS)), (0, 2, 1))
        gate, up = tl.split(pairs)
        results = activate(gate, ACTIVATION) * up
        outputs = first_output // 2 + tl.arange(0, OUTPUTS // 2)
        width = out_features // 2
    else:
        results = activate(sums, ACTIVATION)
        width = out_features
    places = tokens.to(tl.int64)[None, :] * width + outputs[:, None]
    inside = (tokens < rows)[None, :] & (outputs < width)[:, None]
    if HAS_RESIDUAL:
        results += tl.load(residual_ptr + places, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + places, results.to(out_ptr.dtype.element_ty), inside)


# Numbers that change from step to step are no constants: a kernel is compiled once, not for each kind of number.
@Kernel
@triton.jit(do_not_specialize=["rows"])
def multiply(
    x_ptr, weight_ptr, scales_ptr, minimums_ptr, bias_ptr, residual_ptr, out_ptr, sums_ptr, rows, stride_x,
    in_features, out_features, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, KEEPS_SUMS: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, ASSEMBLY: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """`OUTPUTS` outputs of `TOKENS` rows a program, over one of `SPLITS` parts of the inputs.

    INPUTS: of a tile, of 4 bits one or more blocks of GROUPS, see `Stored`. PARTS: tiles that are multiplied side by
    side, as many by each warp. KEEPS_SUMS: sums go to sums_ptr, float32 ``[SPLITS, rows, out_features]``, from where
    `add_parts` or `add_changes` takes them; there is only one part otherwise.
    """
    first_output = tl.program_id(0) * OUTPUTS
    outputs = first_output + tl.arange(0, OUTPUTS)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2)
    tiles = tl.cdiv(in_features, INPUTS)
    each = tl.cdiv(tiles, SPLITS)
    first = part * each
    last = tl.minimum(first + each, tiles)
    wait_for_previous(DEPENDENT)
    if PARTS > 1 and BITS == 4:
        sums = divided_inputs.groups_of_4_bits(
            x_ptr, weight_ptr, scales_ptr, minimums_ptr, outputs, tokens, rows, first, last, stride_x, in_features,
            out_features, OUTPUTS, TOKENS, INPUTS, GROUPS, PARTS, EVEN, STAGES, ASSEMBLY,
        )  # fmt: skip
    elif PARTS > 1:
        sums = divided_inputs.whole_rows(
            x_ptr, weight_ptr, scales_ptr, outputs, tokens, rows, first, last, stride_x, in_features, out_features,
            OUTPUTS, TOKENS, INPUTS, PARTS, EVEN, BITS, STAGES, ASSEMBLY,
        )  # fmt: skip
    elif BITS == 4:
        sums = groups_of_4_bits(
            x_ptr, weight_ptr, scales_ptr, minimums_ptr, outputs, tokens, rows, first, last, stride_x, in_features,
            out_features, OUTPUTS, TOKENS, INPUTS, BLOCK, GROUPS, EVEN, STAGES, ASSEMBLY,
        )  # fmt: skip
    else:
        sums = whole_rows(
            x_ptr, weight_ptr, scales_ptr, outputs, tokens, rows, first, last, stride_x, in_features, out_features,
            OUTPUTS, TOKENS, INPUTS, EVEN, BITS, STAGES, ASSEMBLY,
        )  # fmt: skip
    if not KEEPS_SUMS:
        store_results(
            sums, bias_ptr, residual_ptr, out_ptr, first_output, tokens, rows, out_features, OUTPUTS, TOKENS,
            ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip
    else:
        places = (part * rows + tokens).to(tl.int64)[None, :] * out_features + outputs[:, None]
        tl.store(sums_ptr + places, sums, (tokens < rows)[None, :] & (outputs < out_features)[:, None])


@Kernel
@triton.jit(do_not_specialize=["rows"])
def add_parts(
    sums_ptr, bias_ptr, residual_ptr, out_ptr, rows, out_features, OUTPUTS: tl.constexpr, SPLITS: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Add the parts of one row's `OUTPUTS` outputs, the first one first, and do what follows."""
    wait_for_previous(DEPENDENT)
    first_output = tl.program_id(0) * OUTPUTS
    outputs = first_output + tl.arange(0, OUTPUTS)
    tokens = tl.program_id(1) + tl.arange(0, 1)
    sums = tl.zeros((OUTPUTS, 1), tl.float32)
    for part in tl.static_range(SPLITS):
        places = (part * rows + tokens).to(tl.int64)[None, :] * out_features + outputs[:, None]
        sums += tl.load(sums_ptr + places, (outputs < out_features)[:, None], 0.0)
    store_results(
        sums, bias_ptr, residual_ptr, out_ptr, first_output, tokens, rows, out_features, OUTPUTS, 1, ACTIVATION, GATED,
        HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip
