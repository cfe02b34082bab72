"""Gated delta rule (https://arxiv.org/abs/2412.06464): projections, and a kernel over states between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

import torch
from torch import Tensor

from vlmserve.families.spec import ArchSpec
from vlmserve.kernels.operations import Normed, Operations
from vlmserve.kernels.states import DeltaKernel, DeltaWeights, StateCache, StateRows
from vlmserve.kernels.torch_states import TorchDelta
from vlmserve.layer_specs import DeltaSpec
from vlmserve.layers.cut import Shard
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import Linear, MergedLinear, empty_parameter
from vlmserve.layers.norm import RMSNorm
from vlmserve.layers.parallel import Ranks, RowParallelLinear, scaled, shares
from vlmserve.models.blocks.block import StateBlock
from vlmserve.models.blocks.convolution import DepthwiseWeight
from vlmserve.quant.calibration import Fold


class GatedDelta(StateBlock):
    readers = ("in_proj", "in_proj_gates")
    shard: Shard | None = None
    """The heads of `A_log` and `dt_bias`."""
    _kernel: DeltaKernel | None = None

    def __init__(self, spec: DeltaSpec, hidden_size: int, eps: float, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.spec = spec
        heads = spec.num_value_heads
        wide, narrow = {"in_proj_qkv": spec.channels, "in_proj_z": spec.values}, ("in_proj_b", "in_proj_a")
        self.in_proj = MergedLinear(hidden_size, wide, bias=False, **factory)
        self.in_proj_gates = MergedLinear(hidden_size, dict.fromkeys(narrow, heads), bias=False, **factory)
        # Small, and errors of decays compound over all tokens.
        self.in_proj_gates.stays_plain = True
        self.conv1d = DepthwiseWeight(spec.channels, spec.kernel, **factory)
        self.A_log = empty_parameter(heads, dtype=torch.float32, device=factory["device"])
        self.dt_bias = empty_parameter(heads, dtype=torch.float32, device=factory["device"])
        self.norm = RMSNorm(spec.value_size, eps, **factory)
        self.out_proj = Linear(spec.values, hidden_size, bias=False, **factory)

    def arrange(self, operations: Operations) -> None:
        self._kernel = operations.delta(self.spec, self._weights(), self.in_proj.dtype) or self._reference()

    def split(self, whole: ArchSpec, index: int, ranks: Ranks) -> None:
        spec = whole.mixers[index]
        assert isinstance(spec, DeltaSpec)
        heads = shares(spec.num_value_heads, ranks)
        keys = scaled(shares(spec.num_key_heads, ranks), spec.key_size)
        values = scaled(heads, spec.value_size)
        self.in_proj.shard = Shard((keys, keys, values, values), parts=(3, 1))
        self.in_proj_gates.shard = Shard((heads, heads), parts=(1, 1))
        self.conv1d.shard = Shard((keys, keys, values))
        self.shard = Shard((heads,))
        self.out_proj = RowParallelLinear(self.out_proj, values, ranks)

    def folds(self, name: str) -> Iterator[Fold]:
        """Yield nothing: the norm before `out_proj` has one weight for all heads."""
        return iter(())

    def _mixed(self, x: Normed, cache: StateCache, rows: StateRows) -> Tensor:
        kernel = self._kernel or self._reference()
        return kernel(self.in_proj(x), self.in_proj_gates(x), cache, rows)

    def _reference(self) -> DeltaKernel:
        return TorchDelta(self.spec, self._weights())

    def _weights(self) -> DeltaWeights:
        convolution = self.conv1d.weight.data[:, 0]
        return DeltaWeights(
            convolution, -self.A_log.data.exp(), self.dt_bias.data, self.norm.weight.data, self.norm.eps
        )
