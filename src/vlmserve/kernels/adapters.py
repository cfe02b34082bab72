"""What adapters change in layers, for rows of a batch that have one (LoRA: https://arxiv.org/abs/2106.09685, DoRA:
https://arxiv.org/abs/2402.09353, X-LoRA: https://arxiv.org/abs/2402.07148).

A model has a few slots for adapters. All its layers share one `AdapterRows`, which says which row of the batch that is
being computed has the adapter of which slot.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.kernels.transfers import to_device

CPU = torch.device("cpu")


class Run(NamedTuple):
    """Rows ``first <= row < last`` have the adapter of a slot; last None: all to the end."""

    first: int
    last: int | None
    slot: int


class RowSlots(NamedTuple):
    """Which row of a batch has the adapter of which slot.

    runs: of rows with an adapter. slots: int32 on the model's device, that of each row, below 0 for none; one for all
    rows if `stride` is 0.
    """

    runs: Sequence[Run]
    slots: Tensor
    stride: int = 1


# Steps that decode have the same requests again and again.
@lru_cache(maxsize=8)
def slots_of_rows(slots: tuple[int, ...], counts: tuple[int, ...]) -> tuple[Sequence[Run], np.ndarray]:
    """The runs and slots of `RowSlots`, on the host. slots, counts: of each request, its slot and the number of its
    rows."""
    rows = np.repeat(np.array(slots, np.int32), counts)
    borders = [0, *(np.flatnonzero(np.diff(rows)) + 1).tolist(), len(rows)]
    runs = [Run(a, b, int(rows[a])) for a, b in itertools.pairwise(borders) if a < b]
    return [run for run in runs if run.slot >= 0], rows


class AdapterRows:
    """Which rows of the batch that is being computed have which adapter.

    scalings: float32 ``[rows, columns]``, of the adapters that an X-LoRA adapter mixes; None: no row has one.
    unpacked: slots of adapters that change a decoder's layers beside kernels, which neither programs nor graphs know:
    they replace weights, or change products that pack no changes.
    """

    def __init__(self, num_slots: int, device: torch.device = CPU) -> None:
        self.num_slots, self.device = num_slots, device
        self.unpacked: set[int] = set()
        self._none = RowSlots((), torch.empty(0, dtype=torch.int32), 0)
        self._each = torch.arange(num_slots, dtype=torch.int32, device=device)
        self._ranks: list[int | None] = []
        self._reserved: list[int | None] = []
        self._beyond: set[int] = set()
        self._layout: tuple[int | None, ...] | None = None
        self.reserves = False
        """Kernels are launched for `LinearAdapters.reserved` ranks, which suit all adapters that fit."""
        # Scalings of all steps lie here, so that a captured step finds the next one's.
        self._scalings = torch.empty(0, device=device)
        self.clear()

    @property
    def runs(self) -> Sequence[Run]:
        """Of rows with an adapter."""
        return self.rows.runs

    @property
    def active(self) -> bool:
        """Whether any row has an adapter."""
        return bool(self.rows.runs)

    @property
    def has_unpacked(self) -> bool:
        """Whether any row has an adapter that is `unpacked`."""
        return any(run.slot in self.unpacked for run in self.rows.runs)

    @property
    def layout(self) -> Hashable:
        """What the kernels' launches depend on beside rows and scalings: the highest rank that each product has among
        all slots."""
        if self._layout is None:
            self._layout = tuple(self._ranks)
        return self._layout

    @property
    def fits_reserved(self) -> bool:
        """Launches for reserved ranks compute the adapters of all slots. X-LoRA needs scalings as well."""
        return self.scalings is None and not self._beyond

    @contextmanager
    def reserving(self) -> Iterator[None]:
        """Launch kernels for reserved ranks."""
        self.reserves = True
        try:
            yield
        finally:
            self.reserves = False

    def add_product(self, reserved: int | None = None) -> int:
        """Another product that has adapters. Returns its number. reserved: see `LinearAdapters`."""
        self._ranks.append(None)
        self._reserved.append(reserved)
        return len(self._ranks) - 1

    def set_rank(self, product: int, rank: int | None) -> None:
        """The highest rank of a product's adapters, as they are padded; None: it has none."""
        self._ranks[product] = rank
        self._layout, reserved = None, self._reserved[product]
        fits = rank is None or (reserved is not None and rank <= reserved)
        (self._beyond.discard if fits else self._beyond.add)(product)

    def clear(self) -> None:
        """No row has an adapter."""
        self.use(self._none)

    def set_all(self, slot: int) -> None:
        """All rows have the adapter of a slot; below 0: none."""
        if slot < 0:
            self.clear()
        else:
            self.use(RowSlots((Run(0, None, slot),), self._each[slot : slot + 1], 0))

    def set(self, slots: Sequence[int], counts: Sequence[int], scalings: Tensor | None = None) -> None:
        """As `use`. slots, counts: see `slots_of_rows`."""
        runs, rows = slots_of_rows(tuple(slots), tuple(counts))
        self.use(RowSlots(runs, to_device(torch.from_numpy(rows), self.device)), scalings)

    def use(self, rows: RowSlots, scalings: Tensor | None = None, wanted: RowSlots | None = None) -> None:
        """scalings: see the class, a copy of which is kept; rows without X-LoRA have some as well, except for the last
        ones without any adapter. wanted: of those rows to which `narrow` may narrow them; None: it is not called."""
        self.rows, self._wanted = rows, wanted
        self.scalings = None if scalings is None else self._kept(scalings, len(rows.slots))

    def narrow(self, rows: Tensor) -> None:
        """Of the rows that are used, the wanted ones alone are computed from here on. rows: int64, which these are."""
        assert self._wanted is not None
        self.use(self._wanted, None if self.scalings is None else self.scalings.index_select(0, rows))

    def _kept(self, scalings: Tensor, num_rows: int) -> Tensor:
        columns = scalings.shape[1]
        if (count := num_rows * columns) > len(self._scalings):
            self._scalings = torch.zeros(2 * count, device=self.device)
        kept = self._scalings[:count].view(num_rows, columns)
        kept[: len(scalings)].copy_(scalings)
        return kept


