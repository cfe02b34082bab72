"""Adapters of products as the native kernels read them (csrc/table.h: `Adapter`)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vlmserve.kernels.extension import DTYPES, extension
from vlmserve.layers.adapters import Change

TILE = 32
"""Output features that lie together in a packed weight; of a gated one, half are gates."""
PANEL = 16
"""Those of them that a kernel reads together."""


class NativeChange:
    """A `PackedChange`. rank: of all first factors together, rounded up to whole panels."""

    def __init__(self, change: Change, order: Tensor, in_features: int, dtype: torch.dtype) -> None:
        """order: int64 ``[panels * 16]``, the outputs in the order of the packed weight's tiles, below 0 where there is
        none. dtype: of inputs."""
        self.rank = -(-sum(len(part.down) for part in change.parts) // PANEL) * PANEL
        self._down = _pack_down(change, self.rank, in_features, dtype)
        panels = list(_pack_up(change, order, dtype))
        self._weights = [weights for _, weights, _, _ in panels]
        starts = torch.zeros(len(order) // PANEL + 1, dtype=torch.int64)
        for panel, _, _, _ in panels:
            starts[panel + 1] += 1
        self._starts = starts.cumsum(0)
        entries = [[weights.data_ptr(), first, count] for _, weights, first, count in panels]
        self._panels = torch.tensor(entries, dtype=torch.int64).view(-1, 3)
        self._factor = self._shift = None
        if change.factor is not None or change.shift is not None:
            self._factor = _in_order(change.factor, order, 1.0)
            self._shift = _in_order(change.shift, order, 0.0)
        self._columns = _columns(change, self.rank)
        fields = [self._down, self.rank, self._starts, self._panels, self._factor, self._shift, self._columns]
        words = [0 if field is None else field if isinstance(field, int) else field.data_ptr() for field in fields]
        self._struct = torch.tensor(words, dtype=torch.int64)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        tensors = [self._down, self._factor, self._shift, self._starts, self._panels, self._struct, self._columns]
        tensors += self._weights
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def address(self) -> int:
        """Of the kernels' `Adapter`, valid as long as this object."""
        return self._struct.data_ptr()


def outputs_in_tiles(out_features: int, *, gated: bool) -> Tensor:
    """int64 ``[panels * 16]``: which output lies where in a packed weight, -1 where none does."""
    features, each = (out_features // 2, PANEL) if gated else (out_features, TILE)
    tiles = -(-features // each)
    columns = torch.arange(tiles * each).view(tiles, each)
    columns = torch.where(columns < features, columns, -1)
    if gated:
        columns = torch.cat((columns, torch.where(columns < 0, -1, columns + features)), 1)
    return columns.flatten()


def _pack_down(change: Change, rank: int, in_features: int, dtype: torch.dtype) -> Tensor | None:
    """First factors, one below the other, as `pack` arranges a plain weight."""
    if not rank:
        return None
    plain = torch.zeros(rank, in_features, dtype=dtype)
    down = torch.cat([part.down.to(dtype) for part in change.parts])
    plain[: len(down)] = down
    packed = torch.empty(-(-rank // TILE) * TILE * in_features, dtype=dtype)
    extension().pack(plain.data_ptr(), packed.data_ptr(), rank, in_features, DTYPES[dtype], 0, torch.get_num_threads())
    return packed[: rank * in_features].clone()


def _columns(change: Change, rank: int) -> Tensor | None:
    """int32 ``[rank]``: which scaling of a row each product with a first factor gets; None: none gets any."""
    if all(part.columns is None for part in change.parts):
        return None
    columns = torch.zeros(rank, dtype=torch.int32)
    known = [part.columns for part in change.parts if part.columns is not None]
    assert len(known) == len(change.parts), "all parts of a change are scaled, or none is"
    columns[: sum(map(len, known))] = torch.cat(known).int()
    return columns


def _pack_up(change: Change, order: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor, int, int]]:
    """Panel, second factors that have outputs in it, ``[rank][16]``, and to which outputs of the first they belong."""
    found = []
    first = 0
    for down, up, start, _ in change.parts:
        rows = order - start
        inside = (order >= 0) & (rows >= 0) & (rows < len(up))
        arranged = torch.where(inside[:, None], up[rows.clamp(0, len(up) - 1)], 0).to(dtype)
        by_panel = arranged.view(-1, PANEL, len(down)).transpose(1, 2).contiguous()
        touched = inside.view(-1, PANEL).any(1).nonzero().flatten().tolist()
        found += [(panel, by_panel[panel], first, len(down)) for panel in touched]
        first += len(down)
    yield from sorted(found, key=lambda entry: entry[0])


def _in_order(values: Tensor | None, order: Tensor, missing: float) -> Tensor:
    if values is None:
        return torch.full(order.shape, missing)
    values = values.float()
    return torch.where(order >= 0, values[order.clamp(min=0)], missing).contiguous()
