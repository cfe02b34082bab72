"""Attention of a vision tower, in which every token of a picture sees every other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmserve.kernels import cpu_native


class EncoderAttention(nn.Module):
    """Full self-attention within each picture.

    ``[pictures, tokens, 3 * size]``, queries, keys and values side by side and each of them head by head, to
    ``[pictures, tokens, size]``.
    """

    def __init__(self, size: int, num_heads: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads = num_heads
        self._native = False
        self._can_be_native = cpu_native.can_pack(size // num_heads, dtype)

    def forward(self, qkv: Tensor) -> Tensor:
        if self._native:
            return cpu_native.encoder_attention(qkv, self.num_heads)
        pictures, length, _ = qkv.shape
        query, key, value = qkv.view(pictures, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)

    def use_native(self) -> None:
        """Compute with the native kernel from now on, if it takes heads of this size."""
        self._native = self._can_be_native