class LowRank(NamedTuple):
    """``up @ down`` is added to rows ``start <= i < start + len(up)`` of a weight.

    down: ``[rank, in_features]``. up: ``[outputs, rank]``, with the adapter's scale. columns: int64 ``[rank]``, the one
    of a row's `AdapterRows.scalings` by which each product with `down` is multiplied; None: by none.
    """

    down: Tensor
    up: Tensor
    start: int = 0
    columns: Tensor | None = None

    def to(self, dtype: torch.dtype, device: torch.device) -> LowRank:
        """The same for inputs of a type on a device."""
        columns = None if self.columns is None else self.columns.to(device)
        return LowRank(self.down.to(device, dtype), self.up.to(device, dtype), self.start, columns)


@dataclass(frozen=True, slots=True)
class Change:
    """What an adapter changes in a product: ``y = factor * (W x + up (down x)) + shift`` before bias and activation.

    factor, shift: float32 ``[out_features]``; None: 1 and 0. weight, bias: in place of the layer's own, all of it.
    outputs: int64 indices of outputs, and the rows of the weight in place of the layer's own there.
    """

    parts: tuple[LowRank, ...] = ()
    factor: Tensor | None = None
    shift: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    outputs: tuple[Tensor, Tensor] | None = None

    @property
    def adds(self) -> bool:
        """Whether it changes what the layer's own weight gives."""
        return bool(self.parts) or self.factor is not None or self.shift is not None

    @property
    def replaces(self) -> bool:
        """Whether rows of the weight are replaced."""
        return self.weight is not None or self.outputs is not None

    def with_inputs(self, order: Tensor) -> Change:
        """The same for inputs in another order, but for weights that are replaced: these take them as they come.

        order: int64 ``[in_features]``, which old one is each new one.
        """
        return replace(self, parts=tuple(part._replace(down=part.down[:, order]) for part in self.parts))

    def to(self, dtype: torch.dtype, device: torch.device) -> Change:
        """The same for inputs of a type on a device."""
        parts = tuple(part.to(dtype, device) for part in self.parts)
        factor, shift = (
            None if values is None else values.to(device, torch.float32) for values in (self.factor, self.shift)
        )
        weight, bias = (None if values is None else values.to(device, dtype) for values in (self.weight, self.bias))
        outputs = None if self.outputs is None else (self.outputs[0].to(device), self.outputs[1].to(device, dtype))
        return Change(parts, factor, shift, weight, bias, outputs)


