"""Log-probabilities of tokens, from unmodified logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlmserve.types import TokenLogprobs

MAX_LOGITS = 2**23
"""Maximum number of a prompt's logits in memory at a time."""


def token_logprobs(
    logits: Tensor,
    token_ids: Sequence[int],
    num_top: Sequence[int],
    wanted: Sequence[Sequence[int] | None] | None = None,
) -> list[TokenLogprobs]:
    """Return log-probabilities of float32 ``[rows, vocabulary]`` logits.

    token_ids: chosen tokens. num_top: number of most likely tokens; ids break ties. wanted: tokens instead of these.
    """
    scores = logits.log_softmax(-1)
    chosen = scores.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))
    ranks = ((scores > chosen).sum(-1, dtype=torch.int32) + 1).tolist()
    tops = _top(scores, min(max(num_top, default=0), logits.shape[1]))
    for row, ids in enumerate(wanted or ()):
        if ids is not None:
            own = torch.tensor(ids, device=logits.device)
            tops[row] = _in_order(scores[row, own].tolist(), list(ids))
            num_top = [*num_top[:row], len(ids), *num_top[row + 1 :]]
    return [
        TokenLogprobs(token_id, score, rank, tuple(top[:count]))
        for token_id, score, rank, top, count in zip(
            token_ids, chosen.squeeze(1).tolist(), ranks, tops, num_top, strict=True
        )
    ]


def _top(scores: Tensor, count: int) -> list[list[tuple[int, float]]]:
    if count == 0:
        return [[] for _ in range(len(scores))]
    values, places = (part.cpu() for part in scores.topk(min(count + 1, scores.shape[1]), dim=-1))
    tops = [_in_order(*row)[:count] for row in zip(values.tolist(), places.tolist(), strict=True)]
    if values.shape[1] > count:
        # topk breaks ties arbitrarily, greedy sampling takes the first
        for row in (values[:, count - 1] == values[:, count]).nonzero().flatten().tolist():
            (tied,) = (scores[row] >= values[row, count]).nonzero(as_tuple=True)
            tops[row] = _in_order(scores[row, tied].tolist(), tied.tolist())[:count]
    return tops


def _in_order(values: list[float], places: list[int]) -> list[tuple[int, float]]:
    return sorted(zip(places, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
