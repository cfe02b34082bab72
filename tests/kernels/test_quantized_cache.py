"""Keys and values in 8 bits: every backend and instruction set against float64 over what the cache stores."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.attending import CHUNKS, CPU, Chunk, attend, attention_specs
from tests.kernels.test_attention_backends import PLAIN
from tests.kernels.test_cpu_attention import DTYPES, HEAD_SIZES, SMOL, either_dtype
from tests.native import built
from tests.paged import BlockTables
from vlmserve.kernels.attention import AttentionBackend, AttentionContext, RotaryRows
from vlmserve.kernels.blocks import clear_blocks, copy_blocks
from vlmserve.kernels.cpu_attention import CpuAttention, unsupported_reason
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.layer_specs import AttentionSpec
from vlmserve.layers.rope import Rope, RopeTables, apply_rope

Kind = Callable[..., AttentionBackend]
native = partial(CpuAttention, cache_type="int8")
KINDS = {
    "torch": partial(TorchReference, cache_type="int8"),
    "torch, fp8": partial(TorchReference, cache_type="fp8"),
    "torch in small splits": partial(TorchReference, cache_type="int8", bucket_cost=20, gathered_elements=128),
    "native": pytest.param(native, marks=built),
}
every_backend = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, spec: AttentionSpec) -> None:
    if actual.dtype == torch.float32:
        # Queries and weights have 15 bits where they meet what has 8.
        tolerance = 5e-4 + 2e-5 * spec.head_size * spec.scale
        torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=1e-3)
    else:
        torch.testing.assert_close(actual.double(), expected, atol=0.02, rtol=0.01)


@built
@settings(max_examples=30, deadline=None)
@given(
    chunks=CHUNKS,
    spec=attention_specs(HEAD_SIZES, groups=8),
    block_size=st.sampled_from([8, 16, 32, 48]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
@example([(0, 1)], AttentionSpec(1, 1, 32, 1.0), 16, torch.bfloat16, 0)
@example([(31, 1), (32, 1), (33, 2)], AttentionSpec(40, 2, 128, 0.1), 16, torch.float32, 0)
@pytest.mark.usefixtures("isa")
def test_any_batch_equals_naive_attention_amid_nan_scales(
    chunks: list[Chunk], spec: AttentionSpec, block_size: int, dtype: torch.dtype, seed: int
) -> None:
    output, expected = attend(native(), chunks, spec, block_size, dtype, seed=seed)
    assert_close(output, expected, spec)


@built
@either_dtype
@pytest.mark.parametrize(
    "chunks", [[(700, 1)], [(900, 1), (3, 1)], [(0, 200), (400, 40), (12, 1)]], ids=["decode", "two", "mixed"]
)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.usefixtures("isa")
def test_long_ranges_equal_naive_attention(chunks: list[Chunk], window: int | None, dtype: torch.dtype) -> None:
    spec = AttentionSpec(9, 3, 64, 0.3, window)
    output, expected = attend(native(), chunks, spec, 16, dtype)
    assert_close(output, expected, spec)


@built
@pytest.mark.parametrize(("head_size", "block_size", "soft_cap"), [(64, 16, None), (80, 8, 5.0), (128, 24, None)])
@pytest.mark.usefixtures("isa")
def test_rows_around_blocks_equal_naive_attention(head_size: int, block_size: int, soft_cap: float | None) -> None:
    for group, chunks in ((1, [(30, 12), (31, 13), (250, 33)]), (3, [(0, 5), (257, 6), (15, 43)])):
        spec = AttentionSpec(2 * group, 2, head_size, head_size**-0.5, soft_cap=soft_cap)
        output, expected = attend(native(), chunks, spec, block_size, torch.bfloat16)
        assert_close(output, expected, spec)


@built
@pytest.mark.usefixtures("isa")
def test_the_largest_head_does_not_overflow() -> None:
    spec = AttentionSpec(2, 1, 512, 1e-3)
    blocks, backend = BlockTables([40], 16), native()
    cache = backend.allocate(blocks.num_blocks, 16, spec, torch.float32, CPU)
    metadata = blocks.metadata([(0, 0, 40)])
    signs = torch.where(torch.arange(512) % 3 == 0, -1.0, 1.0)
    query, key = signs.expand(40, 2, 512).contiguous(), signs.expand(40, 1, 512).contiguous()
    value = torch.arange(1, 41.0)[:, None, None].expand(40, 1, 512).contiguous()
    plan = backend.prepare(metadata, 16, [spec], torch.float32)
    output = backend.attend(query, key, value, AttentionContext(cache, spec, metadata, plan))
    # All scores are equal and as large as they can be.
    means = torch.arange(1, 41.0).cumsum(0) / torch.arange(1, 41.0)
    torch.testing.assert_close(output, means[:, None].expand(40, 1024), atol=1e-3, rtol=1e-3)


@every_backend
@settings(max_examples=40, deadline=None)
@given(chunks=CHUNKS, spec=attention_specs(), block_size=st.sampled_from([1, 3, 4, 16]))
def test_every_backend_equals_naive_attention(
    kind: Kind, chunks: list[Chunk], spec: AttentionSpec, block_size: int
) -> None:
    output, expected = attend(kind(), chunks, spec, block_size)
    assert_close(output, expected, spec)


@every_backend
@pytest.mark.parametrize("window", [None, 200])
def test_bidirectional_rows_equal_naive_attention(kind: Kind, window: int | None) -> None:
    spec = replace(PLAIN, window=window)
    output, expected = attend(
        kind(),
        [(3, 1), (0, 300), (300, 30)],
        spec,
        16,
        bidirectional=[[], [(0, 201, 202)], [(0, 5, 305)]],
    )
    assert_close(output, expected, spec)


@every_backend
@either_dtype
def test_stored_values_do_not_depend_on_chunks(kind: Kind, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    blocks = BlockTables([50, 20], 16)
    query, key, value = (torch.randn(50, heads, 64).to(dtype) for heads in (9, 3, 3))
    key[33] *= 1000  # A later token of a block may be far larger than those before it.
    stored = []
    for cuts in ([0, 50], [0, 1, 17, 18, 35, 50], list(range(51))):
        backend = kind()
        cache = backend.allocate(blocks.num_blocks, 16, SMOL, dtype, CPU)
        outputs = []
        for first, last in itertools.pairwise(cuts):
            # Beside another sequence, as long as it lasts.
            chunks = [(0, first, last - first), *([(1, 0, 20)] if first == 0 and last > 1 else [])]
            metadata = blocks.metadata(chunks)
            plan = backend.prepare(metadata, 16, [SMOL], dtype)
            rows = [
                torch.cat([x[first:last], x[:20]]) if len(chunks) > 1 else x[first:last] for x in (query, key, value)
            ]
            outputs.append(backend.attend(*rows, AttentionContext(cache, SMOL, metadata, plan))[: last - first])
        stored.append(([tensor[blocks.tables[0]] for tensor in cache.tensors], torch.cat(outputs)))
    for tensors, output in stored[1:]:
        assert all(torch.equal(one, other) for one, other in zip(tensors, stored[0][0], strict=True))
        tolerance = 1e-4 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(output, stored[0][1], atol=tolerance, rtol=tolerance)


@every_backend
def test_blocks_are_copied_and_cleared(kind: Kind) -> None:
    backend = kind()
    blocks = BlockTables([64], 16)
    source, target = (backend.allocate(blocks.num_blocks, 16, PLAIN, torch.float32, CPU) for _ in range(2))
    for tensor in (*source.tensors, *target.tensors):
        tensor.copy_(torch.randn(tensor.shape) * 50)
    first, second, third, fourth = blocks.tables[0]
    copy_blocks(source, target, torch.tensor([first, second]), torch.tensor([fourth, first]))
    assert len(source.tensors) == 3
    for copied, original in zip(target.tensors, source.tensors, strict=True):
        assert torch.equal(copied[fourth], original[first])
        assert torch.equal(copied[first], original[second])
    clear_blocks(target, torch.tensor([first, third]))
    assert not any(tensor[[first, third]].any() for tensor in target.tensors)
    assert all(tensor[second].any() for tensor in target.tensors)


@every_backend
@pytest.mark.parametrize(("block_size", "head_size"), [(16, 64), (8, 64), (24, 40)])
@either_dtype
def test_block_bytes_equal_the_estimate(kind: Kind, block_size: int, head_size: int, dtype: torch.dtype) -> None:
    backend, spec = kind(), AttentionSpec(4, 2, head_size, 1.0)
    cache = backend.allocate(5, block_size, spec, dtype, CPU)
    block_bytes = backend.block_bytes(block_size, spec, dtype)
    assert sum(tensor.nbytes for tensor in cache.tensors) == 5 * block_bytes
    if (block_size, head_size) == (16, 64):
        assert block_bytes == 2 * 16 * 2 * (64 + 4)


@every_backend
@either_dtype
def test_nans_stay_within_their_sequence(kind: Kind, dtype: torch.dtype) -> None:
    blocks, backend = BlockTables([20, 20], 16), kind()
    cache = backend.allocate(blocks.num_blocks, 16, SMOL, dtype, CPU)
    metadata = blocks.metadata([(0, 0, 20), (1, 0, 20)])
    query, key, value = (torch.randn(40, heads, 64).to(dtype) for heads in (9, 3, 3))
    value[3, 1, 5] = float("nan")
    key[23, 0, 1] = float("inf")
    plan = backend.prepare(metadata, 16, [SMOL], dtype)
    output = backend.attend(query, key, value, AttentionContext(cache, SMOL, metadata, plan)).view(40, 9, 64)
    assert output[3:20, 3:6].isnan().all()
    assert output[23:, :3].isnan().all()
    output[:20, 3:6] = 0
    output[20:, :3] = 0
    assert not output.isnan().any()


@built
@either_dtype
@pytest.mark.usefixtures("isa")
def test_turning_on_the_way_is_turning_before(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    blocks, backend = BlockTables([60], 16), native()
    metadata = blocks.metadata([(0, 0, 60)])
    plan = backend.prepare(metadata, 16, [SMOL], dtype)
    tables = RopeTables(Rope(1.0 / 1e4 ** (torch.arange(0, 64, 2) / 64)), torch.arange(60), 60, torch.float32)
    qkv = torch.randn(60, 15 * 64).to(dtype)
    heads = qkv.view(60, 15, 64)
    rotated = apply_rope(heads[:, :12].float(), tables).to(dtype)
    caches = [backend.allocate(blocks.num_blocks, 16, SMOL, dtype, CPU) for _ in range(2)]
    expected = backend.attend(
        rotated[:, :9], rotated[:, 9:], heads[:, 12:], AttentionContext(caches[0], SMOL, metadata, plan)
    )
    assert isinstance(backend, CpuAttention)
    actual = backend.attend_rotated(qkv, RotaryRows(*tables.rows), AttentionContext(caches[1], SMOL, metadata, plan))
    assert torch.equal(caches[0].values, caches[1].values)
    # What is rounded to one side here may be to the other one there.
    assert (caches[0].keys.int() - caches[1].keys.int()).abs().max() <= 1
    torch.testing.assert_close(actual, expected, atol=0.02, rtol=0.01)


@built
@either_dtype
@pytest.mark.usefixtures("isa")
def test_the_reference_gives_the_same(dtype: torch.dtype) -> None:
    chunks = [(300, 1), (17, 1), (0, 50), (64, 33)]
    output, _ = attend(native(), chunks, SMOL, 16, dtype)
    expected, _ = attend(TorchReference(cache_type="int8"), chunks, SMOL, 16, dtype)
    assert_close(output, expected.double(), SMOL)


@built
def test_odd_head_sizes_run_in_torch() -> None:
    spec = AttentionSpec(2, 2, 7, 1.0)
    assert "pairs" in str(unsupported_reason(spec, torch.float32, CPU, cache_type="int8"))
    assert unsupported_reason(spec, torch.float32, CPU) is None
    output, expected = attend(TorchReference(cache_type="int8"), [(5, 1), (3, 8)], spec, 16)
    assert_close(output, expected, spec)
