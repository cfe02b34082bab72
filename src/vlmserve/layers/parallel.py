"""Tensor-parallel layers (https://arxiv.org/abs/1909.08053)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.kernels.operations import DeferredNorm, Normed, Operations
from vlmserve.layers.cut import Shard, Share
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import Embedding, Linear, OutputLinear, TiedEmbedding
from vlmserve.layers.norm import NormOfRow


class Ranks(Protocol):
    """The processes that compute a model together.

    All call the same methods in order with equal shapes, and get bitwise equal results. rank: ``0 <= rank < size``.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum in place."""
        ...

    def largest(self, tensor: Tensor) -> Tensor:
        """Elementwise maximum, in place."""
        ...

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """In rank order."""
        ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """This rank's tokens: ``first <= i < last``."""

    first: int
    last: int
    count: int
    most: int
    """The maximum size of a shard."""

    @classmethod
    def of(cls, count: int, ranks: Ranks) -> Vocabulary:
        """Shards differ by at most one token."""
        first, last = (count * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1))
        return cls(first, last, count, -(-count // ranks.size))

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def shard(self) -> Shard:
        return Shard((Share(self.first, self.last, self.count),))

    def own(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """This shard's rows, 0 for other ranks' tokens, and these tokens' mask."""
        rows = indices - self.first
        lacks = (rows < 0) | (rows >= len(self))
        return rows.masked_fill(lacks, 0), lacks

    def gathered(self, logits: Tensor, ranks: Ranks, out: Tensor | None) -> Tensor:
        padded = F.pad(logits, (0, self.most - len(self)))
        parts = ranks.gather(padded.contiguous())
        bounds = [self.count * rank // ranks.size for rank in range(ranks.size + 1)]
        parts = [part[:, : last - first] for part, first, last in zip(parts, bounds, bounds[1:], strict=False)]
        return torch.cat(parts, 1) if out is None else torch.cat(parts, 1, out=out)


class RowParallelLinear(Linear):
    """Shards inputs and sums the outputs. Rank 0 has the bias."""

    def __init__(self, whole: Linear, inputs: Share, ranks: Ranks) -> None:
        bias = whole.bias is not None and ranks.rank == 0
        super().__init__(whole.in_features, whole.out_features, bias=bias, dtype=whole.dtype, device=whole.device)
        self.shard = Shard((Share(0, whole.out_features, whole.out_features),), inputs)
        self.ranks = ranks

    def forward(self, x: Normed, residual: Tensor | None = None) -> Tensor:
        assert not isinstance(x, DeferredNorm)
        output = self.ranks.sum(self._of(x).contiguous())
        return output if residual is None else output.add_(residual)

    @property
    def deferring(self) -> None:
        return None


class ParallelEmbedding(Embedding):
    def __init__(self, count: int, size: int, ranks: Ranks, **factory: Unpack[Factory]) -> None:
        self._vocabulary = Vocabulary.of(count, ranks)
        super().__init__(len(self._vocabulary), size, **factory)
        self.shard = self._vocabulary.shard
        self._ranks = ranks

    def forward(self, indices: Tensor) -> Tensor:
        rows, lacks = self._vocabulary.own(indices)
        return self._ranks.sum(super().forward(rows).masked_fill_(lacks[:, None], 0))


class ParallelTiedEmbedding(TiedEmbedding):
    def __init__(self, count: int, size: int, ranks: Ranks, **factory: Unpack[Factory]) -> None:
        self._vocabulary = Vocabulary.of(count, ranks)
        super().__init__(len(self._vocabulary), size, **factory)
        self.shard = self._vocabulary.shard
        self._ranks = ranks

    def forward(self, indices: Tensor) -> Tensor:
        rows, lacks = self._vocabulary.own(indices)
        return self._ranks.sum(super().forward(rows).masked_fill(lacks[:, None], 0))

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return self._vocabulary.gathered(super().logits(hidden), self._ranks, out)


class ParallelOutputLinear(OutputLinear):
    def __init__(
        self, in_features: int, out_features: int, ranks: Ranks, *, bias: bool, **factory: Unpack[Factory]
    ) -> None:
        self._vocabulary = Vocabulary.of(out_features, ranks)
        super().__init__(in_features, len(self._vocabulary), bias=bias, **factory)
        self.shard = self._vocabulary.shard
        self._ranks = ranks

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return self._vocabulary.gathered(super().logits(hidden), self._ranks, out)


class ParallelNormOfRow(NormOfRow):
    """Heads are sharded. copies: ranks with the same heads."""

    def __init__(self, own: NormOfRow, elements: Share, copies: int, ranks: Ranks, *, device: torch.device) -> None:
        super().__init__(len(own.weight), own.eps, dtype=own.weight.dtype, device=device)
        self.shard = Shard((elements,))
        self._count = elements.whole * copies
        self._ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        row = x.reshape(len(x), -1).float()
        mean = self._ranks.sum(row.square().sum(1, keepdim=True)) / self._count
        return (row * torch.rsqrt(mean + self.eps) * self.weight.float()).to(x.dtype).view_as(x)

    def arrange(self, operations: Operations) -> None:
        """No kernel computes the norm of a partial row."""


def shares(whole: int, ranks: Ranks) -> Share:
    """`ranks.size` divides `whole`."""
    own = whole // ranks.size
    return Share(ranks.rank * own, (ranks.rank + 1) * own, whole)


def scaled(share: Share, factor: int) -> Share:
    return Share(share.first * factor, share.last * factor, share.whole * factor)
