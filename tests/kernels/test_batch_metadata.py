"""Metadata of flat batches against a loop over tokens."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from tests.attending import CPU
from tests.native import built
from vlmserve.kernels.attention import AttentionContext, BatchMetadata
from vlmserve.kernels.cpu_attention import CpuAttention
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.layer_specs import FULL, AttentionSpec


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=6), st.integers(1, 16), st.data()
)
def test_tokens_go_to_slots_of_their_sequence(
    chunks: list[tuple[int, int]], block_size: int, data: st.DataObject
) -> None:
    spans = sorted(((start, start + new) for start, new in chunks), key=lambda span: span[1] - span[0] > 1)
    counts = [-(-end // block_size) for _, end in spans]
    blocks = data.draw(st.permutations(range(sum(counts))))
    tables = [[blocks.pop() for _ in range(count)] for count in counts]
    metadata = BatchMetadata.of_chunks(spans, tables, block_size)
    slots = [
        table[token // block_size] * block_size + token % block_size
        for (start, end), table in zip(spans, tables, strict=True)
        for token in range(start, end)
    ]
    assert metadata.slot_mapping.tolist() == [slots]
    assert metadata.query_starts.diff().tolist() == metadata.query_lens == [end - start for start, end in spans]
    assert metadata.context_lens.tolist() == metadata.host_context_lens == [end for _, end in spans]
    assert metadata.num_decodes == sum(end - start == 1 for start, end in spans)
    for row, table in zip(metadata.block_tables[0].tolist(), tables, strict=True):
        assert row == table + [0] * (len(row) - len(table))


WINDOWED, WHOLE = AttentionSpec(4, 2, 16, 0.25, window=5), AttentionSpec(4, 2, 16, 0.25)
SPANS = [(19, 20), (2, 3), (8, 17), (0, 6)]


def two_groups() -> tuple[BatchMetadata, dict[AttentionSpec, BatchMetadata]]:
    """A batch of two groups with blocks of four tokens, and what it is to each group's layers."""
    counts = [-(-end // 4) for _, end in SPANS]
    starts = [sum(counts[:row]) for row in range(len(counts))]
    ascending = [list(range(start, start + count)) for start, count in zip(starts, counts, strict=True)]
    descending = [[sum(counts) - block for block in table] for table in ascending]
    whole, windowed = (BatchMetadata.of_chunks(SPANS, tables, 4) for tables in (ascending, descending))
    both = replace(
        whole,
        block_tables=torch.cat([whole.block_tables, windowed.block_tables]),
        slot_mapping=torch.cat([whole.slot_mapping, windowed.slot_mapping]),
        groups=(FULL, WINDOWED.group),
    )
    return both, {WHOLE: whole, WINDOWED: windowed}


def test_layers_use_the_blocks_of_their_group() -> None:
    backend, (both, alone) = TorchReference(), two_groups()
    plan = backend.prepare(both, 4, [WHOLE, WINDOWED], torch.float32)
    for spec, own in alone.items():
        rows = [torch.randn(17, heads, 16) for heads in (4, 2, 2)]
        outputs = []
        for metadata, prepared in ((both, plan), (own, backend.prepare(own, 4, [spec], torch.float32))):
            cache = backend.allocate(16, 4, spec, torch.float32, CPU)
            torch.manual_seed(0)
            cache.keys.normal_()
            cache.values.normal_()
            outputs.append((backend.attend(*rows, AttentionContext(cache, spec, metadata, prepared)), cache.keys))
        assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))


@built
def test_native_attention_rejects_several_groups() -> None:
    with pytest.raises(ValueError, match="too many values"):
        CpuAttention().prepare(two_groups()[0], 4, [WHOLE, WINDOWED], torch.float32)
