"""Paged attention in plain torch operations: the reference that runs on any device, and the default on a CPU.

Keys and values lie as ``[blocks, kv_heads, block_size, head_size]``, so that one row of ``[blocks * kv_heads,
block_size * head_size]`` is a contiguous piece of one head's history. Gathering such rows in the order sequence, head,
block gives the contiguous ``[sequences * kv_heads, length, head_size]`` that a batched matrix product wants, with the
query heads of a group as its rows: keys and values are copied once and never repeated.

In 8 bits they lie alike, with scales ``[blocks, kv_heads, 2, block_size]`` of keys and of values beside them; gathering
makes them numbers of the queries' type again. New ones meet queries as they will be read later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.kernels.attention import AttentionSpec, BatchMetadata, LayerCache, WideRows
from vlmserve.kernels.blocks import allocate_zeros, clear_blocks, copy_blocks

# What another bucket of decodes costs on a CPU, in padding tokens: some ten operator calls against the copying and
# multiplying of one token's keys and values.
BUCKET_COST = 512
# Up to this many decodes the fused operator beats separate products, whose fixed costs are higher.
FUSED_DECODES = 2
# Query rows of a prompt chunk that share one mask: bounds the mask's memory and skips the keys no row can see.
ROWS_PER_MASK = 256


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Decodes of similar length, padded to the longest.

    start, end: which rows of the ordered decodes. gather: cache rows of its blocks, sequence by head by block.
    length: tokens after padding. mask: float32 ``[sequences, 1, 1, length]``, None if nothing is padded.
    """

    start: int
    end: int
    gather: Tensor
    length: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """A sequence with several new tokens.

    start, end: its query rows. gather: cache rows of its blocks, None if all its context is in this step.
    key_start: position of the first gathered token. context: tokens in the cache after this step.
    masked: whether a row sees anything else than all rows up to its own. wide: those of its rows that see more.
    """

    start: int
    end: int
    gather: Tensor | None
    key_start: int
    context: int
    masked: bool
    wide: tuple[WideRows, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What layers of one geometry share in a step.

    write: cache row (one token of one head) of each new key. order: decodes sorted by length, None if they stay as they
    are. mask: ``[rows, length]`` additive, right aligned: element ``[-1 - i, -1 - j]`` is for a query and a key that
    lie i and j tokens before the newest. workspace: where gathered blocks go, one bucket's or chunk's after the other;
    memory taken anew for each would cost more in page faults than the copying itself.
    """

    write: Tensor
    order: Tensor | None
    buckets: list[DecodeBucket]
    chunks: list[PromptChunk]
    mask: Tensor | None
    workspace: Tensor


StepPlan = Mapping[AttentionSpec, LayerPlan]
"""One step's plans, of each geometry that layers have."""


class TorchReference:
    """Attention over a flat batch of decodes and prompt chunks. An `AttentionBackend`."""

    name = "torch"

    def __init__(self, *, quantized_cache: bool = False) -> None:
        """quantized_cache: keys and values are stored in 8 bits."""
        self.quantized_cache = quantized_cache

    def allocate(
        self, num_blocks: int, block_size: int, spec: AttentionSpec, dtype: torch.dtype, device: torch.device
    ) -> LayerCache:
        """A zeroed cache of one layer."""
        shape = (num_blocks, spec.num_kv_heads, block_size, spec.head_size)
        stored = torch.int8 if self.quantized_cache else dtype
        scales = None
        if self.quantized_cache:
            scales = allocate_zeros((num_blocks, spec.num_kv_heads, 2, block_size), torch.float32, device)
        return LayerCache(
            allocate_zeros(shape, stored, device), allocate_zeros(shape, stored, device), block_size, scales
        )

    def block_bytes(self, block_size: int, spec: AttentionSpec, dtype: torch.dtype) -> int:
        """What a block of one layer takes, keys and values together."""
        row_bytes = spec.head_size * dtype.itemsize
        if self.quantized_cache:
            row_bytes = spec.head_size + torch.float32.itemsize
        return 2 * spec.num_kv_heads * block_size * row_bytes

    def clear(self, cache: LayerCache, blocks: Tensor) -> None:
        """Zero blocks (int64 ids on the cache's device)."""
        clear_blocks(cache, blocks)

    def copy(self, source: LayerCache, target: LayerCache, source_blocks: Tensor, target_blocks: Tensor) -> None:
        """Copy blocks between caches, on one device or across two."""
        copy_blocks(source, target, source_blocks, target_blocks)

    def prepare(
        self, metadata: BatchMetadata, block_size: int, layers: Sequence[AttentionSpec], dtype: torch.dtype
    ) -> StepPlan:
        """A plan for each geometry."""
        return {spec: _plan_layer(metadata, block_size, spec, dtype) for spec in dict.fromkeys(layers)}

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
        """See `AttentionBackend.attend`."""
        layer = cast(StepPlan, plan)[spec]
        key, value = _write(cache, 0, key, layer.write), _write(cache, 1, value, layer.write)

        output = query.new_empty(query.shape[0], spec.num_heads, spec.head_size)
        if layer.buckets:
            _attend_decodes(query[: metadata.num_decodes], cache, spec, layer, output)
        for chunk in layer.chunks:
            _attend_chunk(query, key, value, cache, spec, chunk, layer, output)
        return output.view(query.shape[0], -1)


def _attend_decodes(query: Tensor, cache: LayerCache, spec: AttentionSpec, layer: LayerPlan, output: Tensor) -> None:
    count = query.shape[0]
    if layer.order is not None:
        query = query.index_select(0, layer.order)
    # [sequences * kv_heads, query heads of a group, head_size]
    grouped = query.reshape(count * spec.num_kv_heads, -1, spec.head_size)
    attended = output[:count] if layer.order is None else output.new_empty(count, *output.shape[1:])
    by_group = attended.view(grouped.shape)
    for bucket in layer.buckets:
        rows = slice(bucket.start * spec.num_kv_heads, bucket.end * spec.num_kv_heads)
        keys = _gather(cache, 0, bucket.gather, layer.workspace, rows.stop - rows.start)
        values = _gather(cache, 1, bucket.gather, layer.workspace, rows.stop - rows.start)
        _attend_bucket(grouped[rows], keys, values, spec, bucket, by_group[rows])
    if layer.order is not None:
        output.index_copy_(0, layer.order, attended)


def _attend_bucket(
    query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, bucket: DecodeBucket, output: Tensor
) -> None:
    """``[sequences * kv_heads, group, head_size]`` over as many ``[length, head_size]``, into `output`."""
    shape = (bucket.end - bucket.start, spec.num_kv_heads, -1)
    if bucket.end - bucket.start <= FUSED_DECODES and not _needs_scores(spec):
        attended = F.scaled_dot_product_attention(
            query.view(*shape, spec.head_size),
            keys.view(*shape, spec.head_size),
            values.view(*shape, spec.head_size),
            attn_mask=None if bucket.mask is None else bucket.mask.to(query.dtype),
            scale=spec.scale,
        )
        output.copy_(attended.view(output.shape))
        return
    scores = _scores(query, keys, spec)
    if bucket.mask is not None:
        scores.view(*shape, bucket.length).add_(bucket.mask)
    weights = _shares(scores.view(-1, spec.num_heads, 1, bucket.length), spec).view(scores.shape)
    torch.bmm(weights.to(query.dtype), values, out=output)


def _needs_scores(spec: AttentionSpec) -> bool:
    """Whether something is done to scores that the fused operator does not know."""
    return spec.soft_cap is not None or spec.sinks is not None


def _scores(query: Tensor, keys: Tensor, spec: AttentionSpec) -> Tensor:
    """``[batch, rows, head_size]`` and ``[batch, length, head_size]`` to float32 ``[batch, rows, length]``, scaled and
    capped."""
    transposed = keys.transpose(1, 2)
    scores = torch.bmm(query, transposed)
    if query.dtype != torch.float32:
        # A product of 16-bit matrices sums in float32 but rounds its result to 16 bits, too coarse for large scores.
        # The second product finds what that rounding lost, which is cheap while the keys are still in the processor's
        # cache.
        lost = torch.baddbmm(scores, query, transposed, beta=-1)
        scores = scores.float().add_(lost)
    if spec.soft_cap is None:
        return scores.mul_(spec.scale)
    return scores.mul_(spec.scale / spec.soft_cap).tanh_().mul_(spec.soft_cap)


def _shares(scores: Tensor, spec: AttentionSpec) -> Tensor:
    """``[..., heads, rows, length]`` to how much of each row's attention goes where, the rest into sinks."""
    if spec.sinks is None:
        return torch.softmax(scores, -1)
    sinks = scores.new_tensor(spec.sinks)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]


