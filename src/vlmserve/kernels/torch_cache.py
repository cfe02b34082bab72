"""The KV cache of `TorchReference`: ``[blocks, kv_heads, block_size, head_size]``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vlmserve.kernels.attention import LayerCache
from vlmserve.kernels.quantized import FLOAT8
from vlmserve.layer_specs import CacheType

STORED_TYPES: Mapping[CacheType, torch.dtype] = {"int8": torch.int8, "fp8": torch.uint8}
LARGEST: Mapping[CacheType, float] = {"int8": 127.0, "fp8": torch.finfo(FLOAT8).max}
"""Magnitude of the largest stored number of a row."""


def write(cache: LayerCache, which: int, new: Tensor, rows: Tensor) -> Tensor:
    """Write keys (`which` 0) or values (1) ``[tokens, kv_heads, head_size]``. Returns them as later reads see them.

    8-bit caches have scales ``[blocks, kv_heads, 2, block_size]``. float8 is stored as uint8, which torch can copy and
    index on all devices.
    """
    stored = cache.tensors[which]
    size = new.shape[2]
    flat = new.reshape(-1, size)
    if cache.scales is None:
        stored.view(-1, size).index_copy_(0, rows, flat)
        return new
    largest = flat.abs().amax(1).float()
    most = LARGEST[cache.stored]
    # rows with non-finite numbers become NaN
    largest = largest.where(largest.isfinite(), torch.nan)
    scales = largest / most
    # torch computes `most / largest` with a reciprocal, which rounds differently
    factors = torch.full_like(largest, most).div_(largest)
    scaled = (flat * factors[:, None]).nan_to_num_(0.0, 0.0, 0.0)
    rounded = scaled.to(FLOAT8) if cache.stored == "fp8" else scaled.round_().to(torch.int8)
    stored.view(-1, size).index_copy_(0, rows, rounded.view(stored.dtype))
    heads, block_size = cache.scales.shape[1], cache.scales.shape[3]
    places = (rows // block_size * 2 + which) * block_size + rows % block_size
    cache.scales.view(-1).index_copy_(0, places, scales)
    return (rounded.float() * scales[:, None]).to(new.dtype).view(-1, heads, size)


def gather(cache: LayerCache, which: int, rows: Tensor, workspace: Tensor, batch: int) -> Tensor:
    """Dequantize keys (`which` 0) or values (1) as ``[batch, tokens, head_size]`` in `workspace`.

    A row is a contiguous part of one head's history, for a batched matmul.
    """
    stored = cache.tensors[which]
    blocks, heads, block_size, size = stored.shape
    flat = stored.view(blocks * heads, block_size * size)
    gathered = workspace[which, : len(rows)]
    if cache.scales is None:
        torch.index_select(flat, 0, rows, out=gathered)
    else:
        selected = flat.index_select(0, rows).view(-1, block_size, size)
        numbers = selected.view(FLOAT8).float() if cache.stored == "fp8" else selected
        scales = cache.scales.view(blocks * heads, 2, block_size)[:, which].index_select(0, rows)
        torch.mul(numbers, scales[..., None], out=gathered.view(numbers.shape))
    return gathered.view(batch, -1, size)


def cache_rows(blocks: Tensor, heads: int) -> Tensor:
    """Rows are ``[blocks * heads, ...]``."""
    return (blocks[:, None] * heads + torch.arange(heads, device=blocks.device)[:, None]).reshape(-1)
