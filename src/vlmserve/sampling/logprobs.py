"""How likely tokens were, by a model's own logits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from vlmserve.types import TokenLogprobs


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """One for each row of float32 ``[rows, vocabulary]`` logits, which it overwrites.

    token_ids: one of each row. num_top: how many of the likeliest tokens each row wants told; those that are equally
    likely come in the order of their ids.
    """
    scores = logits.sub_(logits.logsumexp(-1, keepdim=True))
    chosen = scores.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))
    ranks = ((scores > chosen).sum(-1) + 1).tolist()
    tops = _top(scores, min(max(num_top, default=0), logits.shape[1]))
    return [
        TokenLogprobs(token_id, score, rank, tuple(top[:count]))
        for token_id, score, rank, top, count in zip(
            token_ids, chosen.squeeze(1).tolist(), ranks, tops, num_top, strict=True
        )
    ]


def _top(scores: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The `count` largest scores of each row with their places, in order."""
    if count == 0:
        return [[] for _ in range(len(scores))]
    lowest = scores.topk(count, dim=-1).values[:, -1:]
    # topk says nothing of which of several equal ones it takes, and greedy sampling takes the first.
    rows, places = (scores >= lowest).nonzero(as_tuple=True)
    values = scores[rows, places].cpu().numpy()
    row_numbers, ids = rows.cpu().numpy(), places.cpu().numpy()
    order = np.lexsort((ids, -values, row_numbers))
    # A row of NaN has none.
    bounds = np.searchsorted(row_numbers, np.arange(len(scores) + 1)).tolist()
    best = [order[start : min(start + count, end)] for start, end in pairwise(bounds)]
    return [list(zip(ids[top].tolist(), values[top].tolist(), strict=True)) for top in best]