def _attend_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    spec: AttentionSpec,
    chunk: PromptChunk,
    layer: LayerPlan,
    output: Tensor,
) -> None:
    rows = slice(chunk.start, chunk.end)
    queries = query[rows].transpose(0, 1)
    if chunk.gather is None:
        keys, values = key[rows].transpose(0, 1), value[rows].transpose(0, 1)
    else:
        keys = _gather(cache, 0, chunk.gather, layer.workspace, spec.num_kv_heads)
        values = _gather(cache, 1, chunk.gather, layer.workspace, spec.num_kv_heads)
    result = output[rows].transpose(0, 1)
    if not chunk.masked:
        result.copy_(_dot_product_attention(queries, keys, values, spec, None))
        return
    attention = _attention_by_scores if _needs_scores(spec) else _dot_product_attention
    for group in _row_groups(chunk, spec.window):
        if group.wide:
            bias = _wide_mask(chunk, group, spec, query)
        else:
            assert layer.mask is not None
            bias = layer.mask[-(group.last - group.first) :, layer.mask.shape[1] - (group.high - group.low) :]
        rows, seen = slice(group.first, group.last), slice(group.low - chunk.key_start, group.high - chunk.key_start)
        result[:, rows] = attention(queries[:, rows], keys[:, seen], values[:, seen], spec, bias)


