"""Adapters of linears, in the layout of the native kernels (csrc/table.h: `Adapter`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.kernels.adapters import Change, LowRank
from vlmserve.kernels.extension import DTYPES, extension
from vlmserve.kernels.pages import allocate

TILE = 32
"""Output features of a tile of a packed weight. Half are gates if gated."""
PANEL = 16
"""Output features that a kernel reads together."""


class NativeChange:
    """rank: of all `down` matrices, in whole panels. words: the address of the kernels' `Adapter`."""

    def __init__(self, change: Change, out_features: int, in_features: int, dtype: torch.dtype, *, gated: bool) -> None:
        parts = [_of_even_rank(part) for part in change.parts]
        order = outputs_in_tiles(out_features, gated=gated)
        self.rank = -(-sum(len(part.down) for part in parts) // PANEL) * PANEL
        self._down = _pack_down(parts, self.rank, in_features, dtype)
        packed = list(_pack_up(parts, order, dtype, 2 if gated else 1))
        self._up = [weights for weights, *_ in packed]
        self._factor = self._shift = None
        if change.factor is not None or change.shift is not None:
            self._factor = _in_order(change.factor, order, 1.0)
            self._shift = _in_order(change.shift, order, 0.0)
        self._columns = _columns(parts, self.rank)
        fields = [self._down, self.rank, self._factor, self._shift, self._columns, len(packed)]
        fields += [word for part in packed for word in part]
        words = [0 if field is None else field if isinstance(field, int) else field.data_ptr() for field in fields]
        self._struct = _placed(torch.tensor(words, dtype=torch.int64))
        self.words = (self._struct.data_ptr(),)

    @property
    def num_bytes(self) -> int:
        tensors = [self._down, self._factor, self._shift, self._struct, self._columns, *self._up]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _placed(tensor: Tensor) -> Tensor:
    """TLB misses of small pages would take longer than the read."""
    return allocate(tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor)


def outputs_in_tiles(out_features: int, *, gated: bool) -> Tensor:
    """Return int64 ``[panels * 16]``: outputs of a packed weight, -1 for padding."""
    features, each = (out_features // 2, PANEL) if gated else (out_features, TILE)
    tiles = -(-features // each)
    columns = torch.arange(tiles * each).view(tiles, each)
    columns = torch.where(columns < features, columns, -1)
    if gated:
        columns = torch.cat((columns, torch.where(columns < 0, -1, columns + features)), 1)
    return columns.flatten()


def _of_even_rank(part: LowRank) -> LowRank:
    """Kernels read `up` in pairs."""
    if len(part.down) % 2 == 0:
        return part
    columns = None if part.columns is None else F.pad(part.columns, (0, 1))
    return part._replace(down=F.pad(part.down, (0, 0, 0, 1)), up=F.pad(part.up, (0, 1)), columns=columns)


def _pack_down(parts: Sequence[LowRank], rank: int, in_features: int, dtype: torch.dtype) -> Tensor | None:
    if not rank:
        return None
    plain = torch.zeros(rank, in_features, dtype=dtype)
    down = torch.cat([part.down.to(dtype) for part in parts])
    plain[: len(down)] = down
    packed = torch.empty(-(-rank // TILE) * TILE * in_features, dtype=dtype)
    extension().pack(plain.data_ptr(), packed.data_ptr(), rank, in_features, DTYPES[dtype], 0, torch.get_num_threads())
    return _placed(packed[: rank * in_features])


def _columns(parts: Sequence[LowRank], rank: int) -> Tensor | None:
    """Return int32 ``[rank]``, a scaling for each `down` output."""
    known = [part.columns for part in parts if part.columns is not None]
    if not known:
        return None
    assert len(known) == len(parts), "all parts of a change are scaled, or none is"
    columns = torch.zeros(rank, dtype=torch.int32)
    columns[: sum(map(len, known))] = torch.cat(known).int()
    return columns


def _pack_up(
    parts: Sequence[LowRank], order: Tensor, dtype: torch.dtype, step: int
) -> Iterator[tuple[Tensor, int, int, int, int, int]]:
    """Yield fields of csrc/table.h's `AdapterPart`. Every step-th panel belongs together."""
    first = 0
    for down, up, start, _ in parts:
        rank = len(down)
        rows = order - start
        inside = (order >= 0) & (rows >= 0) & (rows < len(up))
        arranged = torch.where(inside[:, None], up[rows.clamp(0, len(up) - 1)], 0).to(dtype)
        panels = arranged.view(-1, PANEL, rank).transpose(1, 2)
        if dtype == torch.bfloat16:
            panels = panels.reshape(len(panels), rank // 2, 2, PANEL).transpose(2, 3)
        for place in range(step):
            touched = inside.view(-1, PANEL)[place::step].any(1).nonzero().flatten()
            if len(touched):
                begin, end = int(touched[0]), int(touched[-1]) + 1
                weights = _placed(panels[place::step][begin:end])
                yield weights, place + begin * step, end - begin, step, first, rank
        first += rank


def _in_order(values: Tensor | None, order: Tensor, missing: float) -> Tensor:
    if values is None:
        return torch.full(order.shape, missing)
    values = values.float()
    return torch.where(order >= 0, values[order.clamp(min=0)], missing).contiguous()
