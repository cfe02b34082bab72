"""Attention within images of several sizes as kernels compute it: from blocks of rows, whatever they belong to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vlmserve.kernels.ranges import Ranges
from vlmserve.layers.encoder_attention import EncoderAttention
from vlmserve.models.vision.rotation import rotate_heads


class StaticRanges:
    """`RangeKernels` by torch's operations. num_attended: calls of `attend`."""

    def __init__(self, num_heads: int) -> None:
        self._num_heads = num_heads
        self.num_attended = 0

    def rotate(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `RangeKernels.rotate`."""
        return rotate_heads(qkv, self._num_heads, cos, sin)

    def attend(self, qkv: Tensor, ranges: Ranges) -> Tensor:
        """See `RangeKernels.attend`. What no block covers stays NaN."""
        self.num_attended += 1
        query, key, value = qkv.float().view(len(qkv), 3, self._num_heads, -1).permute(1, 2, 0, 3)
        out = torch.full_like(query, torch.nan)
        for first, begin, end in ranges.blocks.tolist():
            rows = slice(first, min(first + ranges.block_rows, end))
            scores = query[:, rows] @ key[:, begin:end].transpose(1, 2) * query.shape[-1] ** -0.5
            out[:, rows] = scores.softmax(-1) @ value[:, begin:end]
        return out.transpose(0, 1).flatten(1).to(qkv.dtype)


def use_ranges(model: nn.Module) -> list[StaticRanges]:
    """Have a model's towers attend by such kernels, which are returned."""
    kernels = []
    for module in model.modules():
        if isinstance(module, EncoderAttention):
            module.range_kernels = StaticRanges(module.num_heads)
            kernels.append(module.range_kernels)
    return kernels