class RowGroup(NamedTuple):
    """Query rows ``first <= row < last`` of a chunk with the positions ``low <= key < high`` that they can see.

    wide: each sees all of them that its window reaches, none just those up to its own.
    """

    first: int
    last: int
    low: int
    high: int
    wide: bool


def _row_groups(chunk: PromptChunk, window: int | None) -> Iterator[RowGroup]:
    """All rows of a chunk, in order."""
    pieces: list[tuple[int, int, int | None]] = []
    done = chunk.start
    for _, first, last, reach in chunk.wide:
        pieces += [(done, first, None), (first, last, reach)]
        done = last
    pieces.append((done, chunk.end, None))
    before = chunk.context - (chunk.end - chunk.start)
    for begin, end, wide_reach in pieces:
        for first in range(begin - chunk.start, end - chunk.start, ROWS_PER_MASK):
            last = min(first + ROWS_PER_MASK, end - chunk.start)
            low = 0 if window is None else max(0, before + first - window + 1)
            high = before + last if wide_reach is None else wide_reach
            yield RowGroup(first, last, low, high, wide_reach is not None)


def _wide_mask(chunk: PromptChunk, group: RowGroup, spec: AttentionSpec, query: Tensor) -> Tensor:
    """``[rows, positions]``, additive, for a group of wide rows: what its window does not reach is hidden."""
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
    """``[heads, rows, head_size]`` over ``[kv_heads, length, head_size]``; without a mask, causal from the start."""
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
    """The same with what the fused operator does not know."""
    heads, rows, size = query.shape
    grouped = query.reshape(spec.num_kv_heads, -1, size)
    scores = _scores(grouped, keys, spec).view(heads, rows, -1) + mask
    weights = _shares(scores, spec).to(query.dtype)
    return torch.bmm(weights.view(spec.num_kv_heads, -1, keys.shape[1]), values).view(heads, rows, size)


def _write(cache: LayerCache, which: int, new: Tensor, rows: Tensor) -> Tensor:
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


def _gather(cache: LayerCache, which: int, rows: Tensor, workspace: Tensor, batch: int) -> Tensor:
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


