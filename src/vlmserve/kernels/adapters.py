"""LoRA (https://arxiv.org/abs/2106.09685), DoRA (https://arxiv.org/abs/2402.09353), X-LoRA
(https://arxiv.org/abs/2402.07148).
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
    """Rows ``first <= row < last`` that use one slot. last None: to the end."""

    first: int
    last: int | None
    slot: int


class RowSlots(NamedTuple):
    runs: Sequence[Run]
    slots: Tensor
    """int32 ``[rows]`` on the model's device, below 0 for no adapter. One element for all rows if `stride` is 0."""
    stride: int = 1


# decoding repeats the same requests
@lru_cache(maxsize=8)
def slots_of_rows(slots: tuple[int, ...], counts: tuple[int, ...]) -> tuple[Sequence[Run], np.ndarray]:
    """On the host. slots, counts: of each request."""
    rows = np.repeat(np.array(slots, np.int32), counts)
    borders = [0, *(np.flatnonzero(np.diff(rows)) + 1).tolist(), len(rows)]
    runs = [Run(a, b, int(rows[a])) for a, b in itertools.pairwise(borders) if a < b]
    return [run for run in runs if run.slot >= 0], rows


class AdapterRows:
    """Adapter slots of the batch's rows, for all layers.

    scalings: float32 ``[rows, columns]``, X-LoRA's weights of mixed adapters. unpacked: slots whose adapters replace
    weights or change matmuls that cannot pack changes; programs and graphs do not support them.
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
        """Launch kernels for `LinearAdapters.reserved` ranks, which cover every adapter that fits."""
        # so a captured graph finds the next step's scalings
        self._scalings = torch.empty(0, device=device)
        self.clear()

    @property
    def runs(self) -> Sequence[Run]:
        return self.rows.runs

    @property
    def active(self) -> bool:
        return bool(self.rows.runs)

    @property
    def has_unpacked(self) -> bool:
        return any(run.slot in self.unpacked for run in self.rows.runs)

    @property
    def layout(self) -> Hashable:
        """Launches depend on the maximum rank of each linear."""
        if self._layout is None:
            self._layout = tuple(self._ranks)
        return self._layout

    @property
    def fits_reserved(self) -> bool:
        """True if launches for reserved ranks compute all slots. X-LoRA also needs scalings."""
        return self.scalings is None and not self._beyond

    @contextmanager
    def reserving(self) -> Iterator[None]:
        self.reserves = True
        try:
            yield
        finally:
            self.reserves = False

    def add_product(self, reserved: int | None = None) -> int:
        """Return the linear's number."""
        self._ranks.append(None)
        self._reserved.append(reserved)
        return len(self._ranks) - 1

    def set_rank(self, product: int, rank: int | None) -> None:
        """rank: maximum padded rank."""
        self._ranks[product] = rank
        self._layout, reserved = None, self._reserved[product]
        fits = rank is None or (reserved is not None and rank <= reserved)
        (self._beyond.discard if fits else self._beyond.add)(product)

    def clear(self) -> None:
        self.use(self._none)

    def set_all(self, slot: int) -> None:
        """Below 0: no adapter."""
        if slot < 0:
            self.clear()
        else:
            self.use(RowSlots((Run(0, None, slot),), self._each[slot : slot + 1], 0))

    def set(self, slots: Sequence[int], counts: Sequence[int], scalings: Tensor | None = None) -> None:
        """slots, counts: see `slots_of_rows`."""
        runs, rows = slots_of_rows(tuple(slots), tuple(counts))
        self.use(RowSlots(runs, to_device(torch.from_numpy(rows), self.device)), scalings)

    def use(self, rows: RowSlots, scalings: Tensor | None = None, wanted: RowSlots | None = None) -> None:
        """scalings: copied. Trailing rows without any adapter may have none. wanted: slots of the rows that `narrow`
        selects.
        """
        self.rows, self._wanted = rows, wanted
        self.scalings = None if scalings is None else self._kept(scalings, len(rows.slots))

    def narrow(self, rows: Tensor) -> None:
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
    """``up @ down`` is added to rows ``start <= i < start + len(up)`` of a weight."""

    down: Tensor
    """``[rank, in_features]``."""
    up: Tensor
    """``[outputs, rank]``, multiplied by the scale."""
    start: int = 0
    columns: Tensor | None = None
    """int64 ``[rank]``: the column of `AdapterRows.scalings` that scales each output of `down`."""

    def to(self, dtype: torch.dtype, device: torch.device) -> LowRank:
        columns = None if self.columns is None else self.columns.to(device)
        return LowRank(self.down.to(device, dtype), self.up.to(device, dtype), self.start, columns)


@dataclass(frozen=True, slots=True)
class Change:
    """``y = factor * (W x + up (down x)) + shift``, before bias and activation."""

    parts: tuple[LowRank, ...] = ()
    factor: Tensor | None = None
    """float32 ``[out_features]``."""
    shift: Tensor | None = None
    weight: Tensor | None = None
    """Replaces the layer's weight."""
    bias: Tensor | None = None
    outputs: tuple[Tensor, Tensor] | None = None
    """int64 indices of outputs, and the weight rows that replace the layer's there."""

    @property
    def adds(self) -> bool:
        return bool(self.parts) or self.factor is not None or self.shift is not None

    @property
    def replaces(self) -> bool:
        return self.weight is not None or self.outputs is not None

    def with_inputs(self, order: Tensor) -> Change:
        """Replacement weights keep the original order.

        order: int64 ``[in_features]``, the old index of each new input.
        """
        return replace(self, parts=tuple(part._replace(down=part.down[:, order]) for part in self.parts))

    def to(self, dtype: torch.dtype, device: torch.device) -> Change:
        parts = tuple(part.to(dtype, device) for part in self.parts)
        factor, shift = (
            None if values is None else values.to(device, torch.float32) for values in (self.factor, self.shift)
        )
        weight, bias = (None if values is None else values.to(device, dtype) for values in (self.weight, self.bias))
        outputs = None if self.outputs is None else (self.outputs[0].to(device), self.outputs[1].to(device, dtype))
        return Change(parts, factor, shift, weight, bias, outputs)


