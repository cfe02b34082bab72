"""Attention of a vision tower, in which every token of an image attends to every other."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.layers.operations import EncoderKernel, Layer, Operations
from vlmserve.layers.stages import Stages, by_rows


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
        self._kernel: EncoderKernel = partial(_attend, num_heads=num_heads)
        self._head_kernel: EncoderKernel = partial(_attend, num_heads=1)

    def forward(self, qkv: Tensor) -> Tensor:
        return self._kernel(qkv)

    def products(self, length: int) -> int:
        """Multiplications for an image of that many tokens."""
        return 2 * length**2 * self.num_heads * self.head_size

    def in_stages(self, qkv: Tensor, limit: float) -> Stages[Tensor]:
        """`forward` in stages of some images, or of a head of one image. limit: multiplications of a stage; a stage has
        at least one head of one image."""
        images, length, _ = qkv.shape
        products = self.products(length)
        if products <= limit or limit == math.inf:
            return (yield from by_rows(self._kernel, products, limit, qkv))
        heads = qkv.view(images, length, 3, self.num_heads, self.head_size)
        output = qkv.new_empty(images, length, self.num_heads, self.head_size)
        for image in range(images):
            for head in range(self.num_heads):
                yield products // self.num_heads
                output[image, :, head] = self._head_kernel(heads[image, :, :, head].reshape(1, length, -1))[0]
        return output.flatten(2)

    def arrange(self, operations: Operations) -> None:
        """See `Layer.arrange`."""
        for_heads = operations.encoder_attention
        self._kernel = for_heads(self.num_heads, self.head_size, self._dtype) or self._kernel
        self._head_kernel = for_heads(1, self.head_size, self._dtype) or self._head_kernel


def _attend(qkv: Tensor, num_heads: int) -> Tensor:
    images, length, _ = qkv.shape
    query, key, value = qkv.view(images, length, 3, num_heads, -1).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
