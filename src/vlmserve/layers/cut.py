"""Shards of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vlmserve.kernels.gguf_weight import GGUFWeight
from vlmserve.kernels.quantized import QuantizedWeight


class Share(NamedTuple):
    """Rows or columns ``first <= i < last`` of `whole`."""

    first: int
    last: int
    whole: int


@dataclass(frozen=True, slots=True)
class Shard:
    rows: tuple[Share, ...]
    """The share of outputs of each projection."""
    columns: Share | None = None
    """The share of inputs; None: all."""
    parts: tuple[int, ...] | None = None
    """Number of `rows` entries in each tensor of a checkpoint; None: one."""

    def cuts(self, num_parts: int) -> list[Cut]:
        """One for each of `parts`, or for a single tensor."""
        parts = self.parts or (1,) * len(self.rows)
        if num_parts == 1:
            parts = (len(self.rows),)
        if num_parts != len(parts):
            raise ValueError(f"{len(parts)} projections are not in {num_parts} tensors")
        rows = iter(self.rows)
        return [self._cut([next(rows) for _ in range(count)]) for count in parts]

    def _cut(self, rows: Sequence[Share]) -> Cut:
        pieces, start = [], 0
        for share in rows:
            pieces.append((start + share.first, start + share.last))
            start += share.whole
        return Cut(start, tuple(pieces), self.columns)


@dataclass(frozen=True, slots=True)
class Cut:
    num_rows: int
    pieces: tuple[tuple[int, int], ...]
    columns: Share | None = None
    """None: all, as for vectors."""

    def whole_shape(self, own: torch.Size) -> list[int]:
        width = list(own[1:]) if self.columns is None or len(own) < 2 else [self.columns.whole]
        return [self.num_rows, *width]

    def narrowed(self, rows: Tensor) -> Tensor:
        if self.columns is None or rows.ndim < 2:
            return rows
        return rows[:, self.columns.first : self.columns.last]

    def of_blocks(self, weight: GGUFWeight) -> GGUFWeight | None:
        """None: the cut divides a block."""
        own = weight[torch.cat([torch.arange(first, last) for first, last in self.pieces])]
        return own if self.columns is None else own.inputs(self.columns.first, self.columns.last)

    def of(self, weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
        """Dequantize to float32 if the cut divides a group."""
        rows = torch.cat([torch.arange(first, last) for first, last in self.pieces])
        if isinstance(weight, Tensor):
            return self.narrowed(weight[rows.to(weight.device)])
        own = weight[rows.to(weight.values.device)]
        if self.columns is None:
            return own
        cut = own.inputs(self.columns.first, self.columns.last)
        return self.narrowed(own.dequantize()) if cut is None else cut
