"""Adds adapters to linears. Each row may have its own (LoRA: https://arxiv.org/abs/2106.09685)."""

from __future__ import annotations

import triton
import triton.language as tl

from vlmserve.kernels.triton.dependent import wait_for_previous
from vlmserve.kernels.triton.launching import Kernel
from vlmserve.kernels.triton.product_kernels import dot, result_places, store_results

WORDS = tl.constexpr(8)
"""Words of an adapter, see `TritonChange`."""


@triton.jit
def words_of(table_ptr, slot):
    return table_ptr + 1 + slot * WORDS


@triton.jit
def address(word, TYPE: tl.constexpr):
    """Convert a word to a pointer, aligned as torch allocates."""
    return tl.multiple_of(word.to(tl.pointer_type(TYPE)), 16)


@triton.jit
def slot_number(slots, number):
    """The occurring slot with the `number` + 1st highest number, or -1."""
    slot = tl.max(slots, 0)
    for _ in range(number):
        slot = tl.max(tl.where(slots < slot, slots, -1), 0)
    return slot


@Kernel
@triton.jit(do_not_specialize=["rows", "slot_stride", "columns"])
def shrink(
    x_ptr, inner_ptr, table_ptr, slots_ptr, scalings_ptr, rows, stride_x, in_features, rank, slot_stride, columns,
    TOKENS: tl.constexpr, INPUTS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    SCALED: tl.constexpr, RANKS: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Multiply `TOKENS` rows by `RANKS` rows of their adapters' `down` matrices, over one split of the inputs.

    Programs: ``[rank / RANKS, rows / TOKENS, SPLITS * slots]``. Each slot in a tile has its own programs, so a row's
    sums do not depend on other rows.

    inner_ptr: float32 ``[SPLITS, rows, rank]``; elements beyond an adapter's rank and rows without adapter stay
    unwritten. scalings_ptr: float32 ``[rows, columns]`` if SCALED. EVEN: the inputs are whole tiles.
    """
    wait_for_previous(DEPENDENT)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    first_rank = tl.program_id(0) * RANKS
    ranks = first_rank + tl.arange(0, RANKS)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2) % SPLITS
    inputs = tl.arange(0, INPUTS)
    there = tokens < rows
    tiles = tl.cdiv(in_features, INPUTS)
    each = tl.cdiv(tiles, SPLITS)
    first = part * each
    last = tl.minimum(first + each, tiles)
    x_at = x_ptr + tokens.to(tl.int64)[None, :] * stride_x + inputs[:, None]
    places = (part * rows + tokens).to(tl.int64)[None, :] * rank + ranks[:, None]
    slots = tl.load(slots_ptr + tokens * slot_stride, there, -1)
    slot = slot_number(slots, tl.program_id(2) // SPLITS)
    if slot >= 0:
        words = words_of(table_ptr, slot)
        if first_rank < tl.load(words):
            down_at = address(tl.load(words + 2), DTYPE) + ranks.to(tl.int64)[:, None] * in_features + inputs[None, :]
            sums = tl.zeros((RANKS, TOKENS), tl.float32)
            for tile in tl.range(first, last, num_stages=STAGES):
                done = tile * INPUTS
                if EVEN:
                    down = tl.load(down_at + done)
                    x = tl.load(x_at + done, there[None, :], 0.0)
                else:
                    inside = inputs < in_features - done
                    down = tl.load(down_at + done, inside[None, :], 0.0)
                    x = tl.load(x_at + done, there[None, :] & inside[:, None], 0.0)
                sums = dot(down, x, sums)
            own = there & (slots == slot)
            if SCALED:
                columns_word = tl.load(words + 7)
                if columns_word != 0:
                    of_ranks = tl.load(address(columns_word, tl.int32) + ranks)
                    scalings_at = scalings_ptr + tokens.to(tl.int64)[None, :] * columns + of_ranks[:, None]
                    sums *= tl.load(scalings_at, own[None, :], 0.0)
            tl.store(inner_ptr + places, sums, own[None, :])


@Kernel
@triton.jit(do_not_specialize=["rows", "slot_stride"])
def add_changes(
    sums_ptr, inner_ptr, bias_ptr, residual_ptr, out_ptr, table_ptr, slots_ptr, rows, out_features, rank, slot_stride,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr, INNER_SPLITS: tl.constexpr,
    DTYPE: tl.constexpr, RANKS: tl.constexpr, BIASED: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Add splits, adapters and the epilogue. Programs: ``[out_features / OUTPUTS, rows / TOKENS, slots]``.

    sums_ptr: ``[SPLITS, rows, out_features]``, with bias if BIASED. inner_ptr: from `shrink`, in INNER_SPLITS splits.
    DTYPE: of `up` matrices.
    """
    wait_for_previous(DEPENDENT)
    first_output = tl.program_id(0) * OUTPUTS
    outputs = first_output + tl.arange(0, OUTPUTS)
    kept = tl.minimum(outputs, out_features - 1)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    there = tokens < rows
    inside = there[None, :] & (outputs < out_features)[:, None]
    sums = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for part in tl.static_range(SPLITS):
        places = (part * rows + tokens).to(tl.int64)[None, :] * out_features + outputs[:, None]
        sums += tl.load(sums_ptr + places, inside, 0.0).to(tl.float32)
    slots = tl.load(slots_ptr + tokens * slot_stride, there, -1)
    number = tl.program_id(2)
    slot = slot_number(slots, number)
    if slot >= 0:
        words = words_of(table_ptr, slot)
        own = there & (slots == slot)
        changed = sums
        own_rank = tl.load(words)
        if own_rank > 0:
            width = tl.multiple_of(tl.load(words + 1).to(tl.int32), 8)
            firsts = tl.multiple_of(tl.load(address(tl.load(words + 4), tl.int32) + kept), 8)
            start = tl.multiple_of(tl.min(firsts, 0), 8)
            stop = tl.max(firsts, 0) + width
            up_at = address(tl.load(words + 3), DTYPE) + kept.to(tl.int64)[:, None] * width
            for chunk in tl.range(0, tl.cdiv(stop - start, RANKS), num_stages=1):
                ranks = start + chunk * RANKS + tl.arange(0, RANKS)
                among = ranks[None, :] - firsts[:, None]
                up = tl.load(up_at + among, (among >= 0) & (among < width), 0.0)
                inner = tl.zeros((RANKS, TOKENS), tl.float32)
                known = own[None, :] & (ranks < own_rank)[:, None]
                for part in tl.static_range(INNER_SPLITS):
                    inner_at = inner_ptr + (part * rows + tokens).to(tl.int64)[None, :] * rank + ranks[:, None]
                    inner += tl.load(inner_at, known, 0.0)
                changed = dot(up, inner.to(DTYPE), changed)
        factor_word = tl.load(words + 5)
        if factor_word != 0:
            factor = tl.load(address(factor_word, tl.float32) + kept)[:, None]
            shift = tl.load(address(tl.load(words + 6), tl.float32) + kept)[:, None]
            if BIASED:
                bias = tl.load(bias_ptr + kept).to(tl.float32)[:, None]
                changed = factor * (changed - bias) + shift + bias
            else:
                changed = factor * changed + shift
        sums = tl.where(own[None, :], changed, sums)
    # the first program stores rows without an adapter
    wanted = (slots == slot) & (slot >= 0) | (slots < 0) & (number == 0)
    stored = tl.where(there & wanted, tokens, rows)
    places, inside = result_places(first_output, stored, rows, out_features, OUTPUTS, GATED)
    residual = tl.load(residual_ptr + places, inside, 0.0) if HAS_RESIDUAL else 0.0
    store_results(
        sums, bias_ptr, residual, out_ptr, places, inside, first_output, out_features, OUTPUTS, TOKENS, ACTIVATION,
        GATED, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip
