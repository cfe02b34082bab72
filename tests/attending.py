"""Attention backends beside attention written out in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.paged import BlockTables
from vlmserve.kernels.attention import AttentionBackend, AttentionContext, BidirectionalRows, LayerCache
from vlmserve.layer_specs import AttentionSpec

Chunk = tuple[int, int]  # tokens in the cache before this step, new tokens

Bidirectional = tuple[int, int, int]  # first and last row of a chunk that see so many positions

CPU = torch.device("cpu")
CHUNKS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12) | st.just(1)), min_size=1, max_size=8)


def naive_attention(
    query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, bidirectional: Sequence[Bidirectional] = ()
) -> Tensor:
    """One sequence, ``[new, heads, head_size]`` over ``[context, kv_heads, head_size]``, in float64."""
    query, keys, values = query.double(), keys.double(), values.double()
    new, context, group = len(query), len(keys), spec.num_heads // spec.num_kv_heads
    scores = torch.einsum("qhd,khd->hqk", query, keys.repeat_interleave(group, 1)) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    age = torch.arange(context - new, context)[:, None] - torch.arange(context)
    hidden = age < 0 if spec.window is None else (age < 0) | (age >= spec.window)
    for first, last, reach in bidirectional:
        too_old = torch.zeros_like(age) if spec.window is None else age >= spec.window
        hidden[first:last] = (torch.arange(context) >= reach) | too_old[first:last]
    scores = scores.masked_fill(hidden, float("-inf"))
    if spec.sinks is not None:
        sinks = torch.tensor(spec.sinks).double()[:, None, None].expand(-1, new, 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1)).reshape(new, -1)


def as_stored(x: Tensor, cache: LayerCache) -> Tensor:
    """Keys or values ``[tokens, kv_heads, head_size]`` as a cache gives them back, in float64."""
    if cache.scales is None:
        return x.double()
    largest = x.float().abs().amax(-1, keepdim=True)
    most = 127 if cache.stored == "int8" else 448
    scaled = (x.float() * torch.full_like(largest, most).div_(largest)).double()
    # Float8 e4m3 has 4 significant bits, and multiples of 2^-9 below 2^-6.
    step = 1.0 if cache.stored == "int8" else torch.exp2(scaled.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return (scaled / step).round() * step * (largest / most).double()


def attend(
    backend: AttentionBackend,
    chunks: list[Chunk],
    spec: AttentionSpec,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    *,
    spread: float = 1.0,
    seed: int = 0,
    bidirectional: Sequence[Sequence[Bidirectional]] | None = None,
    device: torch.device = CPU,
    filled_by: AttentionBackend | None = None,
) -> tuple[Tensor, Tensor]:
    """The backend's output for a batch, on `device`, and the naive one, each ``[tokens, heads * head_size]``.

    bidirectional: of each chunk, those of one token first. filled_by: what writes the tokens of earlier steps into the
    cache, if not the backend; its caches are laid out alike. All that the cache holds beyond the sequences' own tokens
    is NaN, so reading it shows; of a quantized one, its scales are. The naive one reads keys and values as they are
    stored.
    """
    torch.manual_seed(seed)
    chunks = sorted(chunks, key=lambda chunk: chunk[1] > 1)
    contexts = [before + new for before, new in chunks]
    blocks = BlockTables(contexts, block_size, seed)
    cache = backend.allocate(blocks.num_blocks, block_size, spec, dtype, device)
    if cache.scales is None:
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
    else:
        cache.keys.fill_(77)
        cache.values.fill_(55)
        cache.scales.fill_(torch.nan)

    def random(heads: int) -> list[Tensor]:
        return [(torch.randn(context, heads, spec.head_size) * spread).to(dtype) for context in contexts]

    queries, keys, values = random(spec.num_heads), random(spec.num_kv_heads), random(spec.num_kv_heads)
    for new in (False, True):
        parts = [
            (i, before, count) if new else (i, 0, before) for i, (before, count) in enumerate(chunks) if new or before
        ]
        parts.sort(key=lambda part: part[2] > 1)
        if not parts:
            continue
        metadata = blocks.metadata(parts, device)
        if new and bidirectional is not None:
            starts = metadata.query_starts.tolist()
            rows_of = [
                (i, starts[i] + first, starts[i] + last, r) for i, w in enumerate(bidirectional) for first, last, r in w
            ]
            metadata = replace(metadata, bidirectional=[BidirectionalRows(*rows) for rows in rows_of])

        def rows(tensors: list[Tensor], parts: list[tuple[int, int, int]] = parts) -> Tensor:
            return torch.cat([tensors[i][before : before + count] for i, before, count in parts]).to(device)

        computing = backend if new or filled_by is None else filled_by
        plan = computing.prepare(metadata, block_size, [spec], dtype)
        output = computing.attend(
            rows(queries), rows(keys), rows(values), AttentionContext(cache, spec, metadata, plan)
        )
    expected = [
        naive_attention(q[before:], as_stored(k, cache), as_stored(v, cache), spec, seen)
        for (before, _), q, k, v, seen in zip(
            chunks, queries, keys, values, bidirectional or [()] * len(chunks), strict=True
        )
    ]
    return output.cpu(), torch.cat(expected)


@st.composite
def attention_specs(draw: st.DrawFn, head_sizes: tuple[int, ...] = (2, 6, 16, 32), groups: int = 4) -> AttentionSpec:
    """Any geometry; groups: up to how many query heads share a head of keys."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, groups))
    return AttentionSpec(
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_size=draw(st.sampled_from(head_sizes)),
        scale=draw(st.sampled_from([0.125, 0.5, 1.0])),
        window=draw(st.none() | st.integers(1, 20)),
        soft_cap=draw(st.none() | st.sampled_from([2.0, 30.0])),
    )
