"""Adapters of linears in device memory, and the launches that apply them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from vlmserve.kernels.adapters import Change, LinearAdapters, LowRank
from vlmserve.kernels.triton.adapter_kernels import add_changes, shrink
from vlmserve.kernels.triton.host_math import cdiv

RANKS = 16
"""Ranks that a program multiplies by."""
OUTPUTS = 64
"""Outputs of a program: few, so that few rows have many programs."""
ALIGNED_RANK = 8
"""Keeps each output's `up` row aligned to 16 bytes."""
MOST_SPLITS, SPLIT_ROWS = 8, 128
STAGES = 4
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class TritonChange:
    """`down` matrices are stacked; `up` matrices are side by side.

    Outputs that the same parts change have a row of `width` elements in `up`, and as many rows in `down`. words: rank,
    width, then addresses (0 if absent): `down` ``[rank, in_features]``, `up` ``[out_features, width]``, each output's
    first row in `down` (int32), factors and shifts (float32), scaling columns (int32 ``[rank]``).
    """

    def __init__(self, change: Change, order: Tensor | None, out_features: int, in_features: int) -> None:
        """order: int64 ``[out_features]``, the output of `change` for each output."""
        groups = _grouped(change.parts)
        ranks = [sum(len(part.down) for part in group) for group in groups]
        width = _rounded(max(ranks, default=0), ALIGNED_RANK)
        self.rank = _rounded(width * len(groups), RANKS)
        self._tensors: list[Tensor | None] = [None] * 6
        if groups:
            some = groups[0][0].down
            down = some.new_zeros(self.rank, in_features)
            up = some.new_zeros(out_features, width)
            firsts = torch.zeros(out_features, dtype=torch.int32, device=some.device)
            columns = torch.zeros(self.rank, dtype=torch.int32, device=some.device)
            for number, group in enumerate(groups):
                place = 0
                for part in group:
                    rows = slice(part.start, part.start + len(part.up))
                    ranks_of_part = slice(number * width + place, number * width + place + len(part.down))
                    down[ranks_of_part] = part.down
                    up[rows, place : place + len(part.down)] = part.up
                    firsts[rows] = number * width
                    if part.columns is not None:
                        columns[ranks_of_part] = part.columns.int()
                    place += len(part.down)
            scaled = any(part.columns is not None for part in change.parts)
            assert not scaled or all(part.columns is not None for part in change.parts), "all parts are scaled, or none"
            self._tensors[:3] = down, _ordered(up, order), _ordered(firsts, order)
            self._tensors[5] = columns if scaled else None
        given = change.factor if change.shift is None else change.shift
        if given is not None:
            factor = torch.ones_like(given) if change.factor is None else change.factor
            shift = torch.zeros_like(given) if change.shift is None else change.shift
            self._tensors[3:5] = _ordered(factor, order), _ordered(shift, order)
        addresses = (0 if tensor is None else tensor.data_ptr() for tensor in self._tensors)
        self.words = (self.rank, width, *addresses)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors if tensor is not None)


def reserved_rank(parts: int, rank: int) -> int:
    return _rounded(parts * _rounded(rank, ALIGNED_RANK), RANKS)


def _grouped(parts: Sequence[LowRank]) -> list[list[LowRank]]:
    """By the outputs that they change. Overlapping parts are one group."""
    groups: dict[tuple[int, int], list[LowRank]] = {}
    for part in parts:
        groups.setdefault((part.start, part.start + len(part.up)), []).append(part)
    spans = sorted(groups)
    if any(before[1] > after[0] for before, after in itertools.pairwise(spans)):
        return [[*parts]]
    return [groups[span] for span in spans]


def _ordered(values: Tensor, order: Tensor | None) -> Tensor:
    return values.contiguous() if order is None else values[order]


def _rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit


class Division(NamedTuple):
    tokens: int
    """Rows of a tile."""
    inputs: int
    """Inputs of a tile."""
    splits: int
    """Splits of the inputs, which the `up` matmul adds. Steps with many rows have enough programs without splits."""


def division(rows: int, in_features: int, dtype: torch.dtype) -> Division:
    """Larger tiles read each adapter fewer times."""
    tokens = next(size for size in (8, 16, 32) if rows <= size or size == 32)
    inputs = 128 if dtype.itemsize == 2 else 32
    tiles, splits = cdiv(in_features, inputs), 1
    most = min(MOST_SPLITS, SPLIT_ROWS // (tokens * cdiv(rows, tokens)))
    while splits < most and tiles // (splits * 2) >= 4:
        splits *= 2
    return Division(tokens, inputs, splits)


def add_adapters(
    x: Tensor,
    sums: Tensor,
    out: Tensor,
    adapters: LinearAdapters,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    *,
    gated: bool,
) -> None:
    """Finish a linear whose rows have packed adapters.

    x: ``[rows, in_features]``. sums: float32 ``[splits, rows, out_features]``, or ``[rows, out_features]`` of any dtype
    with bias. out: ``[rows, out_features]``, half as wide if `gated`. residual: shaped like `out`, contiguous.
    """
    rows, in_features = x.shape
    out_features, rank, biased = sums.shape[-1], adapters.rank, sums.ndim == 2
    assert rank is not None
    _, slots, stride = adapters.row_slots
    scalings = adapters.scalings
    tokens, inputs, splits = division(rows, in_features, x.dtype)
    # the maximum in one tile
    num_slots = min(rows, tokens, adapters.num_slots) if stride else 1
    inner = torch.empty((splits, rows, rank), dtype=torch.float32, device=x.device)
    if rank:
        shrink[(rank // RANKS, cdiv(rows, tokens), splits * num_slots)](
            x,
            inner,
            adapters.table,
            slots,
            inner if scalings is None else scalings,
            rows,
            x.stride(0),
            in_features,
            rank,
            stride,
            0 if scalings is None else scalings.shape[1],
            TOKENS=tokens,
            INPUTS=inputs,
            SPLITS=splits,
            STAGES=STAGES,
            EVEN=in_features % inputs == 0,
            SCALED=scalings is not None,
            RANKS=RANKS,
            num_warps=max(2, tokens // 8),
        )
    add_changes[(cdiv(out_features, OUTPUTS), cdiv(rows, tokens), num_slots)](
        sums,
        inner,
        out if bias is None else bias,
        out if residual is None else residual,
        out,
        adapters.table,
        slots,
        rows,
        out_features,
        rank,
        stride,
        OUTPUTS=OUTPUTS,
        TOKENS=tokens,
        SPLITS=1 if biased else len(sums),
        INNER_SPLITS=splits,
        DTYPE=TYPES[x.dtype],
        RANKS=RANKS,
        BIASED=biased and bias is not None,
        ACTIVATION=activation or "",
        GATED=gated,
        HAS_BIAS=bias is not None and not biased,
        HAS_RESIDUAL=residual is not None,
        num_warps=max(4, tokens // 4),
    )
