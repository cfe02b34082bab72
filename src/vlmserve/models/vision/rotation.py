"""Rotary positions of patches: by the row and the column in which they lie."""

from __future__ import annotations

import torch
from torch import Tensor

_AT_ONCE = 128
"""Patches: what lies between stays in a CPU's caches, where all patches of a large image would not."""


def patch_angles(
    rows: Tensor, columns: Tensor, by_row: Tensor, by_column: Tensor, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines for `rotate_heads`, float32 ``[patches, 1, head_size / 2]``. rows, columns: int64
    ``[patches]``. by_row, by_column: radians a place, ``[head_size / 4]``."""
    angles = torch.cat((rows[:, None] * by_row, columns[:, None] * by_column), -1)
    return angles.cos()[:, None].to(device), angles.sin()[:, None].to(device)


def rotate_heads(qkv: Tensor, num_heads: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries and keys in place, of ``[patches, 3 * size]`` with values behind them; element ``i`` of a head
    pairs with ``i + head_size / 2``."""
    heads = qkv.view(len(qkv), 3 * num_heads, -1)[:, : 2 * num_heads]
    half = heads.shape[-1] // 2
    for rows, cosines, sines in zip(*(torch.split(one, _AT_ONCE) for one in (heads, cos, sin)), strict=True):
        plain = rows.float()
        first, second = plain[..., :half], plain[..., half:]
        rotated = torch.empty_like(plain)
        torch.mul(first, cosines, out=rotated[..., :half]).addcmul_(second, sines, value=-1)
        torch.mul(second, cosines, out=rotated[..., half:]).addcmul_(first, sines)
        rows.copy_(rotated)
    return qkv
