"""Adapters in the native kernels' products, each instruction set against float64, and row for row the same alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.test_cpu_native import assert_close
from tests.native import built
from vlmserve.kernels.adapters import AdapterRows, Change, LinearAdapters, LowRank, PreparedChange
from vlmserve.kernels.cpu_native import PackedLinear
from vlmserve.quant.methods.rtn import round_to_nearest

pytestmark = [built, pytest.mark.usefixtures("isa")]

SLOTS = 3


def random_change(out: int, inputs: int, borders: list[int], ranks: list[int], random: torch.Generator) -> Change:
    """Low-rank changes of the outputs between borders, and a factor and a shift of all of them."""
    parts = []
    for start, stop, rank in zip([0, *borders], [*borders, out], ranks, strict=True):
        if rank and stop > start:
            down = torch.randn(rank, inputs, generator=random)
            parts.append(LowRank(down, 0.1 * torch.randn(stop - start, rank, generator=random), start))
    factor, shift = 1 + 0.1 * torch.randn(2, out, generator=random)
    return Change(tuple(parts), factor, shift)


def expected_sums(x: Tensor, weight: Tensor, slots: list[int], changes: dict[int, Change]) -> tuple[Tensor, Tensor]:
    """In float64, and what the absolute values would add up to.

    Between factors in bfloat16, sums are rounded to it where an instruction multiplies pairs: by 2^-8 of them at most,
    2^12 of the units that `assert_close` counts in.
    """
    between = 2**12 if x.dtype == torch.bfloat16 else 0
    x, weight = x.double(), weight.double()
    sums, magnitude = F.linear(x, weight), F.linear(x.abs(), weight.abs())
    for row, slot in enumerate(slots):
        if (change := changes.get(int(slot))) is None:
            continue
        for down, up, start, _ in change.parts:
            inner, most = F.linear(x[row], down.double()), F.linear(x[row].abs(), down.double().abs())
            sums[row, start : start + len(up)] += F.linear(inner, up.double())
            magnitude[row, start : start + len(up)] += F.linear(most + between * inner.abs(), up.double().abs())
        sums[row] = sums[row] * change.factor.double() + change.shift.double()
        magnitude[row] = magnitude[row] * change.factor.double().abs() + change.shift.double().abs()
    return sums, magnitude


@given(
    st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=30),
    st.integers(1, 60).map(lambda pairs: 2 * pairs),
    st.integers(1, 90),
    st.lists(st.integers(0, 20), min_size=3, max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 99),
)
@example([0] * 25, 40, 70, [17, 3, 0], torch.bfloat16, 0)
@example([0, 1, -1] * 37, 40, 70, [17, 3, 0], torch.float32, 0)
@settings(max_examples=40, deadline=None)
def test_rows_have_the_sums_of_their_adapters(slot_list, inputs, out, ranks, dtype, seed):
    random = torch.Generator().manual_seed(seed)
    borders = sorted(torch.randint(0, out + 1, (2,), generator=random).tolist())
    x = torch.randn(len(slot_list), inputs, generator=random).to(dtype)
    weight = torch.randn(out, inputs, generator=random).to(dtype)
    # The last slot stays empty.
    changes = {
        slot: random_change(out, inputs, borders, ranks[slot:] + ranks[:slot], random).to(dtype, torch.device("cpu"))
        for slot in range(SLOTS - 1)
    }
    product, rows = PackedLinear(weight), AdapterRows(SLOTS)
    adapters = LinearAdapters(rows)
    for slot, change in changes.items():
        adapters.set(slot, PreparedChange(Change(), product.pack_change(change)))
    rows.set(slot_list, [1] * len(slot_list))
    result = product(x, adapters=adapters)
    assert_close(result, *expected_sums(x, weight, slot_list, changes))
    for row, slot in enumerate(slot_list):
        rows.set_all(slot)
        assert torch.equal(product(x[row : row + 1], adapters=adapters)[0], result[row]), "whatever is beside it"


@given(st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=30), st.integers(0, 20), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_rows_are_scaled_between_the_factors(slot_list, rank, seed):
    """The first slot's adapter mixes others by scalings of each row, the second one's does not."""
    random = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(len(slot_list), 40, generator=random), torch.randn(70, 40, generator=random)
    scalings = torch.rand(len(slot_list), 5, generator=random)
    plain = Change(
        tuple(
            LowRank(torch.randn(rank + 3, 40, generator=random), torch.randn(35, rank + 3, generator=random), start)
            for start in (0, 35)
        )
    )
    columns = [torch.randint(0, 5, (rank + 3,), generator=random) for _ in plain.parts]
    mixed = Change(tuple(part._replace(columns=of) for part, of in zip(plain.parts, columns, strict=True)))
    product, rows = PackedLinear(weight), AdapterRows(SLOTS)
    adapters = LinearAdapters(rows)
    for slot, change in enumerate((mixed, plain)):
        adapters.set(slot, PreparedChange(Change(), product.pack_change(change)))
    rows.set(slot_list, [1] * len(slot_list), scalings)
    result = product(x, adapters=adapters)
    expected = F.linear(x.double(), weight.double())
    for row, slot in enumerate(slot_list):
        for part, of in zip(plain.parts if slot in (0, 1) else (), columns, strict=False):
            inner = part.down.double() @ x[row].double() * (scalings[row, of].double() if slot == 0 else 1)
            expected[row, part.start : part.start + 35] += part.up.double() @ inner
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=2e-3)
    for row in range(len(slot_list)):
        rows.set([slot_list[row]], [1], scalings[row : row + 1])
        assert torch.equal(product(x[row : row + 1], adapters=adapters)[0], result[row]), "whatever is beside it"
    by_torch = LinearAdapters(rows)
    for slot, change in enumerate((mixed, plain)):
        by_torch.set(slot, PreparedChange(change, None))
    rows.set(slot_list, [1] * len(slot_list), scalings)
    torch.testing.assert_close(by_torch.change(x, F.linear(x, weight), None), result, rtol=0, atol=2e-3)


@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_weights_of_few_bits_and_gates_have_adapters(bits, gated):
    """Compared with the same weight without bits, as torch computes it with the change merged."""
    random = torch.Generator().manual_seed(bits)
    weight = torch.randn(72, 64, generator=random)
    quantized = round_to_nearest(weight, bits=bits, group_size=32, symmetric=False) if bits else weight
    product, rows = PackedLinear(quantized, activation="silu", gated=gated), AdapterRows(1)
    parts = tuple(
        LowRank(torch.randn(5, 64, generator=random), torch.randn(36, 5, generator=random), start) for start in (0, 36)
    )
    adapters = LinearAdapters(rows)
    adapters.set(0, PreparedChange(Change(), product.pack_change(Change(parts))))
    x = torch.randn(9, 64, generator=random)
    plain = product(x, adapters=adapters)
    rows.set([-1, 0, -1, 0, -1], [1, 2, 1, 4, 1])
    adapted = product(x, adapters=adapters)
    assert torch.equal(adapted[[0, 3, 8]], plain[[0, 3, 8]])
    base = quantized.dequantize() if bits else weight
    sums = F.linear(x, base + torch.cat([part.up @ part.down for part in parts]))
    expected = F.silu(sums[:, :36]) * sums[:, 36:] if gated else F.silu(sums)
    # Inputs beside weights of few bits are rounded to some bits as well.
    tolerance = {0: 1e-4, 4: 0.03, 8: 1e-3}[bits]
    changed = [1, 2, 4, 5, 6, 7]
    assert ((adapted - expected)[changed].norm() / expected[changed].norm()) < tolerance
