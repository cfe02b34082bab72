"""How `TorchReference` keeps keys and values: ``[blocks, kv_heads, block_size, head_size]``.

One row of ``[blocks * kv_heads, block_size * head_size]`` is a contiguous piece of one head's history. Gathering such
rows in the order sequence, head, block gives the contiguous ``[sequences * kv_heads, length, head_size]`` that a
batched matrix product wants, with the query heads of a group as its rows: keys and values are copied once and never
repeated.

In 8 bits they lie alike, with scales ``[blocks, kv_heads, 2, block_size]`` of keys and of values beside them; gathering
makes them numbers of the queries' type again. New ones meet queries as they will be read later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlmserve.kernels.attention import LayerCache


def write(cache: LayerCache, which: int, new: Tensor, rows: Tensor) -> Tensor:
    """Write keys (`which` 0) or values (1) ``[tokens, kv_heads, head_size]`` into rows of the cache. Returns them as
    they will be read."""
    stored = cache.tensors[which]
    size = new.shape[2]
    flat = new.reshape(-1, size)
    if cache.scales is None:
        stored.view(-1, size).index_copy_(0, rows, flat)
        return new
    largest = flat.abs().amax(1).float()
    # What is not finite becomes NaN, all of the row.
    scales = torch.where(largest.isfinite(), largest / 127, torch.nan)
    # Not 127 / largest, which torch computes as a product with the reciprocal.
    factors = torch.full_like(largest, 127).div_(largest)
    rounded = (flat * factors[:, None]).round_().nan_to_num_(0.0, 0.0, 0.0).to(torch.int8)
    stored.view(-1, size).index_copy_(0, rows, rounded)
    heads, block_size = cache.scales.shape[1], cache.scales.shape[3]
    places = (rows // block_size * 2 + which) * block_size + rows % block_size
    cache.scales.view(-1).index_copy_(0, places, scales)
    return (rounded * scales[:, None]).to(new.dtype).view(-1, heads, size)


def gather(cache: LayerCache, which: int, rows: Tensor, workspace: Tensor, batch: int) -> Tensor:
    """Blocks of keys (`which` 0) or values (1) as ``[batch, tokens, head_size]``, in `workspace`."""
    stored = cache.tensors[which]
    blocks, heads, block_size, size = stored.shape
    flat = stored.view(blocks * heads, block_size * size)
    gathered = workspace[which, : len(rows)]
    if cache.scales is None:
        torch.index_select(flat, 0, rows, out=gathered)
    else:
        integers = flat.index_select(0, rows).view(-1, block_size, size)
        scales = cache.scales.view(blocks * heads, 2, block_size)[:, which].index_select(0, rows)
        torch.mul(integers, scales[..., None], out=gathered.view(integers.shape))
    return gathered.view(batch, -1, size)


def cache_rows(blocks: Tensor, heads: int) -> Tensor:
    """``[sequences, blocks]`` to rows of ``[blocks * heads, ...]`` in the order sequence, head, block."""
    return (blocks[:, None] * heads + torch.arange(heads, device=blocks.device)[:, None]).reshape(-1)
