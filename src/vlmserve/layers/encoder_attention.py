"""Attention of a vision tower, within each image."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.kernels.operations import ALL_QUERIES, EncoderKernel, Operations, RotationKernel
from vlmserve.kernels.ranges import RangeKernels, Ranges
from vlmserve.layers.layer import Layer
from vlmserve.layers.stages import StageBudget, Stages


class EncoderAttention(Layer):
    """Input ``[images, tokens, 3 * size]``: queries, keys, values, each head by head. Output ``[images, tokens,
    size]``."""

    def __init__(self, size: int, num_heads: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = size // num_heads
        self._dtype = dtype
        self._kernel: EncoderKernel = partial(_attend, num_heads=num_heads)
        self._head_kernel: EncoderKernel = partial(_attend, num_heads=1)
        self.range_kernels: RangeKernels | None = None
        """The device's kernels for images of different sizes; None: compute them one after the other."""
        self.rotation: RotationKernel | None = None
        """The device's kernel that rotates queries and keys of patches; None: torch's operations."""

    def forward(self, qkv: Tensor) -> Tensor:
        return self._kernel(qkv)

    def products(self, length: int) -> int:
        return 2 * length**2 * self.num_heads * self.head_size

    def in_stages(self, qkv: Tensor, budget: StageBudget) -> Stages[Tensor]:
        """Stages are images, heads of an image, or queries of a head."""
        images, length, _ = qkv.shape
        queries, products = images * self.num_heads * length, 2 * length * self.head_size
        while not (count := budget.take(queries, products, budget.rows)):
            yield
        if count == queries:
            return self._kernel(qkv)
        output = qkv.new_empty(images, length, self.num_heads * self.head_size)
        done = 0
        while True:
            self._attend_queries(qkv, output, done, done + count)
            done += count
            if done == queries:
                return output
            while not (count := budget.take(queries - done, products, budget.rows)):
                yield

    def over_ranges(self, qkv: Tensor, ranges: Ranges, budget: StageBudget) -> Stages[Tensor]:
        """``[tokens, 3 * size]`` to ``[tokens, size]``.

        With range kernels, ranges of different lengths are one stage.
        """
        if self.range_kernels is None or ranges.is_even:
            parts = []
            for groups in ranges.runs(qkv):
                parts.append((yield from self.in_stages(groups, budget)).flatten(0, 1))
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        products = sum(map(self.products, ranges.lengths))
        while not budget.take(1, products):
            yield
        return self.range_kernels.attend(qkv, ranges)

    def _attend_queries(self, qkv: Tensor, output: Tensor, start: int, end: int) -> None:
        """Queries ``start <= i < end``, by head, then image, of whole images or of one head."""
        images, length, _ = qkv.shape
        inputs = qkv.view(images, length, 3, self.num_heads, self.head_size)
        outputs = output.view(images, length, self.num_heads, self.head_size)
        while start < end:
            place, query = divmod(start, length)
            image, head = divmod(place, self.num_heads)
            whole = 0 if head or query else (end - start) // (self.num_heads * length)
            if whole:
                output[image : image + whole] = self._kernel(qkv[image : image + whole])
                start += whole * self.num_heads * length
                continue
            last = min(length, query + end - start)
            of_head = inputs[image, :, :, head].reshape(1, length, -1)
            outputs[image, query:last, head] = self._head_kernel(of_head, queries=slice(query, last))[0]
            start += last - query

    def arrange(self, operations: Operations) -> None:
        for_heads = operations.encoder_attention
        self._kernel = for_heads(self.num_heads, self.head_size, self._dtype) or self._kernel
        self._head_kernel = for_heads(1, self.head_size, self._dtype) or self._head_kernel
        self.rotation = operations.encoder_rotation(self._dtype)
        self.range_kernels = operations.encoder_ranges(self.num_heads, self.head_size, self._dtype)


def _attend(qkv: Tensor, num_heads: int, queries: slice = ALL_QUERIES) -> Tensor:
    images, length, _ = qkv.shape
    query, key, value = qkv.view(images, length, 3, num_heads, -1).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(query[:, :, queries], key, value).transpose(1, 2).flatten(2)