def _plan_layer(metadata: BatchMetadata, block_size: int, spec: AttentionSpec, dtype: torch.dtype) -> LayerPlan:
    heads = spec.num_kv_heads
    slots = metadata.slot_mapping
    device = slots.device
    first_row = (slots // block_size) * (heads * block_size) + slots % block_size
    write = (first_row[:, None] + torch.arange(heads, device=device) * block_size).view(-1)

    order, bounds = _bucket_decodes(metadata.host_context_lens[: metadata.num_decodes], device.type)
    buckets = [_plan_bucket(metadata, block_size, spec, order, start, end) for start, end in bounds]
    chunks = _plan_chunks(metadata, block_size, spec)
    gathers = [bucket.gather for bucket in buckets] + [chunk.gather for chunk in chunks if chunk.gather is not None]
    largest = max((len(gather) for gather in gathers), default=0)
    return LayerPlan(
        write,
        None if order is None else torch.tensor(order, device=device),
        buckets,
        chunks,
        _chunk_mask(chunks, spec, dtype, device),
        torch.empty(2, largest, block_size * spec.head_size, dtype=dtype, device=device),
    )


def _bucket_decodes(lengths: list[int], device_type: str) -> tuple[list[int] | None, list[tuple[int, int]]]:
    """Cut decodes into groups that are worth padding together.

    Returns the order that they are cut in, None if that is their own, and the bounds of each group.
    """
    if device_type != "cpu" or not lengths:
        return None, [(0, len(lengths))] if lengths else []
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    bounds, start, padding = [], 0, 0
    for i, sequence in enumerate(order):
        padding += lengths[order[start]] - lengths[sequence]
        if padding > BUCKET_COST:
            bounds.append((start, i))
            start, padding = i, 0
    if not bounds:
        return None, [(0, len(lengths))]
    return order, [*bounds, (start, len(lengths))]


def _plan_bucket(
    metadata: BatchMetadata, block_size: int, spec: AttentionSpec, order: list[int] | None, start: int, end: int
) -> DecodeBucket:
    tables = metadata.block_tables
    sequences = list(range(start, end)) if order is None else order[start:end]
    contexts = [metadata.host_context_lens[s] for s in sequences]
    starts = [0 if spec.window is None else max(0, c - spec.window) // block_size * block_size for c in contexts]
    # Whole blocks: the matrix product would first copy a slice of them.
    length = max(-(-(c - s) // block_size) for c, s in zip(contexts, starts, strict=True)) * block_size
    device = tables.device
    context = torch.tensor(contexts, device=device)[:, None]
    first = torch.tensor(starts, device=device)[:, None]

    columns = first // block_size + torch.arange(length // block_size, device=device)
    # Padding repeats the sequence's own last block: whatever another sequence left behind, it stays its own.
    columns = torch.minimum(columns, (context - 1) // block_size)
    rows = tables[start:end] if order is None else tables[torch.tensor(sequences, device=device)]
    blocks = rows.long().gather(1, columns)

    positions = first + torch.arange(length, device=device)
    seen = positions < context
    if spec.window is not None:
        seen &= positions >= context - spec.window
    mask = None
    if not seen.all():
        mask = torch.zeros(seen.shape, device=device).masked_fill_(~seen, float("-inf"))[:, None, None]
    return DecodeBucket(start, end, _cache_rows(blocks, spec.num_kv_heads), length, mask)


def _plan_chunks(metadata: BatchMetadata, block_size: int, spec: AttentionSpec) -> list[PromptChunk]:
    chunks = []
    start = metadata.num_decodes
    for sequence in range(metadata.num_decodes, len(metadata.query_lens)):
        length, context = metadata.query_lens[sequence], metadata.host_context_lens[sequence]
        key_start, gather = 0, None
        if length < context:
            oldest = 0 if spec.window is None else max(0, context - length - spec.window + 1)
            key_start = oldest // block_size * block_size
            blocks = metadata.block_tables[sequence, key_start // block_size : -(-context // block_size)]
            gather = _cache_rows(blocks.long()[None], spec.num_kv_heads)
        wide = tuple(rows for rows in metadata.wide if rows.sequence == sequence)
        past_window = spec.window is not None and context > spec.window
        masked = gather is not None or _needs_scores(spec) or past_window or bool(wide)
        chunks.append(PromptChunk(start, start + length, gather, key_start, context, masked, wide))
        start += length
    return chunks


def _chunk_mask(
    chunks: list[PromptChunk], spec: AttentionSpec, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """One mask that serves every masked chunk of a step."""
    masked = [chunk for chunk in chunks if chunk.masked]
    if not masked:
        return None
    rows = min(ROWS_PER_MASK, max(chunk.end - chunk.start for chunk in masked))
    groups = (group for chunk in masked for group in _row_groups(chunk, spec.window) if not group.wide)
    width = max((group.high - group.low for group in groups), default=0)
    age_of_query = torch.arange(rows - 1, -1, -1, device=device)[:, None]
    age_of_key = torch.arange(width - 1, -1, -1, device=device)
    hidden = age_of_key < age_of_query
    if spec.window is not None:
        hidden |= age_of_key - age_of_query >= spec.window
    return torch.zeros(rows, width, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def _cache_rows(blocks: Tensor, heads: int) -> Tensor:
    """``[sequences, blocks]`` to rows of ``[blocks * heads, ...]`` in the order sequence, head, block."""
    return (blocks[:, None] * heads + torch.arange(heads, device=blocks.device)[:, None]).reshape(-1)
