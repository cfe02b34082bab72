"""Samples tokens with torch, on any device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_CDF_CHUNK = 256
_TOP_P_CANDIDATES = 256

T = TypeVar("T")


class Filters(NamedTuple):
    """One value per row, applied in this order. Ties stay."""

    temperatures: Sequence[float]
    """0: the first most likely token."""
    top_ks: Sequence[int]
    """0: all."""
    top_ps: Sequence[float]
    min_ps: Sequence[float]

    def of(self, rows: Sequence[int]) -> Filters:
        def pick(values: Sequence[T]) -> list[T]:
            return [values[row] for row in rows]

        return Filters(pick(self.temperatures), pick(self.top_ks), pick(self.top_ps), pick(self.min_ps))


Draw = Callable[[Tensor, Filters, Sequence[float]], list[int]]
"""Samples from float32 ``[rows, vocabulary]`` logits, which it may overwrite, with a random number in [0, 1) per row.

Returns -1 for rows with NaN or without a finite maximum.
"""


class Changes(NamedTuple):
    entries: npt.NDArray[np.int64]
    """int64 ``[2, count]``: distinct pairs of row and token."""
    amounts: npt.NDArray[np.float32]
    """float32 ``[3, count]``: what to add first, the repetition penalty, what to subtract last."""


class DrawLater(Protocol):
    def arrays(self, filters: Filters, numbers: Sequence[float], changes: Changes) -> list[npt.NDArray[Any]]: ...

    def launch(self, logits: Tensor, uploaded: Sequence[Tensor]) -> Tensor:
        """Return int32 ``[rows]``, equal to `Draw`. uploaded: `arrays` on the device."""
        ...


def draw(logits: Tensor, filters: Filters, numbers: Sequence[float]) -> list[int]:
    greedy = [row for row, temperature in enumerate(filters.temperatures) if temperature == 0]
    random = [row for row, temperature in enumerate(filters.temperatures) if temperature > 0]
    tokens = [-1] * len(logits)
    for rows, by_chance in ((greedy, False), (random, True)):
        if rows:
            subset = logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]
            chosen = _draw(subset, filters.of(rows), [numbers[row] for row in rows]) if by_chance else _argmax(subset)
            for row, token in zip(rows, chosen, strict=True):
                tokens[row] = token
    return tokens


def filter_logits(logits: Tensor, filters: Filters) -> Tensor:
    """In place: -inf for excluded tokens, 0 for the most likely. Temperatures must be above 0."""
    # tiny temperatures must not overflow
    logits.sub_(logits.amax(-1, keepdim=True)).div_(_column(filters.temperatures, logits))
    rows, vocabulary = logits.shape
    pairs = zip(filters.top_ks, filters.top_ps, strict=True)
    restricted = [row for row, (top_k, top_p) in enumerate(pairs) if 0 < top_k < vocabulary or top_p < 1]
    if restricted:
        subset = torch.tensor(restricted, device=logits.device)
        lowest = torch.full((rows, 1), -torch.inf, device=logits.device)
        all_are = len(restricted) == rows
        lowest[subset] = _lowest_kept(logits if all_are else logits[subset], filters.of(restricted))
        logits.masked_fill_(logits < lowest, -torch.inf)
    if any(min_p > 0 for min_p in filters.min_ps):
        logits.masked_fill_(logits < _column(filters.min_ps, logits).log(), -torch.inf)
    return logits


def _lowest_kept(logits: Tensor, filters: Filters, candidates: int = _TOP_P_CANDIDATES) -> Tensor:
    """Return ``[rows, 1]``: the smallest logit that top-k and top-p keep.

    Sorts the `candidates` largest logits, and a whole row only if its top-p needs more.
    """
    vocabulary = logits.shape[1]
    top_ks = [min(top_k, vocabulary) if top_k else vocabulary for top_k in filters.top_ks]
    limited = [k for k in top_ks if k < vocabulary]
    needed = max([*limited, candidates if any(top_p < 1 for top_p in filters.top_ps) else 1])
    ordered = logits.topk(min(needed, vocabulary), dim=-1).values
    rank = torch.arange(ordered.shape[1], device=logits.device)
    in_top_k = rank < torch.tensor(top_ks, device=logits.device).unsqueeze(1)
    weights = ordered.exp().masked_fill(~in_top_k, 0)
    total = weights.sum(-1, keepdim=True)
    all_kept = torch.tensor([[k == vocabulary] for k in top_ks], device=logits.device)
    if len(limited) < len(top_ks):
        total = torch.where(all_kept, logits.exp().sum(-1, keepdim=True), total)
    mass_before = (weights.cumsum(-1) - weights) / total
    kept = in_top_k & (mass_before < _column(filters.top_ps, logits))
    kept[:, 0] = True
    lowest = ordered.gather(1, kept.sum(-1, keepdim=True) - 1)
    # a row that kept all candidates may need more of them
    unsure = (kept[:, -1:] & all_kept).flatten() if ordered.shape[1] < vocabulary else None
    if unsure is not None and bool(unsure.any()):
        rows = unsure.nonzero().flatten()
        lowest[rows] = _lowest_kept(logits[rows], filters.of(rows.tolist()), vocabulary)
    return lowest


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device).unsqueeze(1)


def _argmax(logits: Tensor) -> list[int]:
    # on a CPU, numpy's argmax is several times faster than torch's
    best = torch.from_numpy(logits.numpy().argmax(-1)) if logits.device.type == "cpu" else logits.argmax(-1)
    # the argmax of a row with NaN is a NaN
    return _unless_unusable(best.tolist(), logits.gather(1, best.unsqueeze(1)))


def _unless_unusable(tokens: list[int], signs: Tensor) -> list[int]:
    """signs: ``[rows, 1]``, finite for usable rows."""
    return [token if math.isfinite(sign) else -1 for token, (sign,) in zip(tokens, signs.tolist(), strict=True)]


def _draw(logits: Tensor, filters: Filters, numbers: Sequence[float]) -> list[int]:
    """Inverse transform: the token where the cumulative probability exceeds the random number."""
    weights = filter_logits(logits, filters).exp_()
    rows = len(weights)
    padding = -weights.shape[1] % _CDF_CHUNK
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    weights = weights.view(rows, -1, _CDF_CHUNK)
    # Sum chunks in float64, and accumulate one chunk per row, on the CPU, because some accelerators lack float64.
    chunk_ends = weights.sum(-1).cpu().double().cumsum(-1)
    targets = torch.tensor(numbers, dtype=torch.float64)[:, None] * chunk_ends[:, -1:]
    chunk = torch.searchsorted(chunk_ends, targets, right=True).clamp_(max=chunk_ends.shape[1] - 1)
    start = torch.where(chunk > 0, chunk_ends.gather(1, (chunk - 1).clamp_(min=0)), 0.0)
    picked = weights[torch.arange(rows, device=weights.device), chunk.squeeze(1).to(weights.device)].cpu()
    ends = start + picked.double().cumsum(-1)
    inside = torch.searchsorted(ends, targets, right=True)
    # rounding may point past the last possible token
    last_possible = (picked > 0) * torch.arange(_CDF_CHUNK)
    inside = torch.minimum(inside, last_possible.amax(-1, keepdim=True))
    # a maximum weight of 1, or NaN if unusable
    return _unless_unusable((chunk * _CDF_CHUNK + inside).squeeze(1).tolist(), chunk_ends[:, -1:])
