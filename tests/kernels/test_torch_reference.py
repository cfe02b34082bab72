"""The reference backend against attention written out in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.paged import BlockTables
from vlmserve.kernels import torch_reference
from vlmserve.kernels.attention import AttentionSpec
from vlmserve.kernels.torch_reference import TorchReference

Chunk = tuple[int, int]  # tokens in the cache before this step, new tokens


def naive_attention(query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
    """One sequence, ``[new, heads, head_size]`` over ``[context, kv_heads, head_size]``, row by row in float64."""
    query, keys, values = query.double(), keys.double(), values.double()
    before = len(keys) - len(query)
    rows = []
    for i, row in enumerate(query):
        first = 0 if spec.window is None else max(0, before + i + 1 - spec.window)
        for head in range(spec.num_heads):
            kv_head = head // (spec.num_heads // spec.num_kv_heads)
            scores = keys[first : before + i + 1, kv_head] @ row[head] * spec.scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            rows.append(scores.softmax(0) @ values[first : before + i + 1, kv_head])
    return torch.stack(rows).view(len(query), -1)


def attend(
    chunks: list[Chunk], spec: AttentionSpec, block_size: int, dtype: torch.dtype = torch.float32, spread: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The backend's output for a batch and the naive one, each ``[tokens, heads * head_size]``.

    All that the cache holds beyond the sequences' own tokens is made of large numbers, so reading it shows.
    """
    torch.manual_seed(0)
    chunks = sorted(chunks, key=lambda chunk: chunk[1] > 1)
    contexts = [before + new for before, new in chunks]
    blocks = BlockTables(contexts, block_size)
    backend = TorchReference()
    cache = backend.allocate(blocks.num_blocks, block_size, spec, dtype, torch.device("cpu"))
    cache.keys.fill_(1e4)
    cache.values.fill_(1e4)

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
        metadata = blocks.metadata(parts)

        def rows(tensors: list[Tensor], parts: list[tuple[int, int, int]] = parts) -> Tensor:
            return torch.cat([tensors[i][before : before + count] for i, before, count in parts])

        plan = backend.prepare(metadata, block_size)
        output = backend.attend(rows(queries), rows(keys), rows(values), cache, spec, metadata, plan)
    expected = [
        naive_attention(q[before:], k, v, spec)
        for (before, _), q, k, v in zip(chunks, queries, keys, values, strict=True)
    ]
    return output, torch.cat(expected)


@st.composite
def specs(draw: st.DrawFn) -> AttentionSpec:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    return AttentionSpec(
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_size=draw(st.sampled_from([2, 6, 16, 32])),
        scale=draw(st.sampled_from([0.125, 0.5, 1.0])),
        window=draw(st.none() | st.integers(1, 20)),
        soft_cap=draw(st.none() | st.sampled_from([2.0, 30.0])),
    )


CHUNKS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12) | st.just(1)), min_size=1, max_size=8)
PLAIN = AttentionSpec(4, 2, 8, 8**-0.5)


@settings(max_examples=150, deadline=None)
@given(CHUNKS, specs(), st.sampled_from([1, 3, 4, 16]))
@example([(0, 1)], PLAIN, 16)
@example([(15, 1), (16, 1), (17, 1)], PLAIN, 16)
@example([(0, 1), (0, 2), (5, 1), (5, 2)], PLAIN, 4)
def test_any_batch_equals_naive_attention(chunks: list[Chunk], spec: AttentionSpec, block_size: int) -> None:
    output, expected = attend(chunks, spec, block_size)
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "spec", [PLAIN, AttentionSpec(4, 2, 8, 8**-0.5, window=100), AttentionSpec(4, 4, 8, 1.0, soft_cap=5.0)]
)
def test_chunks_longer_than_a_mask_equal_naive_attention(spec: AttentionSpec) -> None:
    rows = torch_reference.ROWS_PER_MASK
    output, expected = attend([(0, rows + 9), (33, 2 * rows + 5), (70, 1)], spec, 16)
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-5)


def test_decodes_of_very_different_lengths_equal_naive_attention() -> None:
    chunks = [(length, 1) for length in (3, 900, 1, 450, 7, 899, 20, 460, 2, 30)]
    output, expected = attend(chunks, PLAIN, 16)
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-5)


def test_decodes_are_padded_only_while_that_is_cheaper_than_another_bucket() -> None:
    cost = torch_reference.BUCKET_COST
    assert torch_reference._bucket_decodes([5, 9, 7], "cpu") == (None, [(0, 3)])
    order, bounds = torch_reference._bucket_decodes([5, cost + 10, 7, cost + 20], "cpu")
    assert (order, bounds) == ([3, 1, 2, 0], [(0, 2), (2, 4)])


@pytest.mark.parametrize(
    "chunks", [[(90, 1)] * 5, [(90, 1)], [(0, 40)], [(30, 20)]], ids=["decodes", "decode", "prompt", "chunk"]
)
def test_bfloat16_keeps_large_scores_as_exact_as_its_inputs(chunks: list[Chunk]) -> None:
    spec = AttentionSpec(6, 2, 64, 1.0)
    output, expected = attend(chunks, spec, 16, torch.bfloat16, spread=1.7)
    # Scores are around 20: rounded to bfloat16 they would be off by 0.06, and weights by 6%.
    assert (output.double() - expected).abs().max() < 0.04
    assert (output.double() - expected).abs().mean() < 0.004


def test_layers_with_different_windows_share_a_step() -> None:
    torch.manual_seed(0)
    blocks = BlockTables([20], 4)
    backend = TorchReference()
    metadata = blocks.metadata([(0, 0, 20)])
    plan = backend.prepare(metadata, 4)
    for window in (None, 3, None):
        spec = AttentionSpec(2, 1, 8, 0.5, window)
        cache = backend.allocate(blocks.num_blocks, 4, spec, torch.float32, torch.device("cpu"))
        query, key, value = torch.randn(20, 2, 8), torch.randn(20, 1, 8), torch.randn(20, 1, 8)
        output = backend.attend(query, key, value, cache, spec, metadata, plan)
        torch.testing.assert_close(output.double(), naive_attention(query, key, value, spec), atol=2e-5, rtol=1e-5)