@dataclass(frozen=True, slots=True)
class TableChange:
    """What an adapter changes in a table of embeddings.

    low_rank: ``[count, rank]`` and ``[size, rank]``, the second with the adapter's scale. factor: float32 ``[size]``;
    None: 1. rows: int64 indices, and the vectors that stand there. weight: in place of the whole table. columns: as in
    `LowRank`.
    """

    low_rank: tuple[Tensor, Tensor] | None = None
    factor: Tensor | None = None
    rows: tuple[Tensor, Tensor] | None = None
    weight: Tensor | None = None
    columns: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        tensors = [*(self.low_rank or ()), *(self.rows or ()), self.factor, self.weight, self.columns]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def apply(self, indices: Tensor, vectors: Tensor, scalings: Tensor | None = None) -> Tensor:
        """The vectors ``[rows, size]`` of those indices, changed. scalings: of these rows."""
        if self.weight is not None:
            vectors = F.embedding(indices, self.weight)
        if self.low_rank is not None:
            down, up = self.low_rank
            vectors = vectors + F.linear(_scaled(F.embedding(indices, down), self.columns, scalings), up)
        if self.factor is not None:
            vectors = (vectors * self.factor).to(vectors.dtype)
        if self.rows is not None:
            places, rows = self.rows
            found = indices[:, None] == places
            vectors = torch.where(found.any(1)[:, None], rows[found.int().argmax(1)], vectors)
        return vectors


class PackedChange(Protocol):
    """A `Change` as a product's kernel reads it.

    rank: of its first factors together, as they are padded. words: what the kernel finds of it in
    `LinearAdapters.table`, valid as long as this object.
    """

    rank: int
    num_bytes: int
    words: Sequence[int]


@runtime_checkable
class ReservesRanks(Protocol):
    """A `Product` whose kernel reads on the device which ranks adapters have, up to a rank that it is launched for."""

    def reserved_rank(self, parts: int, rank: int) -> int:
        """The highest rank of a packed change that has up to `parts` parts of that rank."""
        ...


@runtime_checkable
class PacksChanges(Protocol):
    """A `Product` whose kernel computes adapters. change_words: as many words each of its packed changes has."""

    change_words: int

    def pack_change(self, change: Change) -> PackedChange:
        """The parts, factor and shift of a change, for the kernel."""
        ...


class PreparedChange(NamedTuple):
    """A change as a layer takes it. packed: its parts, factor and shift, where the layer's kernel computes them; then
    `change` has the rest only."""

    change: Change
    packed: PackedChange | None

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        change = self.change
        tensors = [tensor for part in change.parts for tensor in part if isinstance(tensor, Tensor)]
        tensors += [one for one in (change.factor, change.shift, change.weight, change.bias) if one is not None]
        tensors += change.outputs or ()
        return sum(tensor.nbytes for tensor in tensors) + (0 if self.packed is None else self.packed.num_bytes)


class TableAdapters:
    """The adapters of a table of embeddings, by slot."""

    def __init__(self, rows: AdapterRows) -> None:
        self._rows = rows
        self._changes: dict[int, TableChange] = {}

    def set(self, slot: int, change: TableChange | None) -> None:
        """Put an adapter into a slot; None: empty it."""
        self._changes.pop(slot, None)
        if change is not None:
            self._changes[slot] = change

    def apply(self, indices: Tensor, vectors: Tensor) -> Tensor:
        """``[rows, size]``, a table's vectors at ``[rows]`` indices, with what adapters change. Overwrites them."""
        for first, last, slot in self._rows.runs:
            if (change := self._changes.get(slot)) is not None:
                scalings = None if self._rows.scalings is None else self._rows.scalings[first:last]
                vectors[first:last] = change.apply(indices[first:last], vectors[first:last], scalings)
        return vectors


