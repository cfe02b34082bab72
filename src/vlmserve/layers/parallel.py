"""Tensor-parallel layers (https://arxiv.org/abs/1909.08053)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.kernels.operations import DeferredNorm, Normed, Operations
from vlmserve.layers.cut import Shard, Share
from vlmserve.layers.linear import Embedding, Linear, OutputLinear, TiedEmbedding
from vlmserve.layers.norm import NormOfRow


class Ranks(Protocol):
    """The processes that compute a model together, seen from one of them.

    All ranks call the same methods in the same order, with tensors of the same shapes. They get bitwise equal results.
    rank: this process, ``0 <= rank < size``.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum the tensors of all ranks, in place."""
        ...

    def largest(self, tensor: Tensor) -> Tensor:
        """Elementwise maximum over all ranks, in place."""
        ...

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """This rank's shard of a vocabulary: tokens ``first <= i < last``."""

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
        """The shard of a table or an output head."""
        return Shard((Share(self.first, self.last, self.count),))

    def own(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Map token ids to rows of this shard. Returns the rows, 0 for other ranks' tokens, and their mask."""
        rows = indices - self.first
        lacks = (rows < 0) | (rows >= len(self))
        return rows.masked_fill(lacks, 0), lacks

    def gathered(self, logits: Tensor, ranks: Ranks, out: Tensor | None) -> Tensor:
        """Gather the logits of all ranks, ``[rows, vocabulary]``. logits: of this shard."""
        padded = F.pad(logits, (0, self.most - len(self)))
        parts = ranks.gather(padded.contiguous())
        bounds = [self.count * rank // ranks.size for rank in range(ranks.size + 1)]
        parts = [part[:, : last - first] for part, first, last in zip(parts, bounds, bounds[1:], strict=False)]
        return torch.cat(parts, 1) if out is None else torch.cat(parts, 1, out=out)


class RowParallelLinear(Linear):
    """A linear layer that shards inputs across ranks and sums the outputs. Rank 0 has the bias."""

    def __init__(self, whole: Linear, inputs: Share, ranks: Ranks) -> None:
        """whole: the layer as built for this rank's inputs."""
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
        """The output is unknown until all ranks are summed."""
        return None


class ParallelEmbedding(Embedding):
    """An `Embedding` with rows sharded across ranks."""

    def __init__(self, count: int, size: int, ranks: Ranks, *, dtype: torch.dtype, device: torch.device) -> None:
        self._vocabulary = Vocabulary.of(count, ranks)
        super().__init__(len(self._vocabulary), size, dtype=dtype, device=device)
        self.shard = self._vocabulary.shard
        self._ranks = ranks

    def forward(self, indices: Tensor) -> Tensor:
        rows, lacks = self._vocabulary.own(indices)
        return self._ranks.sum(super().forward(rows).masked_fill_(lacks[:, None], 0))


class ParallelTiedEmbedding(TiedEmbedding):
    """A `TiedEmbedding` with rows sharded across ranks."""

    def __init__(self, count: int, size: int, ranks: Ranks, *, dtype: torch.dtype, device: torch.device) -> None:
        self._vocabulary = Vocabulary.of(count, ranks)
        super().__init__(len(self._vocabulary), size, dtype=dtype, device=device)
        self.shard = self._vocabulary.shard
        self._ranks = ranks

    def forward(self, indices: Tensor) -> Tensor:
        rows, lacks = self._vocabulary.own(indices)
        return self._ranks.sum(super().forward(rows).masked_fill(lacks[:, None], 0))

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return self._vocabulary.gathered(super().logits(hidden), self._ranks, out)


class ParallelOutputLinear(OutputLinear):
    """An `OutputLinear` with outputs sharded across ranks."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        ranks: Ranks,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._vocabulary = Vocabulary.of(out_features, ranks)
        super().__init__(in_features, len(self._vocabulary), bias=bias, dtype=dtype, device=device)
        self.shard = self._vocabulary.shard
        self._ranks = ranks

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return self._vocabulary.gathered(super().logits(hidden), self._ranks, out)


class ParallelNormOfRow(NormOfRow):
    """A `NormOfRow` with heads sharded across ranks. copies: number of ranks with the same heads."""

    def __init__(self, own: NormOfRow, elements: Share, copies: int, ranks: Ranks, *, device: torch.device) -> None:
        """own: the norm as built for this rank's heads."""
        super().__init__(len(own.weight), own.eps, dtype=own.weight.dtype, device=device)
        self.shard = Shard((elements,))
        self._count = elements.whole * copies
        self._ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        row = x.reshape(len(x), -1).float()
        mean = self._ranks.sum(row.square().sum(1, keepdim=True)) / self._count
        return (row * torch.rsqrt(mean + self.eps) * self.weight.float()).to(x.dtype).view_as(x)

    def arrange(self, operations: Operations) -> None:
        """Keep torch's operations: no kernel computes the norm of a partial row."""


def shares(whole: int, ranks: Ranks) -> Share:
    """This rank's share of a size that `ranks.size` divides."""
    own = whole // ranks.size
    return Share(ranks.rank * own, (ranks.rank + 1) * own, whole)


def scaled(share: Share, factor: int) -> Share:
    """Convert a share of heads to a share of their elements."""
    return Share(share.first * factor, share.last * factor, share.whole * factor)
