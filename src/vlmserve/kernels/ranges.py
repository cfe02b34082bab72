"""Rows of a flat batch that see each other, for attention without a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from vlmserve.kernels.transfers import to_device

WINDOW_ROWS = 64
"""Rows of queries that a program takes where no range has more."""
BLOCK_ROWS = 128
"""The same where some have: each program reads all keys and values of its range."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """lengths: of ranges of rows, one behind the other; the rows of each see each other. blocks: int32
    ``[blocks, 3]``, on the device: the first row of each `block_rows`, or fewer, of a range, and where that range
    begins and ends. block_rows: `WINDOW_ROWS` or `BLOCK_ROWS`."""

    lengths: list[int]
    blocks: Tensor
    block_rows: int

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Ranges:
        """Ranges of these lengths."""
        blocks, begin = [], 0
        block_rows = WINDOW_ROWS if max(lengths, default=0) <= WINDOW_ROWS else BLOCK_ROWS
        for length in lengths:
            end = begin + length
            blocks += [(first, begin, end) for first in range(begin, end, block_rows)]
            begin = end
        return cls(lengths, to_device(torch.tensor(blocks, dtype=torch.int32).view(-1, 3), device), block_rows)

    @classmethod
    def join(cls, parts: Sequence[Ranges]) -> Ranges:
        """Those of several batches, one behind the other."""
        blocks, begin = [], 0
        for part in parts:
            blocks.append(part.blocks + begin)
            begin += sum(part.lengths)
        # Ranges of up to `WINDOW_ROWS` are one block each, whatever the others are.
        block_rows = max((part.block_rows for part in parts), default=WINDOW_ROWS)
        return cls([length for part in parts for length in part.lengths], torch.cat(blocks), block_rows)

    @property
    def is_even(self) -> bool:
        """Whether all are equally long, so that they can be one axis."""
        return len(set(self.lengths)) == 1

    def runs(self, rows: Tensor) -> Iterator[Tensor]:
        """Neighbouring ranges that are equally long, together: ``[ranges, length, ...]`` of ``[rows, ...]``."""
        start = 0
        for length, group in groupby(self.lengths):
            count = len(list(group))
            yield rows[start : start + count * length].view(count, length, *rows.shape[1:])
            start += count * length


class RangeKernels(Protocol):
    """What a device computes over the rows of several images, or windows of them, in one launch each.

    Rows ``[rows, 3 * size]``: queries, keys and values side by side, each of them head by head.
    """

    def rotate(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate queries and keys in place, element ``i`` of a head with ``i + head_size / 2``. cos, sin: float32
        ``[rows, 1, head_size / 2]``."""
        ...

    def attend(self, qkv: Tensor, ranges: Ranges) -> Tensor:
        """``[rows, size]``: every row attends to those of its range."""
        ...
