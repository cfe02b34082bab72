"""Norms over the last axis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmserve.kernels.operations import AddingNorm, Norm, Operations, RoundingNorm, SummingNorm
from vlmserve.layers.cut import Shard
from vlmserve.layers.layer import Factory, Layer
from vlmserve.layers.linear import empty_parameter


class Normalization(Layer):
    kernel: Norm | None = None
    """None: torch's operations."""
    adding: AddingNorm | None = None
    """The kernel, if it can add a residual to its output."""
    summing: SummingNorm | None = None
    """The kernel, if it can compute the norm of a sum."""
    rounding: RoundingNorm | None = None
    """The kernel, if it can round its output for the next linear."""

    def _compute_by(self, kernel: Norm | None) -> None:
        self.kernel = kernel
        # Cached: isinstance checks take longer than a kernel launch.
        self.adding = kernel if isinstance(kernel, AddingNorm) else None
        self.summing = kernel if isinstance(kernel, SummingNorm) else None
        self.rounding = kernel if isinstance(kernel, RoundingNorm) else None


class RMSNorm(Normalization):
    """RMS norm in float32 (https://arxiv.org/abs/1910.07467). offset: added to the weights in float32."""

    shard: Shard | None = None

    def __init__(self, size: int, eps: float, *, offset: float = 0.0, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.weight = empty_parameter(size, **factory)
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel is not None:
            return self.kernel(x)
        size = (x.shape[-1],)
        if self.offset:
            return F.rms_norm(x.float(), size, self.weight.float() + self.offset, self.eps).to(x.dtype)
        return F.rms_norm(x, size, self.weight, self.eps)

    def arrange(self, operations: Operations) -> None:
        self._compute_by(operations.norm(self.weight.data, None, self.eps, self.offset))


class UnitNorm(nn.Module):
    """RMS norm without weights."""

    def __init__(self, size: int, eps: float, *, device: torch.device) -> None:
        super().__init__()
        self.size, self.eps, self.device = size, eps, device

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.size,), None, self.eps)


class LayerNorm(Normalization):
    """Layer norm (https://arxiv.org/abs/1607.06450)."""

    def __init__(self, size: int, eps: float, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.weight = empty_parameter(size, **factory)
        self.bias = empty_parameter(size, **factory)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel is not None:
            return self.kernel(x)
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)

    def arrange(self, operations: Operations) -> None:
        self._compute_by(operations.norm(self.weight.data, self.bias.data, self.eps))


class NormOfEachHead(nn.Module):
    """Layer norm of each head of ``[tokens, heads, head_size]``, with own weights and no bias."""

    first_head = 0

    def __init__(self, heads: int, head_size: int, eps: float, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.weight = empty_parameter(heads, head_size, **factory)
        self.eps = eps

    def slots(self) -> Iterator[tuple[str, Tensor]]:
        """Checkpoints store the weights head by head."""
        yield from ((f"{head}.weight", weight) for head, weight in enumerate(self.weight.data, self.first_head))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), None, None, self.eps) * self.weight


class NormOfRow(RMSNorm):
    """RMS norm over all heads of ``[tokens, heads, head_size]``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(len(x), -1)).view_as(x)