@dataclass(frozen=True, slots=True)
class TableChange:
    low_rank: tuple[Tensor, Tensor] | None = None
    """``[count, rank]`` and ``[size, rank]``. The second includes the adapter's scale."""
    factor: Tensor | None = None
    """float32 ``[size]``."""
    rows: tuple[Tensor, Tensor] | None = None
    """int64 indices, and their replacement vectors."""
    weight: Tensor | None = None
    columns: Tensor | None = None
    """As in `LowRank`."""

    @property
    def num_bytes(self) -> int:
        tensors = [*(self.low_rank or ()), *(self.rows or ()), self.factor, self.weight, self.columns]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def apply(self, indices: Tensor, vectors: Tensor, scalings: Tensor | None = None) -> Tensor:
        """scalings: of these rows."""
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
    rank: int
    """The padded ranks of all `down` matrices together."""
    num_bytes: int
    words: Sequence[int]
    """Entries of `LinearAdapters.table`, valid while this object exists."""


@runtime_checkable
class ReservesRanks(Protocol):
    """A kernel that reads adapter ranks on the device, up to the rank at launch."""

    def reserved_rank(self, parts: int, rank: int) -> int:
        """Maximum rank of a packed change with at most `parts` parts of this rank."""
        ...


@runtime_checkable
class PacksChanges(Protocol):
    """A kernel that computes adapters. change_words: of each packed change."""

    change_words: int

    def pack_change(self, change: Change) -> PackedChange: ...


class PreparedChange(NamedTuple):
    change: Change
    """If `packed` is set, only what `packed` lacks."""
    packed: PackedChange | None
    """Parts, factor and shift, for a kernel that computes them."""

    @property
    def num_bytes(self) -> int:
        change = self.change
        tensors = [tensor for part in change.parts for tensor in part if isinstance(tensor, Tensor)]
        tensors += [one for one in (change.factor, change.shift, change.weight, change.bias) if one is not None]
        tensors += change.outputs or ()
        return sum(tensor.nbytes for tensor in tensors) + (0 if self.packed is None else self.packed.num_bytes)


class TableAdapters:
    def __init__(self, rows: AdapterRows) -> None:
        self._rows = rows
        self._changes: dict[int, TableChange] = {}

    def set(self, slot: int, change: TableChange | None) -> None:
        self._changes.pop(slot, None)
        if change is not None:
            self._changes[slot] = change

    def apply(self, indices: Tensor, vectors: Tensor) -> Tensor:
        """Change embeddings ``[rows, size]`` of `indices` in place."""
        for first, last, slot in self._rows.runs:
            if (change := self._changes.get(slot)) is not None:
                scalings = None if self._rows.scalings is None else self._rows.scalings[first:last]
                vectors[first:last] = change.apply(indices[first:last], vectors[first:last], scalings)
        return vectors


class LinearAdapters:
    """By slot.

    rank: the maximum packed rank, or the reserved rank while rows reserve. table: int64 ``[1 + slots * words]``, first
    the maximum rank, then each slot's words, 0 if nothing is packed.
    """

    def __init__(self, rows: AdapterRows, words: int = 1, reserved: int | None = None) -> None:
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
        return (bool(self._changes) or self._rows.reserves) and self._rows.active

    @property
    def replaces(self) -> bool:
        changes = (self._changes.get(run.slot) for run in self._rows.runs)
        return any(prepared is not None and prepared.change.replaces for prepared in changes)

    @property
    def num_slots(self) -> int:
        return self._rows.num_slots

    @property
    def row_slots(self) -> RowSlots:
        return self._rows.rows

    @property
    def scalings(self) -> Tensor | None:
        return self._rows.scalings

    def set(self, slot: int, prepared: PreparedChange | None) -> None:
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
        """In place. output: with bias, without activation."""
        inputs, outputs = x.reshape(-1, x.shape[-1]), output.view(-1, output.shape[-1])
        for first, last, slot in self._rows.runs:
            if (prepared := self._changes.get(slot)) is not None:
                scalings = None if self._rows.scalings is None else self._rows.scalings[first:last]
                _apply(prepared.change, inputs[first:last], outputs[first:last], bias, scalings)
        return output

    def replace(self, x: Tensor, residual: Tensor | None, output: Tensor, finish: Finish) -> Tensor:
        """Recompute rows with replaced weights, in place.

        output: the final result. finish: a matmul with the layer's epilogue.
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
    def __call__(self, weight: Tensor, bias: Tensor | None, x: Tensor, residual: Tensor | None) -> Tensor: ...


def _apply(change: Change, x: Tensor, output: Tensor, bias: Tensor | None, scalings: Tensor | None) -> None:
    """x: ``[rows, in_features]``. output: ``[rows, out_features]``, in place."""
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
    """Scale `down`'s output ``[rows, rank]``."""
    if columns is None:
        return inner
    assert scalings is not None, "rows of X-LoRA have scalings"
    return inner * scalings[:, columns].to(inner.dtype)
