from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vlmserve.kernels.isas import GROUP, GROUP_BLOCKS, SUPERBLOCK, GroupBlocks

_TILE = 32


class GGUFRows(NamedTuple):
    """Outputs of one type. blocks: uint8 ``[outputs, blocks, bytes]``."""

    kind: int
    blocks: Tensor

    @property
    def packed_row_bytes(self) -> int:
        _, count, num_bytes = self.blocks.shape
        if (stored := GROUP_BLOCKS.get(self.kind)) is not None:
            num_bytes = 2 * (1 + stored.minimums) + GROUP * stored.bits // 8
        return count * num_bytes


@dataclass(frozen=True, slots=True)
class GGUFWeight:
    """A weight ``[out_features, in_features]`` of one or several types.

    input_bits: see `QuantizedWeight`. Superblocks always use 8-bit inputs.
    """

    parts: tuple[GGUFRows, ...]
    input_bits: int = 0

    @property
    def group_blocks(self) -> GroupBlocks | None:
        """None: superblocks."""
        return GROUP_BLOCKS.get(self.parts[0].kind)

    @property
    def block_size(self) -> int:
        return GROUP if self.parts[0].kind in GROUP_BLOCKS else SUPERBLOCK

    @property
    def shape(self) -> torch.Size:
        blocks = self.parts[0].blocks
        return torch.Size((sum(len(part.blocks) for part in self.parts), blocks.shape[1] * self.block_size))

    @property
    def bits(self) -> int:
        """The largest type's, without scales."""
        if self.group_blocks is not None:
            return self.group_blocks.bits
        return max(part.blocks.shape[2] * 8 // SUPERBLOCK for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Packed blocks take the same, but 5-bit values a byte."""
        return sum(part.blocks.nbytes for part in self.parts)

    @property
    def fills_tiles(self) -> bool:
        """True if kernels take all types together, and only the last part may end inside a tile."""
        together = len({_stored_as(part.kind) for part in self.parts}) == 1
        return together and all(len(part.blocks) % _TILE == 0 for part in self.parts[:-1])

    @property
    def is_pair(self) -> bool:
        """True if the weight can be gates and ups."""
        first, last = self.parts[0], self.parts[-1]
        return len(self.parts) <= 2 and (first.kind, first.blocks.shape) == (last.kind, last.blocks.shape)

    @classmethod
    def beside(cls, weights: Sequence[GGUFWeight]) -> GGUFWeight:
        """Like `join`, without copying: parts of a type stay separate."""
        return cls(tuple(part for weight in weights for part in weight.parts))

    @classmethod
    def join(cls, weights: Sequence[GGUFWeight]) -> GGUFWeight:
        parts: list[GGUFRows] = []
        for part in (part for weight in weights for part in weight.parts):
            if parts and parts[-1].kind == part.kind:
                parts[-1] = GGUFRows(part.kind, torch.cat((parts[-1].blocks, part.blocks)))
            else:
                parts.append(part)
        return cls(tuple(parts))

    def inputs(self, first: int, last: int) -> GGUFWeight | None:
        """None if that would split a block."""
        size = self.block_size
        if first % size or last % size:
            return None
        own = slice(first // size, last // size)
        parts = tuple(GGUFRows(part.kind, part.blocks[:, own]) for part in self.parts)
        return dataclasses.replace(self, parts=parts)

    def __getitem__(self, rows: Tensor) -> GGUFWeight:
        rows = rows.cpu()
        ends = torch.tensor([len(part.blocks) for part in self.parts]).cumsum(0)
        numbers = torch.bucketize(rows, ends, right=True)
        bounds = [0, *(numbers.diff().nonzero().flatten() + 1).tolist(), len(rows)]
        found = []
        for first, last in itertools.pairwise(bounds):
            number = int(numbers[first])
            kind, blocks = self.parts[number]
            own = rows[first:last] - (int(ends[number]) - len(blocks))
            found.append(GGUFWeight((GGUFRows(kind, blocks[own]),)))
        return GGUFWeight.join(found)

    def dequantize(self) -> Tensor:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        rows = [
            dequantize(part.blocks.flatten(1).contiguous().numpy(), GGMLQuantizationType(part.kind))
            for part in self.parts
        ]
        return torch.cat([torch.from_numpy(values) for values in rows])


def _stored_as(kind: int) -> tuple[int, bool, bool] | None:
    """Kernels take types with equal results together. None: superblocks."""
    blocks = GROUP_BLOCKS.get(kind)
    return None if blocks is None else (blocks.bits, blocks.minimums, blocks.is_coded)
