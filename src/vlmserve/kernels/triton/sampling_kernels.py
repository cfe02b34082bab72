"""Samples a token from a row of logits, one row per program, without sorting."""

from __future__ import annotations

import triton
import triton.language as tl

from vlmserve.kernels.triton.dependent import wait_for_previous
from vlmserve.kernels.triton.launching import Kernel

LOWEST = tl.constexpr(0x007FFFFF)
"""-inf in the ordering of `number`."""
UNROLL = tl.constexpr(2)
"""Blocks in flight."""


@triton.jit
def number(bits):
    """Map uint32 to float32 in the same order."""
    bits = tl.maximum(bits, LOWEST)
    return tl.where(bits >> 31 == 1, bits ^ 0x80000000, bits ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def block(x_ptr, start, count, BLOCK: tl.constexpr):
    places = start + tl.arange(0, BLOCK)
    return tl.load(x_ptr + places, places < count, float("-inf"))


@triton.jit
def block_of_groups(logits_ptr, vocabulary, groups_ptr, start, count, listed, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """From number `start` on, listed or all. -inf past the end."""
    numbers = start + tl.arange(0, BLOCK // GROUP)
    groups = tl.load(groups_ptr + numbers, listed & (numbers < count), numbers)
    tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits_ptr + tokens, (numbers < count)[:, None] & (tokens < vocabulary), float("-inf"))
    return tl.reshape(x, (BLOCK,)), tl.reshape(tokens, (BLOCK,))


@triton.jit
def weights(x, largest, rate, kept):
    """Return 1 for the most likely token, 0 for logits below `kept`. rate: log2(e) / temperature."""
    return tl.where(x >= kept, tl.exp2((x - largest) * rate), 0.0)


@triton.jit
def likeliest(logits_ptr, vocabulary, BLOCK: tl.constexpr):
    """Return each lane's maximum ``[BLOCK]``, the maximum, whether there is a NaN, and the first such token."""
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    starts = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, vocabulary, BLOCK, loop_unroll_factor=UNROLL):
        x = block(logits_ptr, start, vocabulary, BLOCK)
        starts = tl.where(x > largest, start, starts)
        largest = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
    nan = tl.max(tl.where(largest == largest, 0, 1), 0)
    most = tl.max(largest, 0)
    tokens = starts + tl.arange(0, BLOCK)
    return largest, most, nan, tl.min(tl.where(largest == most, tokens, vocabulary), 0)


@triton.jit
def largest_of_groups(
    logits_ptr, vocabulary, largest, rate, maxima_ptr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return the total weight of all tokens in float64."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, vocabulary, BLOCK, loop_unroll_factor=UNROLL):
        x = block(logits_ptr, start, vocabulary, BLOCK)
        total += weights(x, largest, rate, float("-inf"))
        groups = start // GROUP + tl.arange(0, BLOCK // GROUP)
        maxima = tl.max(tl.reshape(x, (BLOCK // GROUP, GROUP)), 1)
        tl.store(maxima_ptr + groups, maxima, groups * GROUP < vocabulary)
    return tl.sum(total.to(tl.float64), 0)


@triton.jit
def list_groups(maxima_ptr, count, limit, groups_ptr, BLOCK: tl.constexpr):
    """Return the number of groups with a logit of at least `limit`."""
    found = tl.zeros((), tl.int32)
    for start in range(0, count, BLOCK):
        groups = start + tl.arange(0, BLOCK)
        wanted = ((block(maxima_ptr, start, count, BLOCK) >= limit) & (groups < count)).to(tl.int32)
        tl.store(groups_ptr + found + tl.cumsum(wanted, 0) - 1, groups, wanted == 1)
        found += tl.sum(wanted, 0)
    return found


@triton.jit
def weight_from(
    logits_ptr, vocabulary, groups_ptr, count, listed, largest, rate, kept, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, count, BLOCK // GROUP, loop_unroll_factor=UNROLL):
        x, _ = block_of_groups(logits_ptr, vocabulary, groups_ptr, start, count, listed, BLOCK, GROUP)
        total += weights(x, largest, rate, kept)
    return tl.sum(total.to(tl.float64), 0)


@triton.jit
def lowest_kept(
    x_ptr, size, groups_ptr, count, listed, largest, rate, wanted, by_weight, LAST_BIT: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return the largest limit that at least `wanted` logits, or with by_weight weights, reach.

    Searches two bits at a time, on floats mapped to ordered integers. LAST_BIT: the limit may be lower by less than
    ``2**LAST_BIT`` floats.
    """
    found = tl.zeros((), tl.uint32)
    for shift in range(30, LAST_BIT - 2, -2):
        step = tl.full((), 1, tl.uint32) << shift
        first, second, third = number(found + step), number(found + 2 * step), number(found + 3 * step)
        from_first = tl.zeros((BLOCK,), tl.float32)
        from_second = tl.zeros((BLOCK,), tl.float32)
        from_third = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, count, BLOCK // GROUP):
            x, _ = block_of_groups(x_ptr, size, groups_ptr, start, count, listed, BLOCK, GROUP)
            share = tl.where(by_weight, weights(x, largest, rate, float("-inf")), 1.0)
            from_first += tl.where(x >= first, share, 0.0)
            from_second += tl.where(x >= second, share, 0.0)
            from_third += tl.where(x >= third, share, 0.0)
        # joined, so that lanes are reduced once
        above = tl.sum(tl.join(tl.join(from_first, from_second), tl.join(from_third, from_third)), 0)
        reached = tl.sum(tl.sum(tl.where(above.to(tl.float64) >= wanted, 1, 0), 0), 0)
        found += tl.minimum(reached, 3).to(tl.uint32) << shift
    return number(found)


@triton.jit
def drawn(
    logits_ptr, vocabulary, groups_ptr, count, listed, largest, rate, kept, share, BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """The token where the cumulative weight exceeds `share` (in [0, 1)) of the total."""
    target = share * weight_from(
        logits_ptr, vocabulary, groups_ptr, count, listed, largest, rate, kept, BLOCK, GROUP
    )  # fmt: skip
    before = tl.zeros((), tl.float64)
    block_before = tl.zeros((), tl.float64)
    block_start = tl.zeros((), tl.int32)
    for start in range(0, count, BLOCK // GROUP):
        x, _ = block_of_groups(logits_ptr, vocabulary, groups_ptr, start, count, listed, BLOCK, GROUP)
        here = tl.sum(weights(x, largest, rate, kept), 0)
        # rounding may put the target after the last possible token
        if (here > 0) & (before <= target):
            block_before = before
            block_start = start
        before += here.to(tl.float64)
    x, tokens = block_of_groups(logits_ptr, vocabulary, groups_ptr, block_start, count, listed, BLOCK, GROUP)
    each = weights(x, largest, rate, kept).to(tl.float64)
    last = tl.max(tl.where(each > 0, tokens, -1), 0)
    passed = (block_before + tl.cumsum(each, 0) > target) & (each > 0)
    return tl.min(tl.where(passed, tokens, last), 0)


@Kernel
@triton.jit
def draw_rows(
    logits_ptr, options_ptr, numbers_ptr, tokens_ptr, places_ptr, maxima_ptr, groups_ptr, vocabulary, stride,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Sample a token for each row, -1 for unusable rows.

    A limit that enough of the lanes' maxima reach is a lower bound, so only groups of adjacent tokens with a logit at
    this limit are read afterwards.

    options_ptr: float32 ``[rows, 4]``: temperature, top-k (0: all), top-p, log of min-p. numbers_ptr: float64
    ``[rows]``, uniform in [0, 1). Buffers: places_ptr float32 ``[rows, BLOCK]``, maxima_ptr float32 and groups_ptr
    int32 ``[rows, groups]``.
    """
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    count = tl.cdiv(vocabulary, GROUP)
    logits_ptr += row * stride
    options_ptr += row * 4
    places_ptr += row * BLOCK
    maxima_ptr += row * count
    groups_ptr += row * count
    temperature = tl.load(options_ptr)
    places, largest, nan, token = likeliest(logits_ptr, vocabulary, BLOCK)
    usable = (nan == 0) & (tl.abs(largest) < float("inf"))
    token = tl.where(usable, token, -1)
    if usable & (temperature > 0):
        top_k = tl.load(options_ptr + 1).to(tl.int32)
        top_p = tl.load(options_ptr + 2).to(tl.float64)
        # the most likely token has weight 1
        rate = tl.minimum(1.4426950408889634 / temperature, 3e38)
        kept = tl.full((), float("-inf"), tl.float32)
        by_number = (top_k > 0) & (top_k < vocabulary)
        listed = by_number | (top_p < 1)
        if listed:
            total = largest_of_groups(logits_ptr, vocabulary, largest, rate, maxima_ptr, BLOCK, GROUP)
            tl.store(places_ptr + tl.arange(0, BLOCK), places)
            # other threads read what a thread wrote
            tl.debug_barrier()
            wanted = tl.where(by_number, top_k.to(tl.float64), top_p * total)
            limit = lowest_kept(
                places_ptr, BLOCK, groups_ptr, BLOCK // GROUP, False, largest, rate, wanted, not by_number, 16,
                BLOCK, GROUP,
            )  # fmt: skip
            count = list_groups(maxima_ptr, count, limit, groups_ptr, BLOCK)
            tl.debug_barrier()
            if by_number:
                kept = lowest_kept(
                    logits_ptr, vocabulary, groups_ptr, count, True, largest, rate, wanted, False, 0, BLOCK // 2, GROUP
                )
                wanted = top_p * weight_from(
                    logits_ptr, vocabulary, groups_ptr, count, True, largest, rate, kept, BLOCK, GROUP
                )
            if top_p < 1:
                by_weight = lowest_kept(
                    logits_ptr, vocabulary, groups_ptr, count, True, largest, rate, wanted, True, 0, BLOCK // 2, GROUP
                )
                kept = tl.maximum(kept, by_weight)
        kept = tl.maximum(kept, largest + temperature * tl.load(options_ptr + 3))
        token = drawn(
            logits_ptr, vocabulary, groups_ptr, count, listed, largest, rate, kept, tl.load(numbers_ptr + row), BLOCK,
            GROUP,
        )  # fmt: skip
    tl.store(tokens_ptr + row, token)


@Kernel
@triton.jit(do_not_specialize=["count"])
def change_logits(
    logits_ptr, entries_ptr, changes_ptr, count, stride, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """entries_ptr: int64 ``[2, count]``, distinct pairs of row and token. changes_ptr: see `Changes`."""
    wait_for_previous(DEPENDENT)
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entries < count
    place = tl.load(entries_ptr + entries, inside, 0) * stride + tl.load(entries_ptr + count + entries, inside, 0)
    logit = tl.load(logits_ptr + place, inside, 0.0) + tl.load(changes_ptr + entries, inside, 0.0)
    repetition = tl.load(changes_ptr + count + entries, inside, 1.0)
    logit = tl.where(logit > 0, logit / repetition, logit * repetition)
    tl.store(logits_ptr + place, logit - tl.load(changes_ptr + 2 * count + entries, inside, 0.0), inside)
