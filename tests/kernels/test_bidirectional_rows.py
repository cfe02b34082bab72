"""Images whose tokens attend to each other in both directions, compared with attention in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.attending import CPU
from tests.native import built
from tests.paged import BlockTables
from vlmserve.kernels import torch_reference
from vlmserve.kernels.attention import AttentionBackend, AttentionContext, BidirectionalRows
from vlmserve.kernels.cpu_attention import CpuAttention
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.layer_specs import AttentionSpec

every_backend = pytest.mark.parametrize("kind", [TorchReference, pytest.param(CpuAttention, marks=built)])

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=8, scale=0.5)
# Of each sequence: tokens in the cache before, new ones, and where its images lie.
SEQUENCES: list[tuple[int, int, list[tuple[int, int]]]] = [
    (9, 1, [(2, 6)]),
    (0, 20, [(0, 7), (9, 20)]),
    (6, 17, [(4, 12), (15, 16), (16, 20)]),
    (13, 11, [(3, 9)]),
]


def naive(query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, images: list[tuple[int, int]]) -> Tensor:
    """One sequence, ``[new, heads, head_size]`` over ``[context, kv_heads, head_size]``, row by row."""
    query, keys, values = query.double(), keys.double(), values.double()
    group = spec.num_heads // spec.num_kv_heads
    rows = []
    for place, row in enumerate(query, start=len(keys) - len(query)):
        last = next((end - 1 for start, end in images if start <= place < end), place)
        first = 0 if spec.window is None else max(0, place - spec.window + 1)
        heads = []
        for head, vector in enumerate(row):
            scores = keys[first : last + 1, head // group] @ vector * spec.scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            heads.append(scores.softmax(0) @ values[first : last + 1, head // group])
        rows.append(torch.cat(heads))
    return torch.stack(rows)


@every_backend
@pytest.mark.parametrize("window", [None, 3, 10])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("rows_per_mask", [4, 256])
def test_rows_attend_to_own_image_and_earlier_tokens(
    kind: type[AttentionBackend],
    window: int | None,
    soft_cap: float | None,
    rows_per_mask: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_reference, "ROWS_PER_MASK", rows_per_mask)
    torch.manual_seed(0)
    spec = replace(SPEC, window=window, soft_cap=soft_cap)
    backend = kind()
    contexts = [before + new for before, new, _ in SEQUENCES]
    blocks = BlockTables(contexts, 4)
    cache = backend.allocate(blocks.num_blocks, 4, spec, torch.float32, CPU)
    queries, keys, values = (
        [torch.randn(context, heads, spec.head_size) for context in contexts]
        for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    for past in (True, False):
        chunks = [(i, 0 if past else before, before if past else new) for i, (before, new, _) in enumerate(SEQUENCES)]
        chunks = sorted((chunk for chunk in chunks if chunk[2]), key=lambda chunk: chunk[2] > 1)
        metadata = blocks.metadata(chunks)
        bidirectional, row = [], 0
        for number, (i, before, new) in enumerate(chunks):
            for start, end in SEQUENCES[i][2]:
                first, last = max(start, before), min(end, before + new)
                if first < last:
                    bidirectional.append(BidirectionalRows(number, row + first - before, row + last - before, last))
            row += new
        metadata = replace(metadata, bidirectional=bidirectional)
        query, key, value = (
            torch.cat([tensors[i][before : before + new] for i, before, new in chunks])
            for tensors in (queries, keys, values)
        )
        output = backend.attend(
            query,
            key,
            value,
            AttentionContext(cache, spec, metadata, backend.prepare(metadata, 4, [spec], torch.float32)),
        )
    expected = [
        naive(query[before:], key, value, spec, images)
        for query, key, value, (before, _, images) in zip(queries, keys, values, SEQUENCES, strict=True)
    ]
    torch.testing.assert_close(output, torch.cat(expected).float(), atol=1e-5, rtol=1e-5)
