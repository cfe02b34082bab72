"""What every attention backend of this machine must do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import psutil
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.attending import CHUNKS, CPU, Bidirectional, Chunk, attend, attention_specs, naive_attention
from tests.paged import BlockTables
from vlmserve.kernels.attention import AttentionBackend, AttentionContext, LayerCache
from vlmserve.kernels.blocks import clear_blocks, copy_blocks
from vlmserve.kernels.cpu_attention import CpuAttention
from vlmserve.kernels.extension import supported_isas
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.layer_specs import AttentionSpec
from vlmserve.memory import return_free_memory

BACKENDS = {
    "torch": TorchReference,
    "torch in small splits": partial(TorchReference, bucket_cost=20, gathered_elements=128),
    "native": pytest.param(
        CpuAttention,
        marks=pytest.mark.skipif(not supported_isas(), reason="the native kernels were not built: no C++ compiler"),
    ),
}
PLAIN = AttentionSpec(4, 2, 8, 8**-0.5)

Kind = Callable[[], AttentionBackend]

every_backend = pytest.mark.parametrize("kind", BACKENDS.values(), ids=BACKENDS)


@every_backend
@settings(max_examples=60, deadline=None)
@given(chunks=CHUNKS, spec=attention_specs(), block_size=st.sampled_from([1, 3, 4, 16]))
@example(chunks=[(0, 1)], spec=PLAIN, block_size=16)
@example(chunks=[(15, 1), (16, 1), (17, 1)], spec=PLAIN, block_size=16)
@example(chunks=[(0, 1), (0, 2), (5, 1), (5, 2)], spec=PLAIN, block_size=4)
def test_any_batch_equals_naive_attention(
    kind: Kind, chunks: list[Chunk], spec: AttentionSpec, block_size: int
) -> None:
    output, expected = attend(kind(), chunks, spec, block_size)
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-5)


@st.composite
def chunks_with_wide_rows(draw: st.DrawFn) -> tuple[list[Chunk], list[list[Bidirectional]]]:
    """Chunks, those of one token first, with up to two ranges of rows that see to the end of theirs or further."""
    chunks = sorted(draw(CHUNKS), key=lambda chunk: chunk[1] > 1)
    bidirectional: list[list[Bidirectional]] = []
    for before, new in chunks:
        edges = sorted(draw(st.sets(st.integers(0, new), max_size=4))) if new > 1 else []
        pairs = list(zip(edges[::2], edges[1::2], strict=False))
        bidirectional.append([(first, last, draw(st.integers(before + last, before + new))) for first, last in pairs])
    return chunks, bidirectional


@every_backend
@settings(max_examples=50, deadline=None)
@given(drawn=chunks_with_wide_rows(), spec=attention_specs(), block_size=st.sampled_from([1, 3, 4, 16]))
@example(drawn=([(0, 6)], [[(0, 6, 6)]]), spec=PLAIN, block_size=4)
@example(drawn=([(7, 1), (5, 9)], [[], [(0, 3, 8)]]), spec=PLAIN, block_size=4)
def test_bidirectional_rows_equal_naive_attention(
    kind: Kind,
    drawn: tuple[list[Chunk], list[list[Bidirectional]]],
    spec: AttentionSpec,
    block_size: int,
) -> None:
    chunks, bidirectional = drawn
    output, expected = attend(kind(), chunks, spec, block_size, bidirectional=bidirectional)
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-5)


@every_backend
def test_many_bidirectional_rows_equal_naive_attention(kind: Kind) -> None:
    output, expected = attend(
        kind(), [(3, 1), (0, 700), (300, 330)], PLAIN, 16, bidirectional=[[], [(0, 601, 602)], [(0, 5, 305)]]
    )
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-5)


@every_backend
@pytest.mark.parametrize(
    "spec", [PLAIN, AttentionSpec(4, 2, 8, 8**-0.5, window=100), AttentionSpec(4, 4, 8, 1.0, soft_cap=5.0)]
)
def test_long_chunks_equal_naive_attention(kind: Kind, spec: AttentionSpec) -> None:
    output, expected = attend(kind(), [(0, 265), (33, 517), (70, 1)], spec, 16)
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-5)


@every_backend
def test_decodes_of_very_different_lengths_equal_naive_attention(kind: Kind) -> None:
    chunks = [(length, 1) for length in (3, 900, 1, 450, 7, 899, 20, 460, 2, 30)]
    output, expected = attend(kind(), chunks, PLAIN, 16)
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-5)


@every_backend
@pytest.mark.parametrize(
    "chunks", [[(90, 1)] * 5, [(90, 1)], [(0, 40)], [(30, 20)]], ids=["decodes", "decode", "prompt", "chunk"]
)
def test_bfloat16_scores_are_as_exact_as_inputs(kind: Kind, chunks: list[Chunk]) -> None:
    spec = AttentionSpec(6, 2, 64, 1.0)
    output, expected = attend(kind(), chunks, spec, 16, torch.bfloat16, spread=1.7)
    # Scores are around 20: rounded to bfloat16 they would be off by 0.06, and weights by 6%.
    assert (output.double() - expected).abs().max() < 0.04
    assert (output.double() - expected).abs().mean() < 0.004


@every_backend
def test_layers_with_different_windows_share_a_step(kind: Kind) -> None:
    torch.manual_seed(0)
    blocks = BlockTables([20], 4)
    backend = kind()
    metadata = blocks.metadata([(0, 0, 20)])
    specs = [AttentionSpec(2, 1, 8, 0.5, window) for window in (None, 3, None)]
    plan = backend.prepare(metadata, 4, specs, torch.float32)
    for spec in specs:
        cache = backend.allocate(blocks.num_blocks, 4, spec, torch.float32, CPU)
        query, key, value = torch.randn(20, 2, 8), torch.randn(20, 1, 8), torch.randn(20, 1, 8)
        output = backend.attend(query, key, value, AttentionContext(cache, spec, metadata, plan))
        torch.testing.assert_close(output.double(), naive_attention(query, key, value, spec), atol=2e-5, rtol=1e-5)


def written(backend: AttentionBackend, blocks: BlockTables, seed: int) -> LayerCache:
    """A cache whose only sequence has been filled with random keys and values."""
    torch.manual_seed(seed)
    length = len(blocks.tables[0]) * blocks.block_size
    cache = backend.allocate(blocks.num_blocks, blocks.block_size, PLAIN, torch.float32, CPU)
    metadata = blocks.metadata([(0, 0, length)])
    query, key, value = torch.randn(length, 4, 8), torch.randn(length, 2, 8), torch.randn(length, 2, 8)
    plan = backend.prepare(metadata, blocks.block_size, [PLAIN], torch.float32)
    backend.attend(query, key, value, AttentionContext(cache, PLAIN, metadata, plan))
    return cache


@every_backend
def test_blocks_are_copied_and_cleared(kind: Kind) -> None:
    backend = kind()
    blocks = BlockTables([64], 16)
    source, target = written(backend, blocks, 1), written(backend, blocks, 2)
    first, second, third, fourth = blocks.tables[0]
    before = target.keys.clone(), target.values.clone()
    copy_blocks(source, target, torch.tensor([first, second]), torch.tensor([fourth, first]))
    for copied, original, old in ((target.keys, source.keys, before[0]), (target.values, source.values, before[1])):
        assert torch.equal(copied[fourth], original[first])
        assert torch.equal(copied[first], original[second])
        assert torch.equal(copied[second], old[second])
    copy_blocks(target, target, torch.tensor([first, fourth]), torch.tensor([fourth, first]))
    assert torch.equal(target.keys[first], source.keys[first]), "all are read before any is written"
    clear_blocks(target, torch.tensor([first, third]))
    assert not target.keys[[first, third]].any()
    assert not target.values[[first, third]].any()
    assert target.keys[second].any()


@every_backend
@pytest.mark.parametrize(("block_size", "head_size"), [(16, 64), (8, 64), (24, 40)])
def test_block_bytes_equal_the_estimate(kind: Kind, block_size: int, head_size: int) -> None:
    backend, spec = kind(), AttentionSpec(4, 2, head_size, 1.0)
    cache = backend.allocate(5, block_size, spec, torch.bfloat16, CPU)
    assert cache.keys.nbytes + cache.values.nbytes == 5 * backend.block_bytes(block_size, spec, torch.bfloat16)


@every_backend
def test_cache_memory_is_committed_when_written(kind: Kind) -> None:
    # An allocator that holds much free memory in one piece would clear and use it.
    freed = [np.ones(24 * 2**20, np.uint8) for _ in range(25)]
    kept = [bytes(5000) for _ in range(1000)]
    del freed
    return_free_memory()
    spec = AttentionSpec(2, 2, 64, 0.125)
    before = psutil.Process().memory_info().rss
    cache = kind().allocate(2**16, 16, spec, torch.float32, CPU)
    assert cache.keys.nbytes == 2**29
    assert not cache.keys[-1].any()
    assert psutil.Process().memory_info().rss - before < 2**27
    assert len(kept) == 1000
