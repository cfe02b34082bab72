"""Metadata of flat batches against a loop over tokens."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from vlmserve.kernels.attention import BatchMetadata


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
    assert metadata.slot_mapping.tolist() == slots
    assert metadata.query_starts.diff().tolist() == metadata.query_lens == [end - start for start, end in spans]
    assert metadata.context_lens.tolist() == metadata.host_context_lens == [end for _, end in spans]
    assert metadata.num_decodes == sum(end - start == 1 for start, end in spans)
    for row, table in zip(metadata.block_tables.tolist(), tables, strict=True):
        assert row == table + [0] * (len(row) - len(table))
