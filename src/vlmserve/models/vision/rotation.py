"""Rotary positions of patches: by the row and the column in which they lie."""

from __future__ import annotations

import torch
from torch import Tensor


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
    heads = qkv.view(len(qkv), 3, num_heads, -1)
    plain = heads[:, :2].flatten(1, 2).float()
    first, second = plain.chunk(2, -1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    heads[:, :2] = rotated.view_as(heads[:, :2]).to(qkv.dtype)
    return qkv