class LinearAdapters:
    """The adapters of a product, by slot.

    rank: the highest of those that are packed; None: none is. While rows reserve: the reserved rank. table: int64
    ``[1 + slots * words]`` on the model's device, which kernels read: the highest rank, and the words of each slot's
    adapter, 0 where none is packed.
    """

    def __init__(self, rows: AdapterRows, words: int = 1, reserved: int | None = None) -> None:
        """words: of each adapter in the table, see `PacksChanges.change_words`. reserved: see `ReservesRanks`."""
        self._rows, self._words, self._reserved = rows, words, reserved
        self._number = rows.add_product(reserved)
        self._changes: dict[int, PreparedChange] = {}
        self._rank: int | None = None
        self.table = torch.zeros(1 + rows.num_slots * words, dtype=torch.int64, device=rows.device)

    @property
    def rank(self) -> int | None:
        return self._reserved if self._rows.reserves else self._rank

    @property
    def active(self) -> bool:
        """Whether any row of this batch may have a change."""
        return (bool(self._changes) or self._rows.reserves) and self._rows.active

    @property
    def replaces(self) -> bool:
        """Whether weights are replaced for any row of this batch."""
        changes = (self._changes.get(run.slot) for run in self._rows.runs)
        return any(prepared is not None and prepared.change.replaces for prepared in changes)

    @property
    def num_slots(self) -> int:
        """That the model has."""
        return self._rows.num_slots

    @property
    def row_slots(self) -> RowSlots:
        """Which rows have which adapter."""
        return self._rows.rows

    @property
    def scalings(self) -> Tensor | None:
        """`AdapterRows.scalings`."""
        return self._rows.scalings

    def set(self, slot: int, prepared: PreparedChange | None) -> None:
        """Put an adapter into a slot; None: empty it."""
        self._changes.pop(slot, None)
        if prepared is not None:
            self._changes[slot] = prepared
        packed = {place: one.packed for place, one in self._changes.items() if one.packed is not None}
        self._rank = max((one.rank for one in packed.values()), default=None)
        self._rows.set_rank(self._number, self._rank)
        nothing = [0] * self._words
        words = [packed[place].words if place in packed else nothing for place in range(self._rows.num_slots)]
        table = torch.tensor([self._rank or 0, *itertools.chain.from_iterable(words)])
        self.table.copy_(to_device(table, self._rows.device))

    def change(self, x: Tensor, output: Tensor, bias: Tensor | None) -> Tensor:
        """What a product gave for ``[..., in_features]``, its bias added and no activation, with what adapters change.
        Overwrites it."""
        inputs, outputs = x.reshape(-1, x.shape[-1]), output.view(-1, output.shape[-1])
        for first, last, slot in self._rows.runs:
            if (prepared := self._changes.get(slot)) is not None:
                scalings = None if self._rows.scalings is None else self._rows.scalings[first:last]
                _apply(prepared.change, inputs[first:last], outputs[first:last], bias, scalings)
        return output

    def replace(self, x: Tensor, residual: Tensor | None, output: Tensor, finish: Finish) -> Tensor:
        """The final result with rows and outputs recomputed whose weights are replaced. Overwrites it.

        finish: a product with the layer's epilogue.
        """
        for first, last, slot in self._rows.runs:
            if slot not in self._changes:
                continue
            change = self._changes[slot].change
            inputs = x.reshape(-1, x.shape[-1])[first:last]
            results = output.view(-1, output.shape[-1])[first:last]
            if change.weight is not None:
                added = None if residual is None else residual.reshape(-1, residual.shape[-1])[first:last]
                results.copy_(finish(change.weight, change.bias, inputs, added))
            if change.outputs is not None:
                places, weight = change.outputs
                results[:, places] = F.linear(inputs, weight).to(results.dtype)
        return output


class Finish(Protocol):
    """A product of rows with a weight and a bias, with a layer's epilogue and a residual."""

    def __call__(self, weight: Tensor, bias: Tensor | None, x: Tensor, residual: Tensor | None) -> Tensor: ...


def _apply(change: Change, x: Tensor, output: Tensor, bias: Tensor | None, scalings: Tensor | None) -> None:
    """x: ``[rows, in_features]``. output: ``[rows, out_features]``, in place. scalings: of these rows."""
    if change.factor is not None and bias is not None:
        output -= bias
    for down, up, start, columns in change.parts:
        inner = _scaled(F.linear(x, down), columns, scalings)
        output[:, start : start + len(up)] += F.linear(inner, up).to(output.dtype)
    if change.factor is not None:
        output *= change.factor
        if bias is not None:
            output += bias
    if change.shift is not None:
        output += change.shift


def _scaled(inner: Tensor, columns: Tensor | None, scalings: Tensor | None) -> Tensor:
    """``[rows, rank]`` products with a first factor, each multiplied with its column of the rows' scalings."""
    if columns is None:
        return inner
    assert scalings is not None, "rows of X-LoRA have scalings"
    return inner * scalings[:, columns].to(inner.dtype)
