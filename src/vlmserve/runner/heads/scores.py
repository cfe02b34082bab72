"""Probability of continuations by their first tokens."""

from __future__ import annotations

from torch import Tensor

from vlmserve.runner.heads.head import Head
from vlmserve.tasks import Score


class ScoreHead(Head):
    reads_logits = True

    def __init__(self, task: Score, num_tokens: int) -> None:
        super().__init__(task, num_tokens)
        self._token_ids = [tokens[0] for tokens in task.continuations]
        self._scores: Tensor | None = None

    def _add(self, rows: Tensor) -> None:
        self._scores = rows[0].log_softmax(0)[self._token_ids]

    def result(self) -> Tensor:
        assert self._scores is not None
        return self._scores
