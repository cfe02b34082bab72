"""Vectors of prompts, as sentence-transformers pools them."""

from __future__ import annotations

import torch
from torch import Tensor

from vlmserve.runner.heads.head import Head
from vlmserve.tasks import Embed


class EmbedHead(Head):
    """Pools hidden states. Mean pooling keeps a sum, so a prompt may be computed in any chunks."""

    def __init__(self, task: Embed, num_tokens: int) -> None:
        super().__init__(task, num_tokens)
        self._task = task
        self._pooled: Tensor | None = None

    def places(self, start: int, end: int) -> range:
        wanted = super().places(start, end)
        return wanted if self._task.pooling != "cls" else wanted[: max(0, 1 - self._next)]

    def _add(self, rows: Tensor) -> None:
        total = rows.sum(0)
        self._pooled = total if self._pooled is None else self._pooled + total

    def result(self) -> Tensor:
        assert self._pooled is not None
        vector = self._pooled / self.num_tokens if self._task.pooling == "mean" else self._pooled
        vector = vector[: self._task.dimensions]
        return torch.nn.functional.normalize(vector, dim=0) if self._task.normalize else vector
