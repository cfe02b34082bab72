"""Adapters in products, beside float64, and rows without one as they are without any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.triton.test_products import KINDS, made
from vlmserve.kernels.activation import activation
from vlmserve.kernels.adapters import AdapterRows, Change, LinearAdapters, LowRank, PreparedChange
from vlmserve.kernels.triton import products
from vlmserve.kernels.triton.products import TritonLinearKernel, tiling

SLOTS = 4
OUT, INPUTS = 36, 96
WHOLE, QKV, HALVES = [(0, OUT)], [(0, 20), (20, 28), (28, OUT)], [(0, OUT // 2), (OUT // 2, OUT)]


def low_rank(spans: list[tuple[int, int]], ranks: list[int], scaled: int = 0) -> tuple[LowRank, ...]:
    """Parts of those outputs, in float16. scaled: columns of scalings that there are; 0: none."""
    return tuple(
        LowRank(
            (torch.randn(rank, INPUTS) / INPUTS**0.5).half(),
            (0.3 * torch.randn(stop - start, rank)).half(),
            start,
            torch.randint(0, scaled, (rank,)) if scaled else None,
        )
        for (start, stop), rank in zip(spans, ranks, strict=True)
    )


def dora(change: Change) -> Change:
    return Change(change.parts, 1 + 0.2 * torch.randn(OUT), 0.3 * torch.randn(OUT))


def adapted(
    product: TritonLinearKernel, changes: dict[int, Change], device: torch.device
) -> tuple[LinearAdapters, AdapterRows]:
    """The product's adapters by slot, packed, and the rows that they are about."""
    rows = AdapterRows(SLOTS, device)
    adapters = LinearAdapters(rows, product.change_words)
    for slot, change in changes.items():
        on_device = change.to(torch.float16, device)
        adapters.set(slot, PreparedChange(Change(), product.pack_change(on_device)))
    return adapters, rows


def expected(
    x: Tensor,
    weight: Tensor,
    slots: list[int],
    changes: dict[int, Change],
    bias: Tensor | None = None,
    scalings: Tensor | None = None,
) -> Tensor:
    """float64 ``[rows, OUT]``, before the activation."""
    sums = F.linear(x.double(), weight)
    for row, slot in enumerate(slots):
        if (change := changes.get(slot)) is None:
            continue
        for down, up, start, columns in change.parts:
            inner = down.double() @ x[row].double()
            if columns is not None and scalings is not None:
                inner *= scalings[row, columns].double()
            sums[row, start : start + len(up)] += up.double() @ inner
        if change.factor is not None and change.shift is not None:
            sums[row] = sums[row] * change.factor.double() + change.shift.double()
    return sums if bias is None else sums + bias.double()


def assert_near(result: Tensor, numbers: Tensor) -> None:
    """Within what rounding the inputs of second factors and the results to float16 makes of them."""
    torch.testing.assert_close(result.cpu().double(), numbers, atol=4e-3, rtol=4e-3)


