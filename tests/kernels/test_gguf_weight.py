"""Blocks of GGUF files, packed as they are, against the same weights unpacked first."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType

from tests.gguf_files import random_blocks
from tests.native import built
from vlmserve.kernels.cpu_native import PackedLinear
from vlmserve.kernels.gguf_weight import GGUFRows, GGUFWeight
from vlmserve.kernels.isas import GROUP, GROUP_BLOCKS
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.models.gguf_blocks import UNPACK

pytestmark = [built, pytest.mark.usefixtures("isa")]


def make(kind: int, out: int, groups: int, seed: int = 0) -> GGUFRows:
    raw = torch.from_numpy(random_blocks((out, groups * GROUP), GGMLQuantizationType(kind), seed))
    return GGUFRows(kind, raw.view(out, groups, -1))


def unpacked(rows: GGUFRows) -> QuantizedWeight:
    bits, size, unpack = UNPACK[GGMLQuantizationType(rows.kind).name]
    values, scales, minimums = (part.flatten(1) for part in unpack(rows.blocks))
    return QuantizedWeight(bits, size, values, scales, minimums, is_coded=rows.kind == GGMLQuantizationType.IQ4_NL)


@pytest.mark.parametrize("out", [64, 74])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", GROUP_BLOCKS)
def test_packed_blocks_equal_packed_values(kind: int, gated: bool, out: int) -> None:
    rows = make(kind, out, 11)
    expected = PackedLinear(unpacked(rows), gated=gated)
    halves = tuple(GGUFRows(kind, part) for part in rows.blocks.chunk(2))
    for parts in ((rows,), halves) if gated else ((rows,),):
        found = PackedLinear(GGUFWeight(parts), gated=gated)
        assert torch.equal(found.packed, expected.packed)
        assert found.settings == expected.settings


def test_types_of_one_form_are_one_weight() -> None:
    rows = [make(gguf.GGMLQuantizationType.Q5_0, 32, 2), make(gguf.GGMLQuantizationType.Q8_0, 45, 2)]
    weight = GGUFWeight(tuple(rows))
    assert weight.fills_tiles
    expected = PackedLinear(QuantizedWeight.join([unpacked(part) for part in rows]))
    assert torch.equal(PackedLinear(weight).packed, expected.packed)


def test_types_of_two_forms_are_no_weight() -> None:
    weight = GGUFWeight((make(gguf.GGMLQuantizationType.Q4_0, 32, 2), make(gguf.GGMLQuantizationType.Q8_0, 32, 2)))
    assert not weight.fills_tiles
    with pytest.raises(ValueError, match="do not fill tiles"):
        PackedLinear(weight)
