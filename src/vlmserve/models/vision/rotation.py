"""Rotary embeddings of patches, by row and column."""

from __future__ import annotations

import torch
from torch import Tensor

from vlmserve.kernels.transfers import to_device
from vlmserve.layers.encoder_attention import EncoderAttention

_AT_ONCE = 128
"""Patches to rotate at a time on a CPU, so that intermediate results stay in its caches."""


def patch_angles(
    rows: Tensor, columns: Tensor, by_row: Tensor, by_column: Tensor, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines for `rotate_heads`, float32 ``[patches, 1, head_size / 2]``.

    rows, columns: int64 ``[patches]``. by_row, by_column: radians per place, ``[head_size / 4]``.
    """
    angles = torch.cat((rows[:, None] * by_row, columns[:, None] * by_column), -1)
    return to_device(angles.cos()[:, None], device), to_device(angles.sin()[:, None], device)


def rotated(attention: EncoderAttention, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if attention.range_kernels is not None:
        return attention.range_kernels.rotate(qkv, cos, sin)
    if attention.rotation is not None:
        return attention.rotation(qkv, cos, sin)
    return rotate_heads(qkv, attention.num_heads, cos, sin)


def rotate_heads(qkv: Tensor, num_heads: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries and keys in ``[patches, 3 * size]`` in place.

    Element ``i`` of a head pairs with ``i + head_size / 2``.
    """
    heads = qkv.view(len(qkv), 3 * num_heads, -1)[:, : 2 * num_heads]
    half = heads.shape[-1] // 2
    at_once = _AT_ONCE if qkv.device.type == "cpu" else max(1, len(qkv))
    for rows, cosines, sines in zip(*(torch.split(one, at_once) for one in (heads, cos, sin)), strict=True):
        plain = rows.float()
        first, second = plain[..., :half], plain[..., half:]
        rotated = torch.empty_like(plain)
        torch.mul(first, cosines, out=rotated[..., :half]).addcmul_(second, sines, value=-1)
        torch.mul(second, cosines, out=rotated[..., half:]).addcmul_(first, sines)
        rows.copy_(rotated)
    return qkv
