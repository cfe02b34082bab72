"""Runs all layers of a decoder in one native call (csrc/program.h)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from vlmserve.kernels.attention import RotaryRows
from vlmserve.kernels.cpu_record import ATTENTION, MULTIPLY, Operation
from vlmserve.kernels.extension import DTYPES, extension

INPUT, OUTPUT = range(2)
"""Buffers that are the caller's tensors."""


@dataclass(frozen=True, slots=True)
class CpuPlan:
    tensors: tuple[Tensor, ...]
    """Owners of the memory at `addresses`."""
    addresses: tuple[int, int, int, int, int]
    """Query starts, context lengths, block tables ``[columns, sequences, max_blocks]``, slots ``[columns, tokens]``,
    and, for windows, how many positions queries see ahead."""
    causal_contexts: int
    """Address of context lengths that end at the last query, for causal layers."""
    num_sequences: int
    num_tokens: int
    table_stride: int
    """Elements from one sequence's block table to the next."""
    column_stride: int
    """Elements from one column's block tables to the next."""
    threads: int
    states: tuple[int, ...]
    """Fields of csrc/table.h's `StateRows`, in memory of `BatchMetadata.states`."""

    def addresses_of(self, column: int, *, is_causal: bool) -> tuple[int, int, int, int, int]:
        starts, contexts, tables, slots, ahead = self.addresses
        if is_causal:
            contexts, ahead = self.causal_contexts, 0
        return starts, contexts, tables + 4 * column * self.column_stride, slots + 8 * column * self.num_tokens, ahead


class NotRecordable(Exception): ...


@dataclass(frozen=True, slots=True)
class RecordedRope:
    number: int
    size: int

    @property
    def rows(self) -> RecordedRope:
        return self


def _reject(*_: object, **__: object) -> NoReturn:
    raise NotRecordable("an operation of torch")


class Unknown:
    """Exists only when the program runs. reason: why layers cannot read it."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> NoReturn:
        raise NotRecordable(self._reason)


class Recorded:
    """A placeholder for ``[tokens, width]``, or for some columns.

    Layers run once with these. Native kernels, multiplications and column slices are recorded; other operations raise
    `NotRecordable`.
    """

    def __init__(self, recording: Recording, number: int, width: int, columns: slice | None = None) -> None:
        """columns: range within `width`; kernels for whole rows reject it."""
        self.recording, self.number, self._row_width = recording, number, width
        self.first, last, _ = (columns or slice(None)).indices(width)
        self.width = last - self.first

    def expect(self, width: int, dtype: torch.dtype, *, columns: bool = False) -> None:
        """Raise NotRecordable if a kernel cannot take this. columns: it accepts column slices."""
        if not columns and self.width != self._row_width:
            raise NotRecordable(f"{self.width} of {self._row_width} columns")
        if width != self.width or dtype != self.recording.dtype:
            raise NotRecordable(f"{self.width} features of {self.recording.dtype} where {width} of {dtype} are taken")

    def __getattr__(self, name: str) -> NoReturn:
        raise NotRecordable(f"an operation of torch ({name})")

    def __getitem__(self, key: Any) -> Any:
        """Record ``[:, first:last]``."""
        match key:
            case (slice(start=None, stop=None, step=None), slice(step=None) as columns):
                first, last, _ = columns.indices(self.width)
                columns = slice(self.first + first, self.first + last)
                return Recorded(self.recording, self.number, self._row_width, columns)
        raise NotRecordable("an operation of torch (__getitem__)")

    def __mul__(self, other: Any) -> Any:
        """By one element, or by equally many columns."""
        self.expect(self.width, self.recording.dtype)
        if isinstance(other, Recorded):
            other.expect(self.width, self.recording.dtype, columns=True)
            return self.recording.add(
                MULTIPLY, self, self.width, residual=other, first=other.first, in_features=self.width
            )
        if not isinstance(other, Tensor) or other.shape != (1,) or other.dtype != self.recording.dtype:
            raise NotRecordable("an operation of torch (__mul__)")
        return self.recording.add(MULTIPLY, self, self.width, weight=other.data.float(), in_features=self.width)

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
        if self.width == self._row_width:
            return self
        return self.recording.add(MULTIPLY, self, self.width, first=self.first, in_features=self.width)

    __torch_function__: Any = classmethod(_reject)
    __add__ = __radd__ = __rmul__ = __sub__ = __truediv__ = __neg__ = _reject


class Recording:
    """Records native calls that start from `input`, ``[tokens, width]``. Keeps weights, not caches."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._operations: list[Operation] = []
        self._widths = [width]
        self._kept: list[Tensor] = []
        self._plans: dict[tuple[int, ...], int] = {}
        self._num_ropes = 0

    @property
    def input(self) -> Tensor:
        return cast(Tensor, Recorded(self, 0, self._widths[0]))

    def keep(self, tensors: Iterable[Tensor]) -> None:
        self._kept += tensors

    def rope(self, size: int) -> RecordedRope:
        self._num_ropes += 1
        return RecordedRope(self._num_ropes - 1, size)

    def add(
        self,
        kind: int,
        source: Recorded,
        width: int,
        *,
        residual: Recorded | None = None,
        in_place: bool = False,
        **fields: Any,
    ) -> Tensor:
        """fields: of `Operation`, with tensors instead of addresses. in_place: overwrite the source."""
        for name, value in fields.items():
            if isinstance(value, Tensor):
                self._kept.append(value)
                fields[name] = value.data_ptr()
            elif value is None:
                fields[name] = 0
        target = source.number if in_place else len(self._widths)
        operation = Operation(kind, source.number, target, -1 if residual is None else residual.number, **fields)
        if kind == ATTENTION:
            names = "heads", "kv_heads", "head_size", "block_size", "window", "is_causal"
            shape = tuple(getattr(operation, name) for name in names)
            operation.plan = self._plans.setdefault(shape, len(self._plans))
        self._operations.append(operation)
        if not in_place:
            self._widths.append(width)
        return cast(Tensor, Recorded(self, operation.target, width))

    def finish(self, output: Tensor) -> Program:
        """Raises NotRecordable beyond the limits of programs."""
        assert isinstance(output, Recorded)
        output.expect(output.width, self.dtype)
        operations, widths = assign_buffers(self._operations, self._widths, output.number)
        native = extension()
        if len(widths) > native.max_buffers or len(self._plans) > native.max_plans or not operations:
            raise NotRecordable(f"{len(widths)} buffers and {len(self._plans)} kinds of attention")
        return Program(operations, widths, self.dtype, self._kept)