CHANGES = {
    "one part": Change(low_rank(WHOLE, [5])),
    "merged projections": Change(low_rank(QKV, [3, 9, 17])),
    "one of merged projections": Change(low_rank(QKV[1:2], [4])),
    "parts that overlap": Change(low_rank([(0, 20), (10, OUT)], [4, 7])),
    "several parts of the same outputs": Change(low_rank([*HALVES, *HALVES], [2, 6, 3, 5])),
    "DoRA": dora(Change(low_rank(QKV, [4, 4, 4]))),
    "a shift alone": dora(Change()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_kind_of_change_equals_float64(device: torch.device, name: str) -> None:
    torch.manual_seed(0)
    weight, numbers = made("plain", OUT, INPUTS, device)
    bias, x, residual = torch.randn(OUT).half(), torch.randn(3, INPUTS).half(), torch.randn(3, OUT).half()
    product = TritonLinearKernel(weight, bias.to(device), dtype=torch.float16)
    adapters, rows = adapted(product, {1: CHANGES[name]}, device)
    slots = [1, -1, 1]
    rows.set(slots, [1] * 3)
    result = product(x.to(device), residual.to(device), adapters=adapters)
    assert_near(result, expected(x, numbers, slots, {1: CHANGES[name]}, bias) + residual.double())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("splits", [1, 2])
def test_mixed_adapter_rows_share_a_matmul(
    device: torch.device, kind: str, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(splits)
    by_shape = tiling
    monkeypatch.setattr(
        products, "tiling", lambda *shape, **gpu: by_shape(*shape, **gpu)._replace(splits=splits, inputs=32)
    )
    weight, numbers = made(kind, OUT, INPUTS, device)
    bias, x, residual = torch.randn(OUT).half(), torch.randn(8, INPUTS).half(), torch.randn(8, OUT // 2).half()
    gated: dict[str, Any] = {"dtype": torch.float16, "activation": "silu", "gated": True}
    product = TritonLinearKernel(weight, bias.to(device), **gated)
    changes = {0: Change(low_rank(HALVES, [4, 4])), 1: dora(Change(low_rank(HALVES[:1], [20]))), 3: dora(Change())}
    adapters, rows = adapted(product, changes, device)
    # No slot 2 is filled; the last row only pads a batch.
    slots = [3, 0, -1, 1, 0, 1, 2, -1]
    rows.set(slots, [1] * len(slots))
    result = product(x.to(device), residual.to(device), adapters=adapters)
    gate, up = expected(x, numbers, slots, changes, bias).chunk(2, -1)
    numbers = activation("silu")(gate) * up + residual.double()
    torch.testing.assert_close(result.cpu().double(), numbers, atol=1e-2, rtol=1e-2)
    plain = product(x.to(device), residual.to(device))
    unchanged = [row for row, slot in enumerate(slots) if slot in (-1, 2)]
    assert torch.equal(result[unchanged], plain[unchanged]), "as without adapters"
    rows.set(slots[3:4], [1])
    alone = product(x[3:4].to(device), residual[3:4].to(device), adapters=adapters)
    assert torch.equal(alone, result[3:4]), "whatever is beside it"


def test_many_rows_have_their_adapters_too(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base's product comes from the device's library then, with the bias."""
    monkeypatch.setattr(products, "MOST_ROWS", 8)
    torch.manual_seed(0)
    weight, numbers = made("plain", OUT, INPUTS, device)
    bias, x = torch.randn(OUT).half(), torch.randn(40, INPUTS).half()
    product = TritonLinearKernel(weight, bias.to(device), dtype=torch.float16, activation="relu")
    changes = {0: Change(low_rank(QKV, [4, 4, 4])), 2: dora(Change(low_rank(WHOLE, [6])))}
    adapters, rows = adapted(product, changes, device)
    slots = [0] * 15 + [-1] * 10 + [2] * 15
    rows.set([0, -1, 2], [15, 10, 15])
    result = product(x.to(device), adapters=adapters)
    torch.testing.assert_close(
        result.cpu().double(), expected(x, numbers, slots, changes, bias).relu(), atol=1e-2, rtol=1e-2
    )
    assert torch.equal(result[15:25], product(x.to(device))[15:25])


def test_rows_are_scaled_between_the_factors(device: torch.device) -> None:
    """The first slot's adapter mixes others by scalings of each row, the second one's does not."""
    torch.manual_seed(0)
    weight, numbers = made("plain", OUT, INPUTS, device)
    product = TritonLinearKernel(weight, dtype=torch.float16)
    changes = {
        0: Change(low_rank([*QKV, *QKV], [4, 4, 4, 2, 3, 2], scaled=5)),
        1: Change(low_rank(QKV, [4, 4, 4])),
    }
    adapters, rows = adapted(product, changes, device)
    slots = [0, 1, -1, 0, 1, 0]
    x, scalings = torch.randn(6, INPUTS).half(), torch.rand(6, 5)
    rows.set(slots, [1] * 6, scalings.to(device))
    result = product(x.to(device), adapters=adapters)
    assert_near(result, expected(x, numbers, slots, changes, scalings=scalings))


def test_all_rows_may_have_one_adapter(device: torch.device) -> None:
    torch.manual_seed(0)
    weight, numbers = made("plain", OUT, INPUTS, device)
    product = TritonLinearKernel(weight, dtype=torch.float16, float_output=True)
    changes = {2: Change(low_rank(WHOLE, [4]))}
    adapters, rows = adapted(product, changes, device)
    x = torch.randn(2, 3, INPUTS).half()
    rows.set_all(2)
    result = product(x.to(device), adapters=adapters)
    assert result.dtype == torch.float32
    assert_near(result.flatten(0, 1), expected(x.flatten(0, 1), numbers, [2] * 6, changes))


def test_reloaded_adapters_keep_their_address(device: torch.device) -> None:
    """A captured step reads the table's memory, so no other may take its place."""
    torch.manual_seed(0)
    weight, numbers = made("plain", OUT, INPUTS, device)
    product = TritonLinearKernel(weight, dtype=torch.float16)
    x, first = torch.randn(1, INPUTS).half(), Change(low_rank(WHOLE, [4]))
    adapters, rows = adapted(product, {1: first}, device)
    address, layout = adapters.table.data_ptr(), rows.layout
    rows.set([1], [1])
    before = product(x.to(device), adapters=adapters)
    second = Change(low_rank(WHOLE, [7]))
    adapters.set(1, PreparedChange(Change(), product.pack_change(second.to(torch.float16, device))))
    assert (adapters.table.data_ptr(), rows.layout) == (address, layout)
    result = product(x.to(device), adapters=adapters)
    assert_near(before, expected(x, numbers, [1], {1: first}))
    assert_near(result, expected(x, numbers, [1], {1: second}))
    adapters.set(
        0, PreparedChange(Change(), product.pack_change(Change(low_rank(WHOLE, [17])).to(torch.float16, device)))
    )
    assert rows.layout != layout, "a higher rank takes other launches"
    adapters.set(0, None)
    adapters.set(1, None)
    assert torch.equal(product(x.to(device), adapters=adapters), product(x.to(device)))
