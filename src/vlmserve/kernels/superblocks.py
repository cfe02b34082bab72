"""Weights in superblocks, as GGUF files have them: llama.cpp's K-quants and IQ4_XS."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vlmserve.kernels.isas import SUPERBLOCK

_TILE = 32


class SuperblockRows(NamedTuple):
    """Outputs of one type. blocks: uint8 ``[outputs, superblocks, bytes]``."""

    kind: int
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class SuperblockWeight:
    """A weight ``[out_features, in_features]``: rows of one or several types, one after another."""

    parts: tuple[SuperblockRows, ...]

    @property
    def shape(self) -> torch.Size:
        blocks = self.parts[0].blocks
        return torch.Size((sum(len(part.blocks) for part in self.parts), blocks.shape[1] * SUPERBLOCK))

    @property
    def bits(self) -> int:
        """Bits of a weight of the largest type, without its scales."""
        return max(part.blocks.shape[2] * 8 // SUPERBLOCK for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, packed or not."""
        return sum(part.blocks.nbytes for part in self.parts)

    @property
    def fills_tiles(self) -> bool:
        """Whether the outputs of each type but the last are whole tiles of the kernels."""
        return all(len(part.blocks) % _TILE == 0 for part in self.parts[:-1])

    @property
    def is_pair(self) -> bool:
        """True for weights that can be gates and ups: one part, or two of the same type and size."""
        first, last = self.parts[0], self.parts[-1]
        return len(self.parts) <= 2 and (first.kind, first.blocks.shape) == (last.kind, last.blocks.shape)

    @classmethod
    def beside(cls, weights: Sequence[SuperblockWeight]) -> SuperblockWeight:
        """As `join`, without a copy: parts of the same type stay apart."""
        return cls(tuple(part for weight in weights for part in weight.parts))

    @classmethod
    def join(cls, weights: Sequence[SuperblockWeight]) -> SuperblockWeight:
        """Weights for the same inputs as one, their outputs side by side."""
        parts: list[SuperblockRows] = []
        for part in (part for weight in weights for part in weight.parts):
            if parts and parts[-1].kind == part.kind:
                parts[-1] = SuperblockRows(part.kind, torch.cat((parts[-1].blocks, part.blocks)))
            else:
                parts.append(part)
        return cls(tuple(parts))

    def inputs(self, first: int, last: int) -> SuperblockWeight | None:
        """The weight of inputs ``first <= i < last``; None if that divides a superblock."""
        if first % SUPERBLOCK or last % SUPERBLOCK:
            return None
        own = slice(first // SUPERBLOCK, last // SUPERBLOCK)
        return SuperblockWeight(tuple(SuperblockRows(part.kind, part.blocks[:, own]) for part in self.parts))

    def __getitem__(self, rows: Tensor) -> SuperblockWeight:
        """The weight of some outputs. Outputs of one type stay side by side if they are so in `rows`."""
        rows = rows.cpu()
        ends = torch.tensor([len(part.blocks) for part in self.parts]).cumsum(0)
        numbers = torch.bucketize(rows, ends, right=True)
        bounds = [0, *(numbers.diff().nonzero().flatten() + 1).tolist(), len(rows)]
        found = []
        for first, last in itertools.pairwise(bounds):
            number = int(numbers[first])
            kind, blocks = self.parts[number]
            own = rows[first:last] - (int(ends[number]) - len(blocks))
            found.append(SuperblockWeight((SuperblockRows(kind, blocks[own]),)))
        return SuperblockWeight.join(found)

    def dequantize(self) -> Tensor:
        """The weight that this stands for, float32 ``[out_features, in_features]``."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        rows = [
            dequantize(part.blocks.flatten(1).contiguous().numpy(), GGMLQuantizationType(part.kind))
            for part in self.parts
        ]
        return torch.cat([torch.from_numpy(values) for values in rows])
