"""Log-probabilities of tokens after a prompt."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from vlmserve.models.protocols import LanguageModel
from vlmserve.runner.heads.head import Head
from vlmserve.sampling.logprobs import MAX_LOGITS
from vlmserve.tasks import Score, ScoreBranch


class TokenHead(Head):
    """Reads log-probabilities of tokens instead of states."""

    def __init__(self, task: Score | ScoreBranch, num_tokens: int) -> None:
        super().__init__(task, num_tokens)
        self._read: list[Tensor] = []

    @abstractmethod
    def tokens_after(self, place: int, token_ids: Sequence[int]) -> Sequence[int]:
        """token_ids: of the sequence."""

    def _add(self, rows: Tensor) -> None:
        self._read.append(rows)

    def result(self) -> Tensor:
        return self._read[0] if len(self._read) == 1 else torch.cat(self._read)


class ScoreHead(TokenHead):
    """Scores the first token of each continuation. With drafts, it also scores the rest of `Score.first_branch`."""

    def __init__(self, task: Score, num_tokens: int) -> None:
        super().__init__(task, num_tokens)
        self._first = [tokens[0] for tokens in task.continuations]
        self._branch = task.first_branch

    def tokens_after(self, place: int, token_ids: Sequence[int]) -> Sequence[int]:
        number = place + 1 - self.num_tokens
        return self._branch[number : number + 1] if number else self._first


class BranchHead(TokenHead):
    def __init__(self, task: ScoreBranch, num_tokens: int) -> None:
        super().__init__(task, num_tokens)
        self._last = task.last

    def tokens_after(self, place: int, token_ids: Sequence[int]) -> Sequence[int]:
        return [token_ids[place + 1] if place + 1 < len(token_ids) else self._last]


def logprobs_after(hidden: Tensor, wanted: Sequence[Sequence[int]], model: LanguageModel) -> Tensor:
    """Return the log-probabilities of the tokens wanted after each state, float32.

    hidden: ``[tokens, hidden_size]``. Computes at most `MAX_LOGITS` logits at a time.
    """
    at_once = max(1, MAX_LOGITS // model.vocab_size)
    scores = []
    for start in range(0, len(wanted), at_once):
        piece = wanted[start : start + at_once]
        logprobs = model.logits(hidden[start : start + at_once]).log_softmax(-1)
        places = [(row, token) for row, tokens in enumerate(piece) for token in tokens]
        rows, tokens = torch.tensor(places, device=hidden.device).unbind(1)
        scores.append(logprobs[rows, tokens])
    return torch.cat(scores)
