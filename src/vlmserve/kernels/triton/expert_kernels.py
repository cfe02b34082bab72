"""Mixtures of experts: routing, sorting rows by expert, and all matmuls in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from vlmserve.kernels.triton.activations import activate
from vlmserve.kernels.triton.adapter_kernels import address
from vlmserve.kernels.triton.dependent import wait_for_previous
from vlmserve.kernels.triton.launching import Kernel
from vlmserve.kernels.triton.product_kernels import groups_of_4_bits, whole_rows

WORDS = tl.constexpr(6)
"""An expert's entries in the address table: values, scales and minimums of its first matmul, then of its second. All
are 0 if another rank has the expert."""
TILE_WORDS = tl.constexpr(3)
"""A tile's entries: expert or -1, its first place in the sorted rows, end of the expert's rows."""
LOWEST = tl.constexpr(-3.0e38)
"""Replaces NaN scores, which rank last."""


@Kernel
@triton.jit
def choose_experts(
    logits_ptr, correction_ptr, factors_ptr, chosen_ptr, weights_ptr, scale, COUNT: tl.constexpr, BLOCK: tl.constexpr,
    TOP_K: tl.constexpr, TOP_BLOCK: tl.constexpr, SIGMOIDS: tl.constexpr, RENORMALIZED: tl.constexpr,
    HAS_CORRECTION: tl.constexpr, HAS_FACTORS: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Select `TOP_K` experts of one row from float32 logits ``[rows, COUNT]``. Ties select lower numbers."""
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    inside = experts < COUNT
    logits = tl.load(logits_ptr + row * COUNT + experts, inside, float("-inf"))
    if SIGMOIDS:
        scores = tl.sigmoid(logits)
    else:
        powers = tl.exp(logits - tl.max(logits, 0))
        scores = powers / tl.sum(powers, 0)
    keys = scores
    if HAS_CORRECTION:
        keys += tl.load(correction_ptr + experts, inside, 0.0)
    keys = tl.where(inside, tl.where(keys == keys, keys, LOWEST), float("-inf"))
    slots = tl.arange(0, TOP_BLOCK)
    chosen = tl.zeros((TOP_BLOCK,), tl.int32)
    weights = tl.zeros((TOP_BLOCK,), tl.float32)
    for slot in tl.range(0, TOP_K):
        expert = tl.argmax(keys, 0)
        weight = tl.sum(tl.where(experts == expert, scores, 0.0), 0)
        chosen = tl.where(slots == slot, expert, chosen)
        weights = tl.where(slots == slot, weight, weights)
        keys = tl.where(experts == expert, float("-inf"), keys)
    if RENORMALIZED:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    if HAS_FACTORS:
        weights *= tl.load(factors_ptr + chosen)
    tl.store(chosen_ptr + row * TOP_K + slots, chosen, slots < TOP_K)
    tl.store(weights_ptr + row * TOP_K + slots, weights * scale, slots < TOP_K)


@Kernel
@triton.jit(do_not_specialize=["count"])
def count_rows(
    chosen_ptr, table_ptr, counts_ptr, count, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False
):  # fmt: skip
    """0 if another rank has the expert."""
    wait_for_previous(DEPENDENT)
    expert = tl.program_id(0)
    numbers = tl.arange(0, BLOCK)
    found = tl.zeros((BLOCK,), tl.int32)
    for first in tl.range(0, count, BLOCK):
        found += (tl.load(chosen_ptr + first + numbers, first + numbers < count, -1) == expert).to(tl.int32)
    is_here = tl.load(table_ptr + expert * WORDS) != 0
    tl.store(counts_ptr + expert, tl.where(is_here, tl.sum(found, 0), 0))


