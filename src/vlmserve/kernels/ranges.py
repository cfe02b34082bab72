"""Row ranges of a flat batch that attend to each other, without a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from vlmserve.kernels.transfers import to_device

WINDOW_ROWS = 64
"""Query rows per program if no range is longer."""
BLOCK_ROWS = 128
"""Query rows per program otherwise: each program reads all keys and values of its range."""


@dataclass(frozen=True, slots=True)
class Ranges:
    lengths: list[int]
    """Rows of each range."""
    blocks: Tensor
    """int32 ``[blocks, 3]`` on the device: first row of a block of up to `block_rows`, then begin and end of its
    range."""
    block_rows: int
    """`WINDOW_ROWS` or `BLOCK_ROWS`."""

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Ranges:
        blocks, begin = [], 0
        block_rows = WINDOW_ROWS if max(lengths, default=0) <= WINDOW_ROWS else BLOCK_ROWS
        for length in lengths:
            end = begin + length
            blocks += [(first, begin, end) for first in range(begin, end, block_rows)]
            begin = end
        return cls(lengths, to_device(torch.tensor(blocks, dtype=torch.int32).view(-1, 3), device), block_rows)

    @classmethod
    def join(cls, parts: Sequence[Ranges]) -> Ranges:
        blocks, begin = [], 0
        for part in parts:
            blocks.append(part.blocks + begin)
            begin += sum(part.lengths)
        # ranges of up to `WINDOW_ROWS` are one block
        block_rows = max((part.block_rows for part in parts), default=WINDOW_ROWS)
        return cls([length for part in parts for length in part.lengths], torch.cat(blocks), block_rows)

    @property
    def is_even(self) -> bool:
        return len(set(self.lengths)) == 1

    def runs(self, rows: Tensor) -> Iterator[Tensor]:
        """Yield adjacent ranges of equal length, ``[ranges, length, ...]``."""
        start = 0
        for length, group in groupby(self.lengths):
            count = len(list(group))
            yield rows[start : start + count * length].view(count, length, *rows.shape[1:])
            start += count * length


class RangeKernels(Protocol):
    """Rows are ``[rows, 3 * size]``: queries, keys and values, each ordered by head."""

    def rotate(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate element ``i`` of query and key heads with ``i + head_size / 2``, in place.

        cos, sin: float32 ``[rows, 1, head_size / 2]``.
        """
        ...

    def attend(self, qkv: Tensor, ranges: Ranges) -> Tensor: ...
