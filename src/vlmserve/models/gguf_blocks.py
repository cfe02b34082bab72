"""Unpacks quantized GGUF blocks to values, scales and minimums."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Blocks, uint8 ``[rows, blocks, bytes]``, to values, uint8 ``[rows, blocks, values]``, and scales and minimums, float32
# ``[rows, blocks, groups]``. Layouts: ggml-common.h of llama.cpp.
Unpack = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


def _halves(blocks: Tensor, *, start: int, length: int, size: int) -> Tensor:
    """In each run of `length` bytes, values in low bits precede values in high bits."""
    packed = blocks[..., start : start + size].reshape(*blocks.shape[:2], -1, length)
    return torch.stack((packed & 15, packed >> 4), -2).flatten(-3)


def _fifth_bits(blocks: Tensor, *, start: int) -> Tensor:
    """16 for each value whose bit is set in four bytes, lowest first."""
    places = torch.arange(8, dtype=torch.uint8)
    return (blocks[..., start : start + 4, None] >> places & 1).flatten(-2) << 4


def _float16(blocks: Tensor, start: int) -> Tensor:
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales = _float16(blocks, 0)
    return _halves(blocks, start=2, length=16, size=16), scales, -8 * scales


def _q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _halves(blocks, start=4, length=16, size=16), _float16(blocks, 0), _float16(blocks, 2)


def _iq4_nl(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The values are codes (`QuantizedWeight.is_coded`)."""
    scales = _float16(blocks, 0)
    return _halves(blocks, start=2, length=16, size=16), scales, torch.zeros_like(scales)


# Types over 4 bits become 8-bit. The value 128 stands for the minimum, or for zero without minimums.
def _q5_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales = _float16(blocks, 0)
    values = _halves(blocks, start=6, length=16, size=16) | _fifth_bits(blocks, start=2)
    return values + 112, scales, -128 * scales


def _q5_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales = _float16(blocks, 0)
    values = _halves(blocks, start=8, length=16, size=16) | _fifth_bits(blocks, start=4)
    return values + 128, scales, _float16(blocks, 2) - 128 * scales


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales = _float16(blocks, 0)
    return blocks[..., 2:] ^ 128, scales, -128 * scales


def _k_parameters(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of eight groups, 6 bits each.

    Four bytes hold the first four groups' scales, four bytes their minimums. The other groups use these bytes'
    remaining two bits and four more bytes.
    """
    scales, minimums, others = blocks[..., 4:16].chunk(3, -1)
    scales = torch.cat((scales & 63, (others & 15) | (scales >> 6 << 4)), -1)
    minimums = torch.cat((minimums & 63, (others >> 4) | (minimums >> 6 << 4)), -1)
    return _float16(blocks, 0) * scales, -_float16(blocks, 2) * minimums


def _q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _halves(blocks, start=16, length=32, size=128), *_k_parameters(blocks)


def _q5_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bit i of 32 bytes is the fifth bit of group i's values."""
    scales, minimums = _k_parameters(blocks)
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (blocks[..., None, 16:48] >> places & 1).flatten(-2) << 4
    values = _halves(blocks, start=48, length=32, size=128) | fifth
    return values + 128, scales, minimums - 128 * scales


def _q6_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In each half block, 64 bytes hold the low four bits of 128 values, 32 bytes the high two bits."""
    places = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    upper = (blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> places & 3).flatten(-3) << 4
    values = _halves(blocks, start=0, length=64, size=128) | upper
    scales = _float16(blocks, 208) * blocks[..., 192:208].contiguous().view(torch.int8)
    return values + 96, scales, -128 * scales


UNPACK: dict[str, tuple[int, int, Unpack]] = {
    "IQ4_NL": (4, 32, _iq4_nl),
    "Q4_0": (4, 32, _q4_0),
    "Q4_1": (4, 32, _q4_1),
    "Q4_K": (4, 32, _q4_k),
    "Q5_0": (8, 32, _q5_0),
    "Q5_1": (8, 32, _q5_1),
    "Q5_K": (8, 32, _q5_k),
    "Q6_K": (8, 16, _q6_k),
    "Q8_0": (8, 32, _q8_0),
}
"""Types with a scale and optional minimum per group: bits of unpacked values, group size, and unpacking function."""