@Kernel
@triton.jit(do_not_specialize=["count", "tiles"])
def sort_rows(
    chosen_ptr, counts_ptr, order_ptr, tiles_ptr, count, tiles, COUNT: tl.constexpr, EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Write one expert's choices after those for lower experts, and its tiles of `TOKENS` choices.

    order_ptr: sorted choice numbers. tiles_ptr: `TILE_WORDS` for each of `tiles`.
    """
    wait_for_previous(DEPENDENT)
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + experts, experts < COUNT, 0)
    own = tl.sum(tl.where(experts == expert, counts, 0), 0)
    start = tl.sum(tl.where(experts < expert, counts, 0), 0)
    tile = tl.sum(tl.where(experts < expert, (counts + (TOKENS - 1)) // TOKENS, 0), 0)
    numbers = tl.arange(0, BLOCK)
    if own > 0:
        done = start
        for first in tl.range(0, count, BLOCK):
            chosen = tl.load(chosen_ptr + first + numbers, first + numbers < count, -1)
            is_own = (chosen == expert).to(tl.int32)
            tl.store(order_ptr + done + tl.cumsum(is_own, 0) - is_own, first + numbers, is_own > 0)
            done += tl.sum(is_own, 0)
        for first in tl.range(start, start + own, TOKENS):
            tl.store(tiles_ptr + tile * TILE_WORDS, expert)
            tl.store(tiles_ptr + tile * TILE_WORDS + 1, first)
            tl.store(tiles_ptr + tile * TILE_WORDS + 2, start + own)
            tile += 1
    if expert == COUNT - 1:
        for first in tl.range(tile, tiles, BLOCK):
            tl.store(tiles_ptr + (first + numbers) * TILE_WORDS, -1, first + numbers < tiles)


@Kernel
@triton.jit(do_not_specialize=["rows"])
def multiply_by_expert(
    x_ptr, table_ptr, order_ptr, tiles_ptr, out_ptr, rows, stride_x, in_features, out_features,
    FIRST_WORD: tl.constexpr, TOP_K: tl.constexpr, GATHERS: tl.constexpr, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr,
    INPUTS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, ASSEMBLY: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """One expert's tile of rows, `OUTPUTS` outputs. Surplus programs end at once, so graphs can hold the launch.

    GATHERS: x holds the step's rows, and results are sorted by expert. Otherwise x is sorted by expert, and results are
    in order of choices. FIRST_WORD: the weight's entry in the table.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    PER_RESULT: tl.constexpr = 2 if GATED else 1
    wait_for_previous(DEPENDENT)
    tile = tiles_ptr + tl.program_id(1) * TILE_WORDS
    expert = tl.load(tile)
    if expert >= 0:
        first_output = tl.program_id(0) * OUTPUTS
        outputs = first_output + tl.arange(0, OUTPUTS)
        places = tl.load(tile + 1) + tl.arange(0, TOKENS)
        there = places < tl.load(tile + 2)
        choices = tl.load(order_ptr + places, there, 0)
        tokens = tl.where(there, choices // TOP_K if GATHERS else places, rows).to(tl.int64)
        words = table_ptr + expert * WORDS + FIRST_WORD
        tiles = tl.cdiv(in_features, INPUTS)
        if BITS == 4:
            weight_ptr, scales_ptr = address(tl.load(words), tl.uint8), address(tl.load(words + 1), tl.float16)
            sums = groups_of_4_bits(
                x_ptr, weight_ptr, scales_ptr, address(tl.load(words + 2), tl.float16), outputs, tokens, rows, 0, tiles,
                stride_x, in_features, out_features, OUTPUTS, TOKENS, INPUTS, BLOCK, GROUPS, EVEN, STAGES, ASSEMBLY,
            )  # fmt: skip
        else:
            TYPE: tl.constexpr = tl.uint8 if BITS == 8 else DTYPE
            weight_ptr, scales_ptr = address(tl.load(words), TYPE), address(tl.load(words + 1), tl.float32)
            sums = whole_rows(
                x_ptr, weight_ptr, scales_ptr, outputs, tokens, rows, 0, tiles, stride_x, in_features, out_features,
                OUTPUTS, TOKENS, INPUTS, EVEN, BITS, STAGES, BITS == 8, ASSEMBLY,
            )  # fmt: skip
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(sums, (OUTPUTS // 2, 2, TOKENS)), (0, 2, 1)))
            results = activate(gate, ACTIVATION) * up
        else:
            results = activate(sums, ACTIVATION)
        columns = first_output // PER_RESULT + tl.arange(0, OUTPUTS // PER_RESULT)
        width = out_features // PER_RESULT
        targets = (places if GATHERS else choices).to(tl.int64)
        inside = there[None, :] & (columns < width)[:, None]
        out_at = out_ptr + targets[None, :] * width + columns[:, None]
        tl.store(out_at, results.to(out_ptr.dtype.element_ty), inside)


@Kernel
@triton.jit
def weigh_experts(
    results_ptr, table_ptr, chosen_ptr, weights_ptr, residual_ptr, out_ptr, size, TOP_K: tl.constexpr,
    BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Sum weighted results ``[rows * TOP_K, size]`` of one row, `BLOCK` elements."""
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    sums = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.range(row * TOP_K, row * TOP_K + TOP_K):
        expert = tl.load(chosen_ptr + choice)
        if tl.load(table_ptr + expert * WORDS) != 0:
            results = tl.load(results_ptr + choice * size + columns, inside, 0.0).to(tl.float32)
            sums += results * tl.load(weights_ptr + choice)
    if HAS_RESIDUAL:
        sums += tl.load(residual_ptr + row * size + columns, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + row * size + columns, sums.to(out_ptr.dtype.element_ty), inside)
