"""Convolution inputs and activations for kernels of layers with states."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_input(
    mixed_ptr, tail_ptr, source, row, start, channel, inside, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The row may precede the sequence's first row `start`. GATED: B * x."""
    in_step = inside & (row >= start)
    at = mixed_ptr + row.to(tl.int64) * WIDTH + channel
    x = tl.load(at, in_step, 0.0)
    if GATED:
        x = (x.to(tl.float32) * tl.load(at + 2 * CHANNELS, in_step, 0.0).to(tl.float32)).to(x.dtype)
    place = source.to(tl.int64) * (KERNEL - 1) + (KERNEL - 1 + row - start)
    before = tl.load(tail_ptr + place * CHANNELS + channel, inside & (row < start) & (source >= 0), 0.0)
    return tl.where(row < start, before, x)


@triton.jit
def convolved(
    mixed_ptr, tail_ptr, weight_ptr, source, row, start, channel, in_channels, inside, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Causal, in one row or in the rows of a column, in float32.

    in_channels: whether each channel exists. inside: whether the result is wanted.
    """
    total = tl.zeros(inside.shape, tl.float32)
    for tap in tl.static_range(KERNEL):
        read = row + tap - (KERNEL - 1)
        x = load_input(mixed_ptr, tail_ptr, source, read, start, channel, inside, WIDTH, CHANNELS, KERNEL, GATED)
        total += x.to(tl.float32) * tl.load(weight_ptr + tap * CHANNELS + channel, in_channels, 0.0)
    return total


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def softplus(x):
    """``log(1 + e^x)``, exact for small exponentials too."""
    power = tl.exp(tl.minimum(x, 20.0))
    rounded = 1.0 + power
    close = tl.log(rounded) * (power / tl.where(rounded == 1.0, 1.0, rounded - 1.0))
    return tl.where(x > 20.0, x, tl.where(rounded == 1.0, power, close))