def assign_buffers(
    operations: Sequence[Operation], widths: Sequence[int], output: int
) -> tuple[list[Operation], list[int]]:
    """Reuse buffers after a value's last use. Returns operations and widths.

    Raises NotRecordable if an operation would overwrite the caller's input.
    """
    last_use = {}
    for index, operation in enumerate(operations):
        last_use[operation.source] = last_use[operation.residual] = index
    buffer_widths = [widths[0], widths[output]]
    places = {-1: -1, 0: INPUT}
    free: list[int] = []
    assigned = []
    for index, operation in enumerate(operations):
        width = widths[operation.target]
        over = {value for value in (operation.source, operation.residual) if last_use[value] == index}
        is_alike = operation.residual >= 0 and widths[operation.residual] == width
        if operation.target == operation.source:
            place = places[operation.source]
            over.discard(operation.source)
            if place == INPUT:
                raise NotRecordable("a change of the input")
        elif operation.target == output:
            place = OUTPUT
        elif is_alike and operation.residual in over - {operation.source} and places[operation.residual] > OUTPUT:
            # a result may overwrite its residual
            place = places[operation.residual]
            over.remove(operation.residual)
        else:
            place = next((number for number in free if buffer_widths[number] == width), len(buffer_widths))
            if place == len(buffer_widths):
                buffer_widths.append(width)
            else:
                free.remove(place)
        places[operation.target] = place
        free += [places[value] for value in over if places[value] > OUTPUT]
        source, residual = places[operation.source], places[operation.residual]
        copied = Operation.from_buffer_copy(operation)
        copied.source, copied.target, copied.residual = source, place, residual
        assigned.append(copied)
    return assigned, buffer_widths


class Program:
    def __init__(
        self, operations: Sequence[Operation], widths: Sequence[int], dtype: torch.dtype, kept: Sequence[Tensor]
    ) -> None:
        """kept: owners of the memory at the addresses."""
        self._program: Callable[..., None] = extension().program
        self._table = (Operation * len(operations))(*operations)
        self._widths = array("q", widths)
        self._dtype = dtype
        self._kept = kept

    def run(
        self,
        x: Tensor,
        ropes: Sequence[RotaryRows],
        plan: object,
        row_slots: Tensor | None = None,
        scalings: Tensor | None = None,
    ) -> Tensor:
        """Run all operations on ``[tokens, width]``.

        ropes: one for each recorded kind. row_slots: int32 ``[tokens]``, adapter slots, below 0 for none.
        """
        assert isinstance(plan, CpuPlan)
        expected = plan.num_tokens, self._widths[INPUT]
        if x.shape != expected or x.dtype != self._dtype:
            raise ValueError(f"{tuple(x.shape)} of {x.dtype} does not fit a program for {expected} of {self._dtype}")
        x = x.contiguous()
        output = torch.empty(plan.num_tokens, self._widths[OUTPUT], dtype=self._dtype)
        tables = array("q", [0 if tensor is None else tensor.data_ptr() for rows in ropes for tensor in rows])
        self._program(
            ctypes.addressof(self._table),
            self._widths.buffer_info()[0],
            x.data_ptr(),
            output.data_ptr(),
            tables.buffer_info()[0],
            *plan.addresses,
            plan.causal_contexts,
            *plan.states,
            0 if row_slots is None else row_slots.data_ptr(),
            0 if scalings is None else scalings.data_ptr(),
            0 if scalings is None else scalings.shape[1],
            len(self._table),
            len(self._widths),
            plan.num_sequences,
            plan.num_tokens,
            plan.table_stride,
            plan.column_stride,
            DTYPES[self._dtype],
            plan.threads,
        )
        return output
