"""Embeddings of prompts, pooled as in sentence-transformers, and of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from vlmserve.models.output_layers import OutputLayers
from vlmserve.runner.heads.head import Head
from vlmserve.tasks import Embed


class EmbedHead(Head):
    """Mean pooling keeps a running sum, so prompts may be chunked."""

    def __init__(self, task: Embed, num_tokens: int, layers: OutputLayers | None = None) -> None:
        """layers: applied to pooled states."""
        super().__init__(task, num_tokens)
        self._task, self._layers = task, layers
        self._pooled: Tensor | None = None
        self._vectors: list[Tensor] = []

    def places(self, start: int, end: int) -> range:
        wanted = super().places(start, end)
        return wanted if self._task.pooling != "cls" else wanted[: max(0, 1 - self._next)]

    def _add(self, rows: Tensor) -> None:
        if self._task.pooling == "all":
            self._vectors.append(self._finished(rows))
            return
        total = rows.sum(0)
        self._pooled = total if self._pooled is None else self._pooled + total

    def result(self) -> Tensor:
        if self._task.pooling == "all":
            return torch.cat(self._vectors).flatten()
        assert self._pooled is not None
        vector = self._pooled / self.num_tokens if self._task.pooling == "mean" else self._pooled
        return self._finished(vector[None])[0]

    def _finished(self, rows: Tensor) -> Tensor:
        rows = rows if self._layers is None else self._layers(rows)
        rows = rows[:, : self._task.dimensions]
        return torch.nn.functional.normalize(rows, dim=1) if self._task.normalize else rows
