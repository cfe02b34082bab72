"""Metadata of flat batches against a loop over tokens."""

from __future__ import annotations

import itertools
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from tests.attending import CPU
from tests.native import built
from vlmserve.kernels.attention import AttentionBackend, AttentionContext, BatchMetadata
from vlmserve.kernels.cpu_attention import CpuAttention
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.layer_specs import AttentionSpec


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


def two_columns() -> tuple[BatchMetadata, list[BatchMetadata]]:
    """A batch with two columns and blocks of four tokens, and the batch with each column alone."""
    counts = [-(-end // 4) for _, end in SPANS]
    starts = [sum(counts[:row]) for row in range(len(counts))]
    ascending = [list(range(start, start + count)) for start, count in zip(starts, counts, strict=True)]
    descending = [[sum(counts) - block for block in table] for table in ascending]
    alone = [BatchMetadata.of_chunks(SPANS, tables, 4) for tables in (ascending, descending)]
    both = replace(
        alone[0],
        block_tables=torch.cat([one.block_tables for one in alone]),
        slot_mapping=torch.cat([one.slot_mapping for one in alone]),
    )
    return both, alone


@pytest.mark.parametrize("backend", [TorchReference, pytest.param(CpuAttention, marks=built)])
def test_layers_use_the_blocks_of_their_column(backend: type[AttentionBackend]) -> None:
    made, (both, alone) = backend(), two_columns()
    plan = made.prepare(both, 4, [WHOLE, WINDOWED], torch.float32)
    for spec, own in itertools.product((WHOLE, WINDOWED), alone):
        rows = [torch.randn(17, heads, 16) for heads in (4, 2, 2)]
        outputs = []
        for metadata, prepared in ((both, plan), (own, made.prepare(own, 4, [spec], torch.float32))):
            cache = made.allocate(16, 4, spec, torch.float32, CPU)
            torch.manual_seed(0)
            cache.keys.normal_()
            cache.values.normal_()
            context = AttentionContext(
                replace(
                    cache,
                    column=next(column for column, one in enumerate(alone) if one is own) if metadata is both else 0,
                ),
                spec,
                metadata,
                prepared,
            )
            outputs.append((made.attend(*rows, context), cache.keys))
        assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))
