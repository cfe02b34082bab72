"""Attention without a cache: every token of a sequence sees all of its sequence, which comes in one piece."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.kernels.attention import AttentionSpec, BatchMetadata, LayerCache


class FullAttention:
    """An `AttentionBackend` for encoders of text. It reads nothing of the metadata but `query_lens`."""

    name = "full"

    def allocate(
        self, num_blocks: int, block_size: int, spec: AttentionSpec, dtype: torch.dtype, device: torch.device
    ) -> LayerCache:
        """A cache that holds nothing, however many blocks are asked for."""
        nothing = torch.empty(0, dtype=dtype, device=device)
        return LayerCache(nothing, nothing, block_size)

    def block_bytes(self, block_size: int, spec: AttentionSpec, dtype: torch.dtype) -> int:
        """Nothing."""
        return 0

    def clear(self, cache: LayerCache, blocks: Tensor) -> None:
        """Nothing is there to clear."""

    def copy(self, source: LayerCache, target: LayerCache, source_blocks: Tensor, target_blocks: Tensor) -> None:
        """Nothing is there to copy."""

    def prepare(self, metadata: BatchMetadata, block_size: int) -> None:
        """Nothing to share between layers."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        spec: AttentionSpec,
        metadata: BatchMetadata,
        plan: object,
    ) -> Tensor:
        """``[tokens, heads, head_size]`` and keys and values to ``[tokens, heads * head_size]``."""
        attended = [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in rows),
                scale=spec.scale,
                enable_gqa=spec.num_heads != spec.num_kv_heads,
            )[0].transpose(0, 1)
            for rows in zip(*(x.split(metadata.query_lens) for x in (query, key, value)), strict=True)
        ]
        return torch.cat(attended).flatten(1)
