"""Per-layer embeddings: each token has a small embedding for each layer (Gemma 3n)."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from vlmserve.families.spec import ArchSpec, PerLayerSpec
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import Embedding, Linear
from vlmserve.layers.parallel import Ranks
from vlmserve.layers.residual import Unfinished
from vlmserve.models.blocks.block import Block, make_norm


class PerLayerEmbeddings(nn.Module):
    def __init__(self, spec: ArchSpec, own: PerLayerSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self._size, width = own.size, own.size * len(spec.mixers)
        self.table = Embedding(own.vocab_size, width, **factory)
        self.projection = Linear(spec.hidden_size, width, bias=False, **factory)
        self.projection.stays_plain = True
        self.norm = make_norm(spec.norm, own.size, **factory)
        self._projection_scale = spec.hidden_size**-0.5
        # Rounded like in transformers.
        self._table_scale = torch.tensor(own.size**0.5, dtype=factory["dtype"]).item()

    def of_tokens(self, token_ids: Tensor) -> Tensor:
        """int64 ``[tokens]`` to ``[tokens, layers * size]``."""
        embeddings: Tensor = self.table(token_ids)
        return embeddings * self._table_scale

    def forward(self, inputs: Tensor, of_tokens: Tensor) -> Tensor:
        """``[tokens, hidden_size]`` of the first layer to ``[tokens, layers * size]``."""
        projected = (self.projection(inputs) * self._projection_scale).view(len(inputs), -1, self._size)
        normed: Tensor = self.norm(projected.contiguous())
        return (normed.view_as(of_tokens) + of_tokens) * 2**-0.5


class PerLayerInput(Block):
    """Adds a projection of a layer's embeddings, gated by the residual stream."""

    readers = ("gate",)

    def __init__(self, spec: ArchSpec, size: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.gate = Linear(spec.hidden_size, size, bias=False, act=spec.activation, **factory)
        self.projection = Linear(size, spec.hidden_size, bias=False, **factory)
        self.gate.stays_plain = self.projection.stays_plain = True

    def forward(self, x: Tensor, inputs: Tensor) -> Unfinished:
        """x: ``[tokens, hidden_size]``. inputs: of this layer, ``[tokens, size]``."""
        return Unfinished(self.projection, self.gate(x) * inputs)

    def split(self, whole: ArchSpec, index: int, ranks: Ranks) -> None: ...
