"""The interface between a decoder layer and its blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

from torch import Tensor, nn

from vlmserve.families.spec import ArchSpec, NormSpec
from vlmserve.kernels.operations import Normed
from vlmserve.kernels.states import StateCache, StateRows
from vlmserve.layers.layer import Factory, Layer
from vlmserve.layers.linear import Linear
from vlmserve.layers.norm import LayerNorm, RMSNorm
from vlmserve.layers.parallel import Ranks
from vlmserve.layers.residual import Unfinished
from vlmserve.layers.step import StepContext
from vlmserve.quant.calibration import Fold


class Block(nn.Module):
    """A part of a decoder layer. Maps normed rows of the residual stream to an `Unfinished` block.

    Module names equal names of weights.
    """

    readers: tuple[str, ...]
    """Names of the linear layers that take the normed rows."""

    @property
    def reader(self) -> Linear | None:
        """The only layer that takes the normed rows, and may compute their norm; None: there are several."""
        return None

    def split(self, whole: ArchSpec, index: int, ranks: Ranks) -> None:
        """Keep this rank's shard, before weights are loaded. index: of the layer. whole: the unsharded model."""
        raise NotImplementedError

    def folds(self, name: str) -> Iterator[Fold]:
        """Yield linear layers whose inputs can be scaled. name: of the block in its layer."""
        raise NotImplementedError


class StateBlock(Block, Layer):
    """Linears around a kernel that updates the states of one layer."""

    out_proj: Linear

    def forward(self, x: Normed, cache: StateCache, step: StepContext) -> Unfinished:
        assert step.metadata.states is not None
        return Unfinished(self.out_proj, self._mixed(x, cache, step.metadata.states))

    def _mixed(self, x: Normed, cache: StateCache, rows: StateRows) -> Tensor:
        raise NotImplementedError


def make_norm(spec: NormSpec, size: int, **factory: Unpack[Factory]) -> RMSNorm | LayerNorm:
    if spec.layer:
        return LayerNorm(size, spec.eps, **factory)
    return RMSNorm(size, spec.eps, offset=spec.offset, **factory)
