"""Matmuls with few rows, epilogue included: weights are the rows of a tile, tokens its columns."""

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
    """Add ``[outputs, inputs] @ [inputs, tokens]``. float32 inputs keep full precision."""
    return tl.dot(weights, x, sums, input_precision="ieee")


@triton.jit
def groups_of_4_bits(
    x_ptr, weight_ptr, scales_ptr, minimums_ptr, outputs, tokens, rows, first, last, stride_x, in_features,
    out_features, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr, BLOCK: tl.constexpr,
    GROUPS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Return float32 sums ``[OUTPUTS, TOKENS]`` over tiles ``first <= tile < last`` of 4-bit blocks.

    EVEN: the inputs are whole tiles. Byte i of a block holds its inputs i and i + BLOCK / 2, in one group, or in two
    (GROUPS). Weights are rounded to the dtype of x; scaling each group's sums would take as many instructions per row.
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
    # one round ahead: Triton only pipelines loads that feed tensor cores directly
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
        # sums start at zero: otherwise ptxas serializes the tensor cores (C7515)
        products = dot(tl.reshape(low, (OUTPUTS, WIDTH)), low_x, tl.zeros((OUTPUTS, TOKENS), tl.float32))
        sums += dot(tl.reshape(high, (OUTPUTS, WIDTH)), high_x, products)
    return sums


@triton.jit
def whole_rows(
    x_ptr, weight_ptr, scales_ptr, outputs, tokens, rows, first, last, stride_x, in_features, out_features,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr, EVEN: tl.constexpr, BITS: tl.constexpr,
    STAGES: tl.constexpr, RESTARTS: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Return float32 sums ``[OUTPUTS, TOKENS]`` over tiles ``first <= tile < last`` of plain or 8-bit weights.

    EVEN: the inputs are whole tiles. RESTARTS: start the sums of each 8-bit tile at zero, so that ptxas does not
    serialize the tensor cores (C7515).
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    inputs = tl.arange(0, INPUTS)
    sums = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    outputs = tl.minimum(outputs, out_features - 1)
    weights_at = weight_ptr + outputs.to(tl.int64)[:, None] * in_features + inputs[None, :]
    x_at = x_ptr + tokens[None, :] * stride_x + inputs[:, None]
    inside = tokens[None, :] < rows
    if RESTARTS:
        scales = tl.load(scales_ptr + outputs).to(tl.float32)[:, None]
    for tile in tl.range(first, last, num_stages=STAGES):
        done = tile * INPUTS
        if EVEN:
            stored = tl.load(weights_at + done)
            x = tl.load(x_at + done, inside, 0.0)
        else:
            there = inputs < in_features - done
            stored = tl.load(weights_at + done, there[None, :], 0)
            x = tl.load(x_at + done, inside & there[:, None], 0.0)
        weights = signed_bytes(stored, DTYPE, ASSEMBLY) if BITS == 8 else stored
        if RESTARTS:
            sums += dot(weights, x, tl.zeros((OUTPUTS, TOKENS), tl.float32)) * scales
        else:
            sums = dot(weights, x, sums)
    if BITS == 8 and not RESTARTS:
        sums *= tl.load(scales_ptr + outputs).to(tl.float32)[:, None]
    return sums


@triton.jit
def load_squares(squares_ptr, tokens, rows, columns, COLUMNS: tl.constexpr):
    numbers = tl.arange(0, COLUMNS)
    inside = (tokens < rows)[:, None] & (numbers < columns)[None, :]
    return tl.load(squares_ptr + tokens[:, None] * columns + numbers[None, :], inside, 0.0)


@triton.jit
def result_places(first_output, tokens, rows, out_features, OUTPUTS: tl.constexpr, GATED: tl.constexpr):
    PER_RESULT: tl.constexpr = 2 if GATED else 1
    outputs = first_output // PER_RESULT + tl.arange(0, OUTPUTS // PER_RESULT)
    width = out_features // PER_RESULT
    inside = (tokens < rows)[None, :] & (outputs < width)[:, None]
    return tokens.to(tl.int64)[None, :] * width + outputs[:, None], inside


@triton.jit
def store_results(
    sums, bias_ptr, residual, out_ptr, places, inside, first_output, out_features, OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Apply the epilogue to sums ``[OUTPUTS, TOKENS]``; store and return the results.

    places, inside: from `result_places`. residual: values loaded from `places`.
    """
    outputs = first_output + tl.arange(0, OUTPUTS)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + outputs, outputs < out_features, 0.0).to(tl.float32)[:, None]
    if GATED:
        pairs = tl.permute(tl.reshape(sums, (OUTPUTS // 2, 2, TOKENS)), (0, 2, 1))
        gate, up = tl.split(pairs)
        results = activate(gate, ACTIVATION) * up
    else:
        results = activate(sums, ACTIVATION)
    if HAS_RESIDUAL:
        results += residual.to(tl.float32)
    results = results.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + places, results, inside)
    return results


@triton.jit
def defer_norm(results, weight, weighted_ptr, squares_ptr, places, inside, tokens, rows):
    """Store ``[OUTPUTS, TOKENS]`` times a norm's weight, and each row's sum of squares.

    The next matmul scales its sums by the squares, so the norm needs no launch.
    """
    results = tl.where(inside, results.to(tl.float32), 0.0)
    tl.store(weighted_ptr + places, (results * weight[:, None]).to(weighted_ptr.dtype.element_ty), inside)
    squares_at = squares_ptr + tokens * tl.num_programs(0) + tl.program_id(0)
    tl.store(squares_at, tl.sum(results * results, 0), tokens < rows)


# not specialized: the number of rows changes every step
@Kernel
@triton.jit(do_not_specialize=["rows"])
def multiply(
    x_ptr, weight_ptr, scales_ptr, minimums_ptr, bias_ptr, residual_ptr, out_ptr, sums_ptr, x_squares_ptr, norm_ptr,
    weighted_ptr, squares_ptr, rows, stride_x, in_features, out_features, x_columns, eps, OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr, INPUTS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    PARTS: tl.constexpr, SPLITS: tl.constexpr, KEEPS_SUMS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    RESTARTS: tl.constexpr, COLUMNS: tl.constexpr, ASSEMBLY: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Multiply `TOKENS` rows by `OUTPUTS` outputs, over one of `SPLITS` splits of the inputs, in a fixed order.

    INPUTS: of a tile; for 4-bit weights, one or more blocks of GROUPS, see `Stored`. PARTS: tiles that warps multiply
    in parallel. KEEPS_SUMS: store float32 sums ``[SPLITS, rows, out_features]``; required for several splits. COLUMNS:
    0, or if an RMSNorm precedes, at least `x_columns` of x_squares_ptr (float32 ``[rows, x_columns]``). HAS_NORM: an
    RMSNorm follows, see `defer_norm`. RESTARTS: see `whole_rows`.
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
    # load the epilogue's inputs during the first tiles, if small
    AHEAD: tl.constexpr = TOKENS <= 16
    places, inside = result_places(first_output, tokens, rows, out_features, OUTPUTS, GATED)
    if HAS_RESIDUAL and AHEAD and not KEEPS_SUMS:
        residual = tl.load(residual_ptr + places, inside, 0.0)
    if HAS_NORM and not KEEPS_SUMS:
        norm_weight = tl.load(norm_ptr + outputs, outputs < out_features, 0.0).to(tl.float32)
    if COLUMNS > 0 and AHEAD:
        x_squares = load_squares(x_squares_ptr, tokens, rows, x_columns, COLUMNS)
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
            OUTPUTS, TOKENS, INPUTS, EVEN, BITS, STAGES, RESTARTS, ASSEMBLY,
        )  # fmt: skip
    if COLUMNS > 0:
        if not AHEAD:
            x_squares = load_squares(x_squares_ptr, tokens, rows, x_columns, COLUMNS)
        sums *= tl.rsqrt(tl.sum(x_squares, 1) / in_features + eps)[None, :]
    if not KEEPS_SUMS:
        if not HAS_RESIDUAL:
            residual = 0.0
        elif not AHEAD:
            residual = tl.load(residual_ptr + places, inside, 0.0)
        results = store_results(
            sums, bias_ptr, residual, out_ptr, places, inside, first_output, out_features, OUTPUTS, TOKENS, ACTIVATION,
            GATED, HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip
        if HAS_NORM:
            defer_norm(results, norm_weight, weighted_ptr, squares_ptr, places, inside, tokens, rows)
    else:
        places = (part * rows + tokens).to(tl.int64)[None, :] * out_features + outputs[:, None]
        tl.store(sums_ptr + places, sums, (tokens < rows)[None, :] & (outputs < out_features)[:, None])


@Kernel
@triton.jit(do_not_specialize=["rows"])
def add_parts(
    sums_ptr, bias_ptr, residual_ptr, out_ptr, norm_ptr, weighted_ptr, squares_ptr, rows, out_features,
    OUTPUTS: tl.constexpr, SPLITS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Add the splits of one row in order, and apply the epilogue."""
    wait_for_previous(DEPENDENT)
    first_output = tl.program_id(0) * OUTPUTS
    outputs = first_output + tl.arange(0, OUTPUTS)
    tokens = tl.program_id(1) + tl.arange(0, 1)
    places, inside = result_places(first_output, tokens, rows, out_features, OUTPUTS, GATED)
    residual = tl.load(residual_ptr + places, inside, 0.0) if HAS_RESIDUAL else 0.0
    if HAS_NORM:
        norm_weight = tl.load(norm_ptr + outputs, outputs < out_features, 0.0).to(tl.float32)
    sums = tl.zeros((OUTPUTS, 1), tl.float32)
    for part in tl.static_range(SPLITS):
        parts_at = (part * rows + tokens).to(tl.int64)[None, :] * out_features + outputs[:, None]
        sums += tl.load(sums_ptr + parts_at, (outputs < out_features)[:, None], 0.0)
    results = store_results(
        sums, bias_ptr, residual, out_ptr, places, inside, first_output, out_features, OUTPUTS, 1, ACTIVATION, GATED,
        HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip
    if HAS_NORM:
        defer_norm(results, norm_weight, weighted_ptr, squares_ptr, places, inside, tokens, rows)
