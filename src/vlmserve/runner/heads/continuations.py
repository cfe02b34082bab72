"""How likely the last tokens of a prompt were."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlmserve.models.protocols import LanguageModel
from vlmserve.runner.heads.head import Head
from vlmserve.sampling.logprobs import MAX_LOGITS
from vlmserve.tasks import ScoreContinuation


class ContinuationHead(Head):
    """Collects the log probabilities of tokens, which it gets chunk by chunk."""

    reads_followers = True

    def __init__(self, task: ScoreContinuation, num_tokens: int) -> None:
        super().__init__(task, num_tokens)
        self._scores: list[Tensor] = []

    def places(self, start: int, end: int) -> range:
        return super().places(start, min(end, self.num_tokens - 1))

    def _add(self, rows: Tensor) -> None:
        self._scores.append(rows)

    def result(self) -> Tensor:
        return torch.cat(self._scores)


def follower_logprobs(hidden: Tensor, followers: Sequence[int], model: LanguageModel) -> Tensor:
    """Return float32 ``[tokens]``: the log probability of one token after each of the ``[tokens, hidden_size]`` states.

    Logits of a limited number of states are in memory at a time.
    """
    at_once = max(1, MAX_LOGITS // model.vocab_size)
    token_ids = torch.tensor(followers, device=hidden.device).unsqueeze(1)
    scores = [
        model.logits(states).log_softmax(-1).gather(1, ids).squeeze(1)
        for states, ids in zip(torch.split(hidden, at_once), torch.split(token_ids, at_once), strict=True)
    ]
    return torch.cat(scores)
