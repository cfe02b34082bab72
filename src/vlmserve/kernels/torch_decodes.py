"""Attention of decodes in plain torch, with bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.kernels.attention import BatchMetadata, LayerCache
from vlmserve.kernels.torch_cache import cache_rows, gather
from vlmserve.kernels.torch_scores import attention_scores, attention_weights, needs_scores
from vlmserve.layer_specs import AttentionSpec

BUCKET_COST = 512
"""Cost of one more bucket on a CPU, in padding tokens: about ten operator calls compared with copying and multiplying
one token's keys and values."""
GATHERED_ELEMENTS = 2**25
"""Maximum elements of keys, and of values, to gather at once."""
FUSED_DECODES = 2
"""The fused operator is faster up to this many decodes."""


@dataclass(frozen=True, slots=True)
class KVSplit:
    blocks: Tensor
    """Cache rows of its blocks, by sequence, head and block."""
    length: int
    """Tokens, including padding."""
    mask: Tensor | None
    """float32 ``[sequences, 1, 1, length]``. None: no mask."""
    unused: Tensor | None
    """int64 indices of gathered rows after the end of a context. They are zeroed, because they may hold another
    request's NaN, and 0 * NaN is NaN. None: there are none."""

    def gather(self, cache: LayerCache, workspace: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[batch, length, head_size]``, in `workspace`."""
        gathered = gather(cache, 0, self.blocks, workspace, batch), gather(cache, 1, self.blocks, workspace, batch)
        if self.unused is not None:
            for tensor in gathered:
                tensor.view(-1, tensor.shape[2]).index_fill_(0, self.unused, 0)
        return gathered


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Decodes of similar length, padded to the longest.

    start, end: rows of the ordered decodes. splits: several for a single decode, as in flash-decoding
    (https://pytorch.org/blog/flash-decoding/).
    """

    start: int
    end: int
    splits: list[KVSplit]


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """order: sorted by length. None: unchanged."""

    order: Tensor | None
    buckets: list[DecodeBucket]

    @property
    def most_gathered(self) -> int:
        return max((len(split.blocks) for bucket in self.buckets for split in bucket.splits), default=0)


def plan_decodes(
    metadata: BatchMetadata, block_size: int, spec: AttentionSpec, column: int, *, bucket_cost: int,
    gathered_elements: int,
) -> DecodePlan:  # fmt: skip
    """See `BUCKET_COST` and `GATHERED_ELEMENTS`."""
    lens = metadata.host_context_lens[: metadata.num_decodes]
    order, bounds = split_by_length(lens, bucket_cost)
    most_blocks = max(1, gathered_elements // (spec.num_kv_heads * block_size * spec.head_size))
    buckets = []
    for start, end in bounds:
        sequences = range(start, end) if order is None else order[start:end]
        first = start
        for some in _cut_by_size(sequences, lens, spec, block_size, most_blocks):
            splits = list(_splits(metadata, block_size, spec, column, some, most_blocks))
            buckets.append(DecodeBucket(first, first + len(some), splits))
            first += len(some)
    ordered = None if order is None else torch.tensor(order, device=metadata.block_tables.device)
    return DecodePlan(ordered, buckets)


def split_by_length(lens: list[int], bucket_cost: int) -> tuple[list[int] | None, list[tuple[int, int]]]:
    """Return an order (None: unchanged), and the bounds of groups that are worth padding together."""
    if not lens:
        return None, []
    order = sorted(range(len(lens)), key=lens.__getitem__, reverse=True)
    bounds, start, padding = [], 0, 0
    for i, sequence in enumerate(order):
        padding += lens[order[start]] - lens[sequence]
        if padding > bucket_cost:
            bounds.append((start, i))
            start, padding = i, 0
    if not bounds:
        return None, [(0, len(lens))]
    return order, [*bounds, (start, len(lens))]


def _cut_by_size(
    sequences: Sequence[int], lens: list[int], spec: AttentionSpec, block_size: int, most_blocks: int
) -> Iterator[list[int]]:
    width = max(_num_blocks(lens[sequence], spec, block_size) for sequence in sequences)
    at_once = max(1, most_blocks // width)
    for first in range(0, len(sequences), at_once):
        yield list(sequences[first : first + at_once])


def _first_block(context: int, spec: AttentionSpec, block_size: int) -> int:
    return 0 if spec.window is None else max(0, context - spec.window) // block_size


def _num_blocks(context: int, spec: AttentionSpec, block_size: int) -> int:
    return -(-context // block_size) - _first_block(context, spec, block_size)


def _splits(
    metadata: BatchMetadata, block_size: int, spec: AttentionSpec, column: int, sequences: list[int], most_blocks: int
) -> Iterator[KVSplit]:
    """The matmul would copy partial blocks first."""
    device = metadata.block_tables.device
    contexts = [metadata.host_context_lens[sequence] for sequence in sequences]
    firsts = [_first_block(context, spec, block_size) for context in contexts]
    width = max(_num_blocks(context, spec, block_size) for context in contexts)
    context, first = (torch.tensor(values, device=device)[:, None] for values in (contexts, firsts))
    tables = metadata.block_tables[column][torch.tensor(sequences, device=device)].long()
    for begin in range(0, width, most_blocks):
        end = min(begin + most_blocks, width)
        columns = first + torch.arange(begin, end, device=device)
        # the first block is full unless it is also the last
        blocks = tables.gather(1, torch.where(columns <= (context - 1) // block_size, columns, first))
        length = (end - begin) * block_size
        used = [context - (block + begin) * block_size for block, context in zip(firsts, contexts, strict=True)]
        hidden = min(used) < length
        unused = _unused_rows(used, length, block_size, spec.num_kv_heads).to(device) if hidden else None
        if spec.window is not None:
            starts = [(block + begin) * block_size for block in firsts]
            hidden |= any(start < length_ - spec.window for start, length_ in zip(starts, contexts, strict=True))
        mask = None
        if hidden:
            positions = (first + begin) * block_size + torch.arange(length, device=device)
            seen = positions < context
            if spec.window is not None:
                seen &= positions >= context - spec.window
            mask = torch.zeros(seen.shape, device=device).masked_fill_(~seen, float("-inf"))[:, None, None]
        yield KVSplit(cache_rows(blocks, spec.num_kv_heads), length, mask, unused)


def _unused_rows(used: list[int], length: int, block_size: int, num_heads: int) -> Tensor:
    ends = [length if count < block_size else -(-count // block_size) * block_size for count in used]
    tokens, first, last = torch.arange(length), torch.tensor(used)[:, None], torch.tensor(ends)[:, None]
    unused = (tokens >= first) & (tokens < last)
    return unused[:, None].expand(-1, num_heads, -1).flatten().nonzero()[:, 0]


def attend_decodes(
    query: Tensor, cache: LayerCache, spec: AttentionSpec, plan: DecodePlan, workspace: Tensor, output: Tensor
) -> None:
    """Attend ``[decodes, heads, head_size]``, into the first rows of `output`.

    workspace: ``[2, cache rows, block_size * head_size]`` for the largest split.
    """
    count = query.shape[0]
    if plan.order is not None:
        query = query.index_select(0, plan.order)
    # [sequences * kv_heads, query heads of a group, head_size]
    grouped = query.reshape(count * spec.num_kv_heads, -1, spec.head_size)
    attended = output[:count] if plan.order is None else output.new_empty(count, *output.shape[1:])
    by_group = attended.view(grouped.shape)
    for bucket in plan.buckets:
        rows = slice(bucket.start * spec.num_kv_heads, bucket.end * spec.num_kv_heads)
        if len(bucket.splits) > 1:
            _attend_in_splits(grouped[rows], cache, spec, bucket, workspace, by_group[rows])
            continue
        [split] = bucket.splits
        keys, values = split.gather(cache, workspace, rows.stop - rows.start)
        _attend_at_once(grouped[rows], keys, values, spec, split, by_group[rows])
    if plan.order is not None:
        output.index_copy_(0, plan.order, attended)


def _attend_at_once(
    query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, split: KVSplit, output: Tensor
) -> None:
    """Attend ``[sequences * kv_heads, group, head_size]`` over ``[..., length, head_size]``, into `output`."""
    sequences = len(query) // spec.num_kv_heads
    if sequences <= FUSED_DECODES and not needs_scores(spec):
        shape = (sequences, spec.num_kv_heads, -1, spec.head_size)
        attended = F.scaled_dot_product_attention(
            query.view(shape),
            keys.view(shape),
            values.view(shape),
            attn_mask=None if split.mask is None else split.mask.to(query.dtype),
            scale=spec.scale,
        )
        output.copy_(attended.view(output.shape))
        return
    scores = _masked_scores(query, keys, spec, split)
    weights = attention_weights(scores.view(-1, spec.num_heads, 1, split.length), spec).view(scores.shape)
    torch.bmm(weights.to(query.dtype), values, out=output)


def _masked_scores(query: Tensor, keys: Tensor, spec: AttentionSpec, split: KVSplit) -> Tensor:
    scores = attention_scores(query, keys, spec)
    if split.mask is not None:
        scores.view(-1, spec.num_kv_heads, query.shape[1], split.length).add_(split.mask)
    return scores


def _attend_in_splits(
    query: Tensor, cache: LayerCache, spec: AttentionSpec, bucket: DecodeBucket, workspace: Tensor, output: Tensor
) -> None:
    """Attend one decode, ``[kv_heads, group, head_size]``, by the online softmax (https://arxiv.org/abs/1805.02867)."""
    shape = (*query.shape[:2], 1)
    if spec.sinks is None:
        largest = torch.full(shape, -torch.inf, device=query.device)
        total = torch.zeros(shape, device=query.device)
    else:
        largest = torch.tensor(spec.sinks, device=query.device).view(shape)
        total = torch.ones(shape, device=query.device)
    summed = torch.zeros(query.shape, device=query.device)
    for split in bucket.splits:
        keys, values = split.gather(cache, workspace, len(query))
        scores = _masked_scores(query, keys, spec, split)
        new_largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights = scores.sub_(new_largest).exp_()
        shrink = (largest - new_largest).exp_()
        total = total * shrink + weights.sum(-1, keepdim=True)
        summed = summed * shrink + torch.bmm(weights.to(query.dtype), values)
        largest = new_largest
    output.copy_(summed / total)
