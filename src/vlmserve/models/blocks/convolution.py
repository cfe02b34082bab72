"""A gated short convolution with states: projections, and a kernel between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

from torch import Tensor, nn

from vlmserve.families.spec import ArchSpec
from vlmserve.kernels.operations import Normed, Operations
from vlmserve.kernels.states import ConvolutionKernel, StateCache, StateRows
from vlmserve.kernels.torch_states import TorchConvolution
from vlmserve.layer_specs import ConvolutionSpec
from vlmserve.layers.cut import Shard
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import Linear, empty_parameter
from vlmserve.layers.parallel import Ranks, RowParallelLinear, shares
from vlmserve.models.blocks.block import StateBlock
from vlmserve.quant.calibration import Fold


class DepthwiseWeight(nn.Module):
    shard: Shard | None = None

    def __init__(self, channels: int, kernel: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.weight = empty_parameter(channels, 1, kernel, **factory)


class ShortConvolution(StateBlock):
    readers = ("in_proj",)
    _kernel: ConvolutionKernel | None = None

    def __init__(self, spec: ConvolutionSpec, hidden_size: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.spec = spec
        self.in_proj = Linear(hidden_size, 3 * spec.channels, bias=False, **factory)
        self.conv = DepthwiseWeight(spec.channels, spec.kernel, **factory)
        self.out_proj = Linear(spec.channels, hidden_size, bias=False, **factory)

    def arrange(self, operations: Operations) -> None:
        self._kernel = operations.convolution(self.spec, self._weight, self.in_proj.dtype) or self._reference()

    def split(self, whole: ArchSpec, index: int, ranks: Ranks) -> None:
        spec = whole.mixers[index]
        assert isinstance(spec, ConvolutionSpec)
        channels = shares(spec.channels, ranks)
        self.in_proj.shard = Shard((channels, channels, channels))
        self.conv.shard = Shard((channels,))
        self.out_proj = RowParallelLinear(self.out_proj, channels, ranks)

    def folds(self, name: str) -> Iterator[Fold]:
        """The output is linear in the last third of `in_proj`, so it takes the factors of `out_proj`."""
        size = self.spec.channels
        yield Fold((f"{name}.out_proj",), producer=f"{name}.in_proj", rows=(2 * size, 3 * size))

    @property
    def reader(self) -> Linear:
        return self.in_proj

    def _mixed(self, x: Normed, cache: StateCache, rows: StateRows) -> Tensor:
        kernel = self._kernel or self._reference()
        return kernel(self.in_proj(x), cache, rows)

    def _reference(self) -> ConvolutionKernel:
        return TorchConvolution(self._weight)

    @property
    def _weight(self) -> Tensor:
        return self.conv.weight.data[:, 0]
