"""Attention within images of several sizes, beside attention written out in float64."""

from __future__ import annotations

import pytest
import torch

from vlmserve.kernels.ranges import Ranges
from vlmserve.kernels.triton.encoder import MAX_HEAD_SIZE, TritonRanges, unsupported_reason
from vlmserve.models.vision.rotation import rotate_heads


@pytest.mark.parametrize(("heads", "size", "lengths"), [(2, 10, [5, 64, 1]), (1, 20, [5, 64, 140, 1])])
def test_rows_attend_to_those_of_their_range(device: torch.device, heads: int, size: int, lengths: list[int]) -> None:
    torch.manual_seed(heads)
    qkv = torch.randn(sum(lengths), 3 * heads * size)
    ours = TritonRanges(heads, size).attend(qkv.to(device), Ranges.of(lengths, device)).cpu()
    parts = []
    for rows in torch.split(qkv.double(), lengths):
        query, key, value = rows.view(len(rows), 3, heads, size).permute(1, 2, 0, 3)
        weights = (query @ key.transpose(1, 2) * size**-0.5).softmax(-1)
        parts.append((weights @ value).transpose(0, 1).flatten(1))
    torch.testing.assert_close(ours.double(), torch.cat(parts), atol=2e-6, rtol=1e-5)


def test_queries_and_keys_are_rotated_in_place(device: torch.device) -> None:
    torch.manual_seed(0)
    qkv, angles = torch.randn(7, 3 * 3 * 12), torch.randn(7, 1, 6)
    ours = TritonRanges(3, 12).rotate(qkv.clone().to(device), angles.cos().to(device), angles.sin().to(device)).cpu()
    assert torch.equal(ours[:, 72:], qkv[:, 72:])
    torch.testing.assert_close(
        ours.double(), rotate_heads(qkv.clone(), 3, angles.cos(), angles.sin()).double(), atol=1e-6, rtol=1e-6
    )


def test_ranges_of_several_batches_become_one(device: torch.device) -> None:
    parts = [[170, 3], [5], [64, 64]]
    joined = Ranges.join([Ranges.of(lengths, device) for lengths in parts])
    whole = Ranges.of([length for lengths in parts for length in lengths], device)
    assert joined.lengths == whole.lengths
    assert joined.block_rows == whole.block_rows == 128
    assert torch.equal(joined.blocks, whole.blocks)
    assert Ranges.join([Ranges.of(lengths, device) for lengths in parts[1:]]).block_rows == 64
    assert [tuple(run.shape) for run in whole.runs(torch.empty(306, 2))] == [
        (1, 170, 2),
        (1, 3, 2),
        (1, 5, 2),
        (2, 64, 2),
    ]


def test_what_the_kernels_cannot_do_has_a_reason() -> None:
    assert unsupported_reason(MAX_HEAD_SIZE, torch.bfloat16) is None
    assert unsupported_reason(MAX_HEAD_SIZE + 1, torch.bfloat16) == "a head of 129 elements is larger than 128"
    assert unsupported_reason(64, torch.float64) == "the kernels do not support torch.float64"
