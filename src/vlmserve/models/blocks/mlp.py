"""The dense feed-forward block of decoders and vision towers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Unpack

from vlmserve.families.spec import ArchSpec
from vlmserve.kernels.operations import Normed
from vlmserve.layers.cut import Shard
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import GatedLinear, Linear
from vlmserve.layers.parallel import Ranks, RowParallelLinear, shares
from vlmserve.layers.residual import Unfinished
from vlmserve.models.blocks.block import Block
from vlmserve.quant.calibration import Fold


class MLP(Block):
    """``act(up(x))`` or ``act(gate(x)) * up(x)`` (https://arxiv.org/abs/2002.05202), followed by a second linear."""

    def __init__(
        self,
        size: int,
        inner: int,
        act: str,
        *,
        gated: bool = False,
        bias: bool = True,
        names: tuple[str, str] | None = None,
        **factory: Unpack[Factory],
    ) -> None:
        """names: of both layers in checkpoints (default: Llama's)."""
        super().__init__()
        self._gated = gated
        first, self._last = names or ("gate_up_proj" if gated else "up_proj", "down_proj")
        self.readers = (first,)
        parts = {"gate_proj": inner, "up_proj": inner}
        kind: dict[str, Any] = {"bias": bias, **factory}
        self.add_module(first, GatedLinear(size, parts, act, **kind) if gated else Linear(size, inner, act=act, **kind))
        self.add_module(self._last, Linear(inner, size, **kind))

    @property
    def reader(self) -> Linear:
        return self._modules[self.readers[0]]  # type: ignore[return-value]

    @property
    def last(self) -> Linear:
        return self._modules[self._last]  # type: ignore[return-value]

    @property
    def products(self) -> int:
        return self.reader.products + self.last.products

    def forward(self, x: Normed) -> Unfinished:
        return Unfinished(self.last, self.reader.read_by(self.last, x))

    def split(self, whole: ArchSpec, index: int, ranks: Ranks) -> None:
        self.split_inner(whole.inner_size(index), ranks)

    def split_inner(self, whole: int, ranks: Ranks) -> None:
        inner, last = shares(whole, ranks), self.last
        self.reader.shard = Shard((inner, inner) if self._gated else (inner,))
        self.add_module(self._last, RowParallelLinear(last, inner, ranks))

    def folds(self, name: str) -> Iterator[Fold]:
        """The output is linear in `up`, so it takes the factors of the second layer."""
        if self._gated:
            inner = self.last.in_features
            yield Fold((f"{name}.{self._last}",), producer=f"{name}.{self.readers[0]}", rows=(inner, 2 * inner))
