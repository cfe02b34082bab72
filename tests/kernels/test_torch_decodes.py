"""Decodes in plain torch operations: how they are cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.attending import CPU, attend
from tests.paged import BlockTables
from vlmserve.kernels.attention import AttentionContext
from vlmserve.kernels.torch_decodes import plan_decodes, split_by_length
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.layer_specs import AttentionSpec

SPEC = AttentionSpec(4, 2, 8, 8**-0.5)
BLOCK = 16
ROW = SPEC.num_kv_heads * BLOCK * SPEC.head_size
"""Elements of a block of all heads."""


@pytest.mark.parametrize("lens", [[3000, 5, 7, 9], [500] * 40, [3000] * 3, list(range(1, 400, 7))])
@pytest.mark.parametrize("bucket_cost", [0, 512, 10**9])
def test_gathered_memory_is_bounded(lens: list[int], bucket_cost: int) -> None:
    blocks = BlockTables(lens, BLOCK)
    metadata = blocks.metadata([(number, length - 1, 1) for number, length in enumerate(lens)])
    plan = plan_decodes(metadata, BLOCK, SPEC, 0, bucket_cost=bucket_cost, gathered_elements=10 * ROW)
    assert plan.most_gathered <= 10 * SPEC.num_kv_heads
    covered = [number for bucket in plan.buckets for number in range(bucket.start, bucket.end)]
    assert covered == list(range(len(lens)))
    for bucket in plan.buckets:
        assert len(bucket.splits) == 1 or bucket.end - bucket.start == 1


def test_padding_costs_at_most_another_bucket() -> None:
    lens = [4000, *[16] * 60]
    blocks = BlockTables(lens, BLOCK)
    metadata = blocks.metadata([(number, length - 1, 1) for number, length in enumerate(lens)])
    plan = plan_decodes(metadata, BLOCK, SPEC, 0, bucket_cost=512, gathered_elements=2**30)
    gathered = sum(len(split.blocks) for bucket in plan.buckets for split in bucket.splits)
    assert gathered * BLOCK // SPEC.num_kv_heads <= sum(lens) + 512


def test_padding_is_cheaper_than_another_bucket() -> None:
    assert split_by_length([5, 9, 7], 512) == (None, [(0, 3)])
    order, bounds = split_by_length([5, 522, 7, 532], 512)
    assert (order, bounds) == ([3, 1, 2, 0], [(0, 2), (2, 4)])
    assert split_by_length([], 512) == (None, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("soft_cap", [None, 20.0])
def test_a_long_context_in_splits_equals_naive_attention(
    window: int | None, soft_cap: float | None, dtype: torch.dtype
) -> None:
    spec = replace(SPEC, window=window, soft_cap=soft_cap, scale=1.0)
    backend = TorchReference(gathered_elements=3 * ROW)
    output, expected = attend(backend, [(length, 1) for length in (700, 699, 41, 3)], spec, BLOCK, dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)


def test_sinks_do_not_depend_on_splits() -> None:
    spec = replace(SPEC, sinks=(1.0, -2.0, 5.0, 0.0))
    chunks = [(200, 1), (100, 1)]
    whole, _ = attend(TorchReference(), chunks, spec, BLOCK)
    in_splits, expected = attend(TorchReference(gathered_elements=2 * ROW), chunks, spec, BLOCK)
    torch.testing.assert_close(in_splits, whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(in_splits.double(), expected, atol=1e-5, rtol=1e-5)


def test_nans_reach_only_their_own_sequence() -> None:
    torch.manual_seed(0)
    blocks = BlockTables([100, 100], BLOCK)
    backend = TorchReference(gathered_elements=2 * ROW)
    cache = backend.allocate(blocks.num_blocks, BLOCK, SPEC, torch.float32, CPU)
    metadata = blocks.metadata([(0, 99, 1), (1, 99, 1)])
    query, key, value = torch.randn(2, 4, 8), torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    value[0, 0, 3] = torch.nan
    plan = backend.prepare(metadata, BLOCK, [SPEC], torch.float32)
    output = backend.attend(query, key, value, AttentionContext(cache, SPEC, metadata, plan))
    assert output[0].isnan().any()
    assert not output[1].isnan().any()
