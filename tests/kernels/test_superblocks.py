"""Products with GGUF's superblocks against the gguf package's weights, multiplied in float64."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.gguf_files import random_blocks
from tests.kernels.test_cpu_native import assert_close
from tests.native import built
from vlmserve.kernels.adapters import AdapterRows, Change, LinearAdapters, LowRank, PreparedChange
from vlmserve.kernels.cpu_native import PackedLinear
from vlmserve.kernels.extension import extension
from vlmserve.kernels.gguf_weight import SUPERBLOCK, GGUFRows, GGUFWeight
from vlmserve.kernels.isas import SUPERBLOCK_BYTES
from vlmserve.layers.cut import Cut, Share

KINDS = tuple(SUPERBLOCK_BYTES)
VALUE_BYTES = {
    10: slice(16, 80),
    11: slice(0, 96),
    12: slice(16, 144),
    13: slice(16, 176),
    14: slice(0, 192),
    23: slice(8, 136),
}
"""Where blocks of a kind have weights, without scales."""
Parts = list[tuple[int, int]]
"""The type and the outputs of each part of a weight."""


@pytest.fixture(autouse=True)
def _superblocks(isa: str) -> None:
    if not extension().has_superblocks():
        pytest.skip(f"{isa} has no integer products")


def make(parts: Parts, superblocks: int, seed: int = 0) -> GGUFWeight:
    rows = [
        torch.from_numpy(random_blocks((out, superblocks * SUPERBLOCK), GGMLQuantizationType(kind), seed + number))
        for number, (kind, out) in enumerate(parts)
    ]
    return GGUFWeight(
        tuple(GGUFRows(kind, raw.view(len(raw), superblocks, -1)) for (kind, _), raw in zip(parts, rows, strict=True))
    )


def rounded(x: Tensor) -> Tensor:
    """Inputs as kernels round them: the largest of each 256 becomes 127."""
    groups = x.float().view(len(x), -1, SUPERBLOCK)
    most = groups.abs().amax(-1, keepdim=True)
    # `127 / most` would be 127 times the reciprocal, which rounds twice.
    factor = torch.where(most > 0, torch.full_like(most, 127) / most, 0)
    return ((groups * factor).round().double() * (most / 127).double()).view(x.shape)


def assert_multiplies(linear: PackedLinear, weight: Tensor, rows: int, dtype: torch.dtype, seed: int) -> Tensor:
    x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(seed)).to(dtype)
    inputs = rounded(x)
    # Scales and minimums are multiplied apart.
    magnitude = inputs.abs() @ (weight.abs() + 0.3).double().T
    actual = linear(x)
    assert_close(actual, inputs @ weight.double().T, magnitude)
    return actual


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_products_equal_those_of_gguf(kind: int, dtype: torch.dtype) -> None:
    weight = make([(kind, 70)], 2)
    linear = PackedLinear(weight, dtype=dtype)
    for rows in (*range(1, 10), 33):
        assert_multiplies(linear, weight.dequantize(), rows, dtype, rows)


@built
@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_the_batch(kind: int) -> None:
    weight = make([(kind, 64)], 3)
    linear = PackedLinear(weight, dtype=torch.float32)
    x = torch.randn(97, 768, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in (2, 3, 5, 8, 97):
        assert torch.equal(linear(x[:rows]), alone[:rows])


@built
@pytest.mark.parametrize("byte", [0, 255])
@pytest.mark.parametrize("kind", KINDS)
def test_largest_superblock_sums_do_not_overflow(kind: int, byte: int) -> None:
    weight = make([(kind, 32)], 1)
    weight.parts[0].blocks[..., VALUE_BYTES[kind]] = byte
    signs = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, 1, 0, 0], [0, 0, -1, -1], [-1, 1, 1, -1]])
    x, plain = signs.repeat(4, SUPERBLOCK // 4), weight.dequantize().double()
    linear = PackedLinear(weight, dtype=torch.float32)
    for rows in (1, 3, len(x)):
        inputs = rounded(x[:rows])
        assert_close(linear(x[:rows]), inputs @ plain.T, inputs.abs() @ (plain.abs() + 0.3).T)


@built
@pytest.mark.parametrize("kind", KINDS)
def test_gates_biases_and_residuals_follow_the_product(kind: int) -> None:
    weight, generator = make([(kind, 88)], 1), torch.Generator().manual_seed(2)
    bias, residual = torch.randn(88, generator=generator), torch.randn(5, 44, generator=generator)
    x = torch.randn(5, SUPERBLOCK, generator=generator)
    linear = PackedLinear(weight, bias, dtype=torch.float32, activation="silu", gated=True)
    gate, up = (rounded(x) @ weight.dequantize().double().T + bias.double()).chunk(2, 1)
    expected = gate * gate.sigmoid() * up + residual.double()
    torch.testing.assert_close(linear(x, residual).double(), expected, atol=1e-5, rtol=1e-4)


@built
@pytest.mark.parametrize("parts", [[(12, 64), (14, 32)], [(14, 32), (10, 96), (13, 7)], [(11, 32), (12, 32)]])
def test_a_weight_has_outputs_of_several_types(parts: Parts) -> None:
    weight = make(parts, 2)
    linear = PackedLinear(weight, dtype=torch.float32)
    for rows in (1, 6):
        assert_multiplies(linear, weight.dequantize(), rows, torch.float32, 3)


@built
@pytest.mark.parametrize(("out", "gated"), [(64, False), (44, True)])
def test_weights_beside_each_other_need_no_copy(out: int, gated: bool) -> None:
    weights = [make([(12, out)], 2, seed) for seed in (0, 1)]
    x = torch.randn(5, 2 * SUPERBLOCK, generator=torch.Generator().manual_seed(6))
    apart, joined = (
        PackedLinear(join(weights), dtype=torch.float32, gated=gated)(x)
        for join in (GGUFWeight.beside, GGUFWeight.join)
    )
    assert torch.equal(apart, joined)


@built
def test_types_that_share_a_tile_are_rejected() -> None:
    for parts, gated in (([(12, 40), (14, 32)], False), ([(12, 32), (14, 32)], True)):
        with pytest.raises(ValueError, match="do not fill tiles"):
            PackedLinear(make(parts, 1), dtype=torch.float32, gated=gated)


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_embedding_rows_are_exact(kind: int, dtype: torch.dtype) -> None:
    weight = make([(kind, 64), (14, 39)], 2)
    ids = torch.randint(0, 103, (50,), generator=torch.Generator().manual_seed(4))
    expected = weight.dequantize()[ids]
    torch.testing.assert_close(
        PackedLinear(weight, dtype=dtype).rows(ids).float(), expected.to(dtype).float(), atol=1e-6, rtol=2**-8
    )


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_sums_of_their_adapters(dtype: torch.dtype) -> None:
    linear, rows = PackedLinear(make([(12, 64), (14, 32)], 1), dtype=dtype), AdapterRows(1)
    generator = torch.Generator().manual_seed(5)
    part = LowRank(torch.randn(5, 256, generator=generator) / 16, torch.randn(96, 5, generator=generator), 0)
    adapters = LinearAdapters(rows)
    adapters.set(0, PreparedChange(Change(), linear.pack_change(Change((part,)).to(dtype, torch.device("cpu")))))
    x = torch.randn(9, 256, generator=generator).to(dtype)
    plain = linear(x, adapters=adapters)
    rows.set([-1, 0, -1], [2, 5, 2])
    adapted = linear(x, adapters=adapters)
    assert torch.equal(adapted[[0, 1, 7, 8]], plain[[0, 1, 7, 8]])
    added = (x.float() @ part.down.T @ part.up.T)[2:7]
    torch.testing.assert_close(
        (adapted - plain)[2:7].float(), added, atol=1e-4 if dtype == torch.float32 else 0.1, rtol=0
    )


@built
def test_inputs_that_are_no_numbers_stay_so() -> None:
    x = torch.zeros(3, 512)
    x[1, 300], x[2, 7] = torch.nan, torch.inf
    y = PackedLinear(make([(12, 32)], 2), dtype=torch.float32)(x)
    assert torch.equal(y[0], torch.zeros(32))
    assert y[1:].isnan().all()


@built
def test_packed_weight_keeps_the_bits_of_the_file() -> None:
    for kind in KINDS:
        weight = make([(kind, 256)], 2)
        table = 8 * (256 // 32 + 1)
        assert weight.num_bytes < PackedLinear(weight, dtype=torch.float32).num_bytes <= weight.num_bytes + table + 63


part_lists = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 40)), min_size=1, max_size=4)


@given(part_lists, st.data())
@settings(max_examples=40, deadline=None)
def test_rows_and_columns_are_those_of_the_weight(parts: Parts, data: st.DataObject) -> None:
    weight = GGUFWeight.join([make([part], 3, seed) for seed, part in enumerate(parts)])
    plain = weight.dequantize()
    assert all(one.kind != other.kind for one, other in zip(weight.parts, weight.parts[1:], strict=False))
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(plain) - 1), min_size=1, max_size=50)))
    assert torch.equal(weight[rows].dequantize(), plain[rows])
    first, last = sorted(data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=2, unique=True)))
    columns = slice(first * SUPERBLOCK, last * SUPERBLOCK)
    cut = Cut(len(plain), ((0, len(plain)),), Share(columns.start, columns.stop, 768))
    own = cut.of_blocks(weight)
    assert own is not None
    assert torch.equal(own.dequantize(), plain[:, columns])
    assert weight.inputs(0, 128) is None
