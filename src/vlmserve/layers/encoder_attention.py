"""Attention of a vision tower, in which every token of an image attends to every other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.layers.operations import EncoderKernel, Layer, Operations


class EncoderAttention(Layer):
    """Full self-attention within each image.

    ``[images, tokens, 3 * size]``, queries, keys and values side by side and each of them head by head, to
    ``[images, tokens, size]``.
    """

    def __init__(self, size: int, num_heads: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = size // num_heads
        self._dtype = dtype
        self._kernel: EncoderKernel | None = None

    def forward(self, qkv: Tensor) -> Tensor:
        if self._kernel is not None:
            return self._kernel(qkv)
        images, length, _ = qkv.shape
        query, key, value = qkv.view(images, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)

    def arrange(self, operations: Operations) -> None:
        """See `Layer.arrange`."""
        self._kernel = operations.encoder_attention(self.num_heads, self.head_size, self._dtype)
