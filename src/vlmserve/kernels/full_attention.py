"""Attention without a cache: each token attends to its whole sequence within one step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.kernels.attention import AttentionContext, BatchMetadata, LayerCache
from vlmserve.layer_specs import AttentionSpec


class FullAttention:
    """For text encoders. It only reads `query_lens`."""

    name = "full"
    reads_on_device = False

    def allocate(
        self, num_blocks: int, block_size: int, spec: AttentionSpec, dtype: torch.dtype, device: torch.device
    ) -> LayerCache:
        nothing = torch.empty(0, dtype=dtype, device=device)
        return LayerCache(nothing, nothing, block_size)

    def block_bytes(self, block_size: int, spec: AttentionSpec, dtype: torch.dtype) -> int:
        return 0

    def prepare(
        self, metadata: BatchMetadata, block_size: int, layers: Sequence[AttentionSpec], dtype: torch.dtype
    ) -> None: ...

    def attend(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        context: AttentionContext,
    ) -> Tensor:
        assert key is not None
        assert value is not None
        spec = context.spec
        output = torch.empty_like(query)
        end = 0
        for length in context.metadata.query_lens:
            rows = slice(end, end + length)
            end += length
            output[rows] = F.scaled_dot_product_attention(
                query[None, rows].transpose(1, 2),
                key[None, rows].transpose(1, 2),
                value[None, rows].transpose(1, 2),
                scale=spec.scale,
                enable_gqa=spec.num_heads != spec.num_kv_heads,
            )[0].transpose(0, 1)
        return output.flatten(1)
