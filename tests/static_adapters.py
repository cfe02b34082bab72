"""Adapters as kernels read them: those that the table's memory names, of the slots that the rows' memory holds."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

from torch import Tensor

from vlmserve.kernels.adapters import Change, LinearAdapters, PreparedChange
from vlmserve.kernels.operations import LinearKernel


class StaticChange:
    """A change under a number, which stands for its address. A `PackedChange`."""

    known: ClassVar[dict[int, StaticChange]] = {}
    numbers = itertools.count(1)

    def __init__(self, change: Change) -> None:
        self._change = change
        self.rank = sum(len(part.down) for part in change.parts)
        self.num_bytes = PreparedChange(change, None).num_bytes
        self.words = (next(self.numbers),)
        self.known[self.words[0]] = self

    def apply(self, x: Tensor, output: Tensor, bias: Tensor | None, scalings: Tensor | None) -> None:
        """See `LinearAdapters.change`, for one row."""
        change, own_bias = self._change, 0 if bias is None else bias
        output -= own_bias
        for down, up, start, columns in change.parts:
            inner = x @ down.T * (1 if columns is None or scalings is None else scalings[:, columns])
            output[:, start : start + len(up)] += inner @ up.T
        output *= 1 if change.factor is None else change.factor
        output += own_bias + (0 if change.shift is None else change.shift)


class Found:
    """What a table and the rows' slots say, in place of `LinearAdapters`."""

    active = True

    def __init__(self, adapters: LinearAdapters) -> None:
        self._adapters = adapters

    def change(self, x: Tensor, output: Tensor, bias: Tensor | None) -> Tensor:
        """See `LinearAdapters.change`, a row at a time."""
        inputs, outputs = x.reshape(-1, x.shape[-1]), output.view(-1, output.shape[-1])
        table, scalings = self._adapters.table.tolist(), self._adapters.scalings
        slots = self._adapters.row_slots.slots.expand(len(inputs)).tolist()
        for row, slot in enumerate(slots):
            if slot >= 0 and table[1 + slot]:
                own, of_row = slice(row, row + 1), None if scalings is None else scalings[row : row + 1]
                StaticChange.known[table[1 + slot]].apply(inputs[own], outputs[own], bias, of_row)
        return output


class StaticLinearKernel:
    """A product by torch whose adapters are found by addresses. A `LinearKernel` that packs changes."""

    change_words = 1

    def __init__(self, product: LinearKernel) -> None:
        self._product = product

    @property
    def num_bytes(self) -> int:
        return self._product.num_bytes

    def reserved_rank(self, parts: int, rank: int) -> int:
        """See `ReservesRanks`."""
        return parts * rank

    def pack_change(self, change: Change) -> StaticChange:
        """See `PacksChanges`."""
        return StaticChange(change)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        adapters: LinearAdapters | None = None,
    ) -> Tensor:
        """See `LinearKernel`."""
        found: Any = Found(adapters) if adapters is not None and adapters.active else None
        return self._product(x, residual, out, found)
