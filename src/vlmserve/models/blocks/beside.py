"""Experts that add to a layer's MLP (Gemma 4)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

from torch import Tensor

from vlmserve.families.spec import ArchSpec, ExpertsSpec
from vlmserve.layers.layer import Factory
from vlmserve.layers.parallel import Ranks
from vlmserve.layers.residual import Adding, Unfinished
from vlmserve.models.blocks.block import Block, make_norm
from vlmserve.models.blocks.experts import Experts
from vlmserve.quant.calibration import Fold


class ExpertsBeside(Block):
    """Norms an MLP's output, and adds the normed output of experts that read the residual stream (Gemma 4)."""

    readers = ()

    def __init__(self, spec: ArchSpec, experts: ExpertsSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        assert experts.router_norm is not None
        self.routed = Experts(experts, spec.hidden_size, spec.activation, **factory)
        norms = (make_norm(experts.router_norm, spec.hidden_size, **factory) for _ in range(2))
        self.mlp_norm, self.routed_norm = norms

    def forward(self, dense: Unfinished, rows: Tensor) -> Unfinished:
        """dense: the layer's MLP. rows: ``[tokens, hidden_size]`` before the MLP."""
        fed, routed = (block.linear(block.inputs) for block in (dense, self.routed(rows)))
        if self.mlp_norm.adding is None:
            return Unfinished(Adding(_plus), self.mlp_norm(fed) + self.routed_norm(routed))
        return Unfinished(Adding(_plus), self.mlp_norm.adding.plus(fed, self.routed_norm(routed)))

    def split(self, whole: ArchSpec, index: int, ranks: Ranks) -> None:
        self.routed.split(whole, index, ranks)

    def folds(self, name: str) -> Iterator[Fold]:
        yield from self.routed.folds(f"{name}.routed")


def _plus(x: Tensor, residual: Tensor | None) -> Tensor:
    return x if residual is None else residual + x
