"""Attention of long prompts without cached tokens, by torch's fused operator (cuDNN or FlashAttention)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.kernels.attention import BatchMetadata, LayerCache
from vlmserve.kernels.torch_scores import needs_scores
from vlmserve.layer_specs import AttentionSpec

LEAST_ROWS = 2000
"""Minimum tokens of a prompt."""


def are_fresh(metadata: BatchMetadata, spec: AttentionSpec, cache: LayerCache) -> bool:
    """Check for only long prompts from their first token, plain causal attention and an unquantized cache."""
    lengths = metadata.query_lens
    if metadata.num_decodes or metadata.decodes is not None or min(lengths, default=0) < LEAST_ROWS:
        return False
    if needs_scores(spec) or cache.scales is not None or (metadata.bidirectional and not spec.is_causal):
        return False
    return lengths == metadata.host_context_lens and (spec.window is None or max(lengths) <= spec.window)


def attend_fresh(query: Tensor, cache: LayerCache, spec: AttentionSpec, metadata: BatchMetadata) -> Tensor:
    """Attend ``[tokens, heads * head_size]``. Keys and values are in the cache."""
    output = torch.empty_like(query)
    first = 0
    for length, blocks in zip(metadata.query_lens, metadata.block_tables[cache.column], strict=True):
        rows, table = slice(first, first + length), blocks[: -(-length // cache.block_size)].long()
        # the kernel that applies RoPE writes keys to the cache only
        keys, values = (
            tensor[table].transpose(0, 1).flatten(1, 2)[None, :, :length] for tensor in (cache.keys, cache.values)
        )
        queries = query[rows].view(length, spec.num_heads, spec.head_size).transpose(0, 1)[None]
        result = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=spec.scale, enable_gqa=spec.num_heads != spec.num_kv_heads
        )
        output[rows] = result[0].transpose(0, 1).flatten(1)
        first += length
    return output
