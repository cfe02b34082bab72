"""Log-probability of a sequence's last tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlmserve.models.protocols import LanguageModel
from vlmserve.runner.heads.head import Head
from vlmserve.sampling.logprobs import MAX_LOGITS
from vlmserve.tasks import ScoreBranch


class BranchHead(Head):
    """Sums log-probabilities. `take` gets the log-probability of the token after each place instead of states."""

    def __init__(self, task: ScoreBranch, num_tokens: int) -> None:
        super().__init__(task, num_tokens)
        self._last = task.last
        self._scores: list[Tensor] = []

    def followers(self, token_ids: Sequence[int], places: range) -> list[int]:
        """Return the token after each place of a sequence."""
        return [token_ids[place + 1] if place + 1 < len(token_ids) else self._last for place in places]

    def _add(self, rows: Tensor) -> None:
        self._scores.append(rows)

    def result(self) -> Tensor:
        return torch.cat(self._scores).sum(0, keepdim=True)


def follower_logprobs(hidden: Tensor, followers: Sequence[int], model: LanguageModel) -> Tensor:
    """Return each state's log-probability of one follower, float32 ``[tokens]``.

    hidden: ``[tokens, hidden_size]``. Computes at most `MAX_LOGITS` logits at once.
    """
    at_once = max(1, MAX_LOGITS // model.vocab_size)
    token_ids = torch.tensor(followers, device=hidden.device).unsqueeze(1)
    scores = [
        model.logits(states).log_softmax(-1).gather(1, ids).squeeze(1)
        for states, ids in zip(torch.split(hidden, at_once), torch.split(token_ids, at_once), strict=True)
    ]
    return torch.cat(scores)
