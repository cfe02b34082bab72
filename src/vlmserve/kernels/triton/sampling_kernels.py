"""From a row of logits to a token, one row a program.

The smallest logit that top-k or top-p keeps is found bit by bit: floats order as integers do once their bits are
turned, so eight passes over the row, of four bits each, end at the very logit. Nothing is sorted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vlmserve.kernels.triton.launching import Kernel


@triton.jit
def ordered_bits(x):
    """uint32s that order as float32s do."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def scaled(logits_ptr, columns, vocabulary, largest, temperature):
    """Logits less the largest one, by temperature: 0 for the likeliest tokens, minus infinity behind the row's end."""
    logits = tl.load(logits_ptr + columns, columns < vocabulary, float("-inf"))
    return tl.where(columns < vocabulary, (logits - largest) / temperature, float("-inf"))


@triton.jit
def lowest_kept(
    logits_ptr, vocabulary, largest, temperature, lowest, wanted, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest bits such that the tokens at or above them number `wanted`, or weigh as much (BY_WEIGHT), or more.

    lowest: tokens whose bits are below are left out.
    """
    found = tl.zeros((), tl.uint32)
    for shift in range(28, -4, -4):
        digits = tl.arange(0, 16)
        pivots = found + (digits.to(tl.uint32) << shift)
        above = tl.zeros((16,), tl.float64)
        for start in range(0, vocabulary, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = scaled(logits_ptr, columns, vocabulary, largest, temperature)
            bits = ordered_bits(x)
            share = tl.exp(x) if BY_WEIGHT else tl.full((BLOCK,), 1.0, tl.float32)
            share = tl.where((bits >= lowest) & (columns < vocabulary), share, 0.0)
            reached = bits[None, :] >= pivots[:, None]
            above += tl.sum(tl.where(reached, share[None, :], 0.0), 1).to(tl.float64)
        # The digit 0 always reaches: the steps before made sure of it.
        digit = tl.max(tl.where((above >= wanted) | (digits == 0), digits, 0), 0)
        found += digit.to(tl.uint32) << shift
    return found


@triton.jit
def weight_from(logits_ptr, vocabulary, largest, temperature, lowest, BLOCK: tl.constexpr):
    """What the tokens whose bits are `lowest` or above weigh, the likeliest token 1, in float64."""
    total = tl.zeros((), tl.float64)
    for start in range(0, vocabulary, BLOCK):
        x = scaled(logits_ptr, start + tl.arange(0, BLOCK), vocabulary, largest, temperature)
        total += tl.sum(tl.where(ordered_bits(x) >= lowest, tl.exp(x), 0.0), 0).to(tl.float64)
    return total


@triton.jit
def likeliest(logits_ptr, vocabulary, BLOCK: tl.constexpr):
    """The largest logit, how many logits are no numbers, and the first token that has the largest."""
    largest = tl.full((), float("-inf"), tl.float32)
    nans = tl.zeros((), tl.int32)
    first = tl.zeros((), tl.int32)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + columns, columns < vocabulary, float("-inf"))
        nans += tl.sum(tl.where(x == x, 0, 1), 0)
        here = tl.max(tl.where(x == x, x, float("-inf")), 0)
        place = tl.min(tl.where(x == here, columns, vocabulary), 0)
        first = tl.where(here > largest, place, first)
        largest = tl.maximum(largest, here)
    return largest, nans, first


@Kernel
@triton.jit
def draw_rows(
    logits_ptr, options_ptr, numbers_ptr, tokens_ptr, vocabulary, stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """A token for each row, -1 where there is none.

    options_ptr: float32 ``[rows, 4]``: temperature, top-k (0: all), top-p, the logarithm of min-p. numbers_ptr: float64
    ``[rows]``, uniform in [0, 1).
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    options_ptr += row * 4
    temperature = tl.load(options_ptr)
    largest, nans, token = likeliest(logits_ptr, vocabulary, BLOCK)
    usable = (nans == 0) & (tl.abs(largest) < float("inf"))
    token = tl.where(usable, token, -1)
    if usable & (temperature > 0):
        top_k = tl.load(options_ptr + 1).to(tl.int32)
        top_p = tl.load(options_ptr + 2).to(tl.float64)
        lowest = ordered_bits(tl.load(options_ptr + 3))
        kept = tl.zeros((), tl.uint32)
        if (top_k > 0) & (top_k < vocabulary):
            kept = lowest_kept(logits_ptr, vocabulary, largest, temperature, kept, top_k.to(tl.float64), False, BLOCK)
        if top_p < 1:
            wanted = top_p * weight_from(logits_ptr, vocabulary, largest, temperature, kept, BLOCK)
            kept = tl.maximum(
                kept, lowest_kept(logits_ptr, vocabulary, largest, temperature, kept, wanted, True, BLOCK)
            )  # fmt: skip
        kept = tl.maximum(kept, lowest)
        total = weight_from(logits_ptr, vocabulary, largest, temperature, kept, BLOCK)
        target = tl.load(numbers_ptr + row) * total
        before = tl.zeros((), tl.float64)
        token = tl.full((), -1, tl.int32)
        done = tl.zeros((), tl.int32)
        for start in range(0, vocabulary, BLOCK):
            if done == 0:
                columns = start + tl.arange(0, BLOCK)
                x = scaled(logits_ptr, columns, vocabulary, largest, temperature)
                weights = tl.where(ordered_bits(x) >= kept, tl.exp(x), 0.0).to(tl.float64)
                passed = (before + tl.cumsum(weights, 0) > target) & (weights > 0)
                last = tl.max(tl.where(weights > 0, columns, -1), 0)
                place = tl.min(tl.where(passed, columns, vocabulary), 0)
                done = tl.where(place < vocabulary, 1, 0)
                # Rounding may leave the target behind the last token that can be drawn: then that one is.
                token = tl.where(place < vocabulary, place, tl.maximum(token, last))
                before += tl.sum(weights, 0)
    tl.store(tokens_ptr + row, token)


@Kernel
@triton.jit(do_not_specialize=["count"])
def change_logits(logits_ptr, entries_ptr, changes_ptr, count, stride, BLOCK: tl.constexpr):
    """Biases and penalties, in place.

    entries_ptr: int64 ``[2, count]``: rows and tokens, each pair once. changes_ptr: float32 ``[3, count]``: what is
    added first, the repetition penalty, and what is subtracted last.
    """
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entries < count
    place = tl.load(entries_ptr + entries, inside, 0) * stride + tl.load(entries_ptr + count + entries, inside, 0)
    logit = tl.load(logits_ptr + place, inside, 0.0) + tl.load(changes_ptr + entries, inside, 0.0)
    repetition = tl.load(changes_ptr + count + entries, inside, 1.0)
    logit = tl.where(logit > 0, logit / repetition, logit * repetition)
    tl.store(logits_ptr + place, logit - tl.load(changes_ptr + 2 * count + entries, inside, 0.0), inside)
