"""Paged attention in plain torch: the reference, for any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache as cached
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.kernels.attention import AttentionContext, BatchMetadata, BidirectionalRows, LayerCache
from vlmserve.kernels.blocks import allocate_blocks
from vlmserve.kernels.torch_cache import STORED_TYPES, cache_rows, gather, write
from vlmserve.kernels.torch_decodes import BUCKET_COST, GATHERED_ELEMENTS, DecodePlan, attend_decodes, plan_decodes
from vlmserve.kernels.torch_scores import attention_scores, attention_weights, needs_scores
from vlmserve.layer_specs import AttentionSpec, CacheType

# Rows of a chunk that share a mask. Limits its memory, and skips keys that no row attends to.
ROWS_PER_MASK = 256


@dataclass(frozen=True, slots=True)
class PromptChunk:
    start: int
    end: int
    gather: Tensor | None
    """Cache rows of its blocks. None: this step contains the whole context."""
    key_start: int
    """Position of the first gathered token."""
    context: int
    """Cached tokens after this step."""
    masked: bool
    """False if every row attends to exactly the rows up to its own."""
    bidirectional: tuple[BidirectionalRows, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerPlan:
    write: Tensor
    """Cache row (one token of one head) of each new key."""
    decodes: DecodePlan
    chunks: list[PromptChunk]
    mask: Tensor | None
    """``[rows, length]``, additive and right-aligned: element ``[-1 - i, -1 - j]`` is for the query i tokens and the
    key j tokens before the newest."""
    workspace: Tensor
    """Reused for gathered blocks. Fresh memory would cost more page faults than the copy itself."""


StepPlan = Callable[[AttentionSpec, int], LayerPlan]
"""Returns the plan for this attention and cache column, computed once per step."""


class TorchReference:
    name = "torch"
    reads_on_device = False

    def __init__(
        self,
        *,
        cache_type: CacheType = "auto",
        bucket_cost: int = BUCKET_COST,
        gathered_elements: int = GATHERED_ELEMENTS,
    ) -> None:
        self.cache_type: CacheType = cache_type
        self._plan_decodes = partial(plan_decodes, bucket_cost=bucket_cost, gathered_elements=gathered_elements)

    def allocate(
        self, num_blocks: int, block_size: int, spec: AttentionSpec, dtype: torch.dtype, device: torch.device
    ) -> LayerCache:
        shape = (num_blocks, spec.num_kv_heads, block_size, spec.head_size)
        stored = STORED_TYPES.get(self.cache_type, dtype)
        scales = None
        if self.cache_type != "auto":
            scales = allocate_blocks((num_blocks, spec.num_kv_heads, 2, block_size), torch.float32, device)
        return LayerCache(
            allocate_blocks(shape, stored, device), allocate_blocks(shape, stored, device), block_size, scales
        )

    def block_bytes(self, block_size: int, spec: AttentionSpec, dtype: torch.dtype) -> int:
        row_bytes = spec.head_size * dtype.itemsize
        if self.cache_type != "auto":
            row_bytes = spec.head_size + torch.float32.itemsize
        return 2 * spec.num_kv_heads * block_size * row_bytes

    def prepare(
        self, metadata: BatchMetadata, block_size: int, layers: Sequence[AttentionSpec], dtype: torch.dtype
    ) -> StepPlan:
        @cached
        def plan(spec: AttentionSpec, column: int) -> LayerPlan:
            decodes = self._plan_decodes(metadata, block_size, spec, column)
            return _plan_layer(metadata, block_size, spec, column, dtype, decodes)

        return plan

    def attend(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        context: AttentionContext,
    ) -> Tensor:
        cache, spec, metadata, plan = context
        layer = cast(StepPlan, plan)(spec, cache.column)
        if key is not None and value is not None:
            key, value = write(cache, 0, key, layer.write), write(cache, 1, value, layer.write)

        output = query.new_empty(query.shape[0], spec.num_heads, spec.head_size)
        if metadata.num_decodes:
            attend_decodes(query[: metadata.num_decodes], cache, spec, layer.decodes, layer.workspace, output)
        for chunk in layer.chunks:
            _attend_chunk(query, key, value, cache, spec, chunk, layer, output)
        return output.view(query.shape[0], -1)


def _attend_chunk(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cache: LayerCache,
    spec: AttentionSpec,
    chunk: PromptChunk,
    layer: LayerPlan,
    output: Tensor,
) -> None:
    rows = slice(chunk.start, chunk.end)
    queries = query[rows].transpose(0, 1)
    if chunk.gather is None:
        assert key is not None
        assert value is not None
        keys, values = key[rows].transpose(0, 1), value[rows].transpose(0, 1)
    else:
        keys = gather(cache, 0, chunk.gather, layer.workspace, spec.num_kv_heads)
        values = gather(cache, 1, chunk.gather, layer.workspace, spec.num_kv_heads)
    result = output[rows].transpose(0, 1)
    if not chunk.masked:
        result.copy_(_dot_product_attention(queries, keys, values, spec, None))
        return
    attention = _attention_by_scores if needs_scores(spec) else _dot_product_attention
    for group in _row_groups(chunk, spec.window):
        if group.bidirectional:
            bias = _bidirectional_mask(chunk, group, spec, query)
        else:
            assert layer.mask is not None
            bias = layer.mask[-(group.last - group.first) :, layer.mask.shape[1] - (group.high - group.low) :]
        rows, seen = slice(group.first, group.last), slice(group.low - chunk.key_start, group.high - chunk.key_start)
        result[:, rows] = attention(queries[:, rows], keys[:, seen], values[:, seen], spec, bias)


class RowGroup(NamedTuple):
    """Query rows ``first <= row < last`` of a chunk, and keys ``low <= key < high``.

    bidirectional: within its window, each row attends to all of them.
    """

    first: int
    last: int
    low: int
    high: int
    bidirectional: bool


def _row_groups(chunk: PromptChunk, window: int | None) -> Iterator[RowGroup]:
    pieces: list[tuple[int, int, int | None]] = []
    done = chunk.start
    for _, first, last, reach in chunk.bidirectional:
        pieces += [(done, first, None), (first, last, reach)]
        done = last
    pieces.append((done, chunk.end, None))
    before = chunk.context - (chunk.end - chunk.start)
    for begin, end, reach_ahead in pieces:
        for first in range(begin - chunk.start, end - chunk.start, ROWS_PER_MASK):
            last = min(first + ROWS_PER_MASK, end - chunk.start)
            low = 0 if window is None else max(0, before + first - window + 1)
            high = before + last if reach_ahead is None else reach_ahead
            yield RowGroup(first, last, low, high, reach_ahead is not None)


def _bidirectional_mask(chunk: PromptChunk, group: RowGroup, spec: AttentionSpec, query: Tensor) -> Tensor:
    """Return an additive mask ``[rows, positions]``."""
    before = chunk.context - (chunk.end - chunk.start)
    shape = group.last - group.first, group.high - group.low
    if spec.window is None or before + group.last - group.low <= spec.window:
        return query.new_zeros(1, 1).expand(shape)
    rows = torch.arange(before + group.first, before + group.last, device=query.device)
    keys = torch.arange(group.low, group.high, device=query.device)
    return query.new_zeros(shape).masked_fill_(rows[:, None] - keys >= spec.window, -torch.inf)


def _dot_product_attention(
    query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, mask: Tensor | None
) -> Tensor:
    """Attend ``[heads, rows, head_size]`` over ``[kv_heads, length, head_size]``. No mask: causal."""
    return F.scaled_dot_product_attention(
        query[None],
        keys[None],
        values[None],
        attn_mask=None if mask is None else mask[None, None],
        is_causal=mask is None,
        scale=spec.scale,
        enable_gqa=spec.num_heads != spec.num_kv_heads,
    )[0]


def _attention_by_scores(query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, mask: Tensor) -> Tensor:
    """Has features that the fused operator lacks."""
    heads, rows, size = query.shape
    grouped = query.reshape(spec.num_kv_heads, -1, size)
    scores = attention_scores(grouped, keys, spec).view(heads, rows, -1) + mask
    weights = attention_weights(scores, spec).to(query.dtype)
    return torch.bmm(weights.view(spec.num_kv_heads, -1, keys.shape[1]), values).view(heads, rows, size)


def _plan_layer(
    metadata: BatchMetadata, block_size: int, spec: AttentionSpec, column: int, dtype: torch.dtype, decodes: DecodePlan
) -> LayerPlan:
    heads = spec.num_kv_heads
    slots = metadata.slot_mapping[column]
    device = slots.device
    first_row = (slots // block_size) * (heads * block_size) + slots % block_size
    write = (first_row[:, None] + torch.arange(heads, device=device) * block_size).view(-1)

    chunks = _plan_chunks(metadata, block_size, spec, column)
    largest = max([decodes.most_gathered, *(len(chunk.gather) for chunk in chunks if chunk.gather is not None)])
    return LayerPlan(
        write,
        decodes,
        chunks,
        _chunk_mask(chunks, spec, dtype, device),
        torch.empty(2, largest, block_size * spec.head_size, dtype=dtype, device=device),
    )


def _plan_chunks(metadata: BatchMetadata, block_size: int, spec: AttentionSpec, column: int) -> list[PromptChunk]:
    chunks = []
    start, tables = metadata.num_decodes, metadata.block_tables[column]
    for sequence in range(metadata.num_decodes, len(metadata.query_lens)):
        length, context = metadata.query_lens[sequence], metadata.host_context_lens[sequence]
        key_start, gather = 0, None
        if length < context or spec.shares_with is not None:
            oldest = 0 if spec.window is None else max(0, context - length - spec.window + 1)
            key_start = oldest // block_size * block_size
            blocks = tables[sequence, key_start // block_size : -(-context // block_size)]
            gather = cache_rows(blocks.long()[None], spec.num_kv_heads)
        ahead = () if spec.is_causal else tuple(one for one in metadata.bidirectional if one.sequence == sequence)
        past_window = spec.window is not None and context > spec.window
        masked = gather is not None or needs_scores(spec) or past_window or bool(ahead)
        chunks.append(PromptChunk(start, start + length, gather, key_start, context, masked, ahead))
        start += length
    return chunks


def _chunk_mask(
    chunks: list[PromptChunk], spec: AttentionSpec, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    masked = [chunk for chunk in chunks if chunk.masked]
    if not masked:
        return None
    rows = min(ROWS_PER_MASK, max(chunk.end - chunk.start for chunk in masked))
    groups = (group for chunk in masked for group in _row_groups(chunk, spec.window) if not group.bidirectional)
    width = max((group.high - group.low for group in groups), default=0)
    age_of_query = torch.arange(rows - 1, -1, -1, device=device)[:, None]
    age_of_key = torch.arange(width - 1, -1, -1, device=device)
    hidden = age_of_key < age_of_query
    if spec.window is not None:
        hidden |= age_of_key - age_of_query >= spec.window
    return torch.zeros(rows, width, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
