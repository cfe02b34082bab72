"""Drawing tokens by torch's operations, on any device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_CDF_CHUNK = 256
_TOP_P_CANDIDATES = 256

T = TypeVar("T")


class Draw(Protocol):
    """Draws a token for each row."""

    def __call__(
        self,
        logits: Tensor,
        *,
        temperatures: Sequence[float],
        top_ks: Sequence[int],
        top_ps: Sequence[float],
        min_ps: Sequence[float],
        numbers: Sequence[float],
    ) -> list[int]:
        """A token for each row of float32 ``[rows, vocabulary]`` logits, which it may overwrite; -1 where they hold a
        NaN or no finite maximum.

        Temperature (0 takes the first of the likeliest), top-k (0: all), top-p and min-p apply in this order, each to
        what the one before has left; tokens that tie with the last one kept are kept, too. numbers: uniform in [0, 1),
        which decide the draw.
        """
        ...


class Changes(NamedTuple):
    """What rows of logits are changed by before they are drawn from. entries: int64 ``[2, count]``: rows and tokens,
    each pair once. amounts: float32 ``[3, count]``: what is added first, the repetition penalty, and what is subtracted
    last."""

    entries: npt.NDArray[np.int64]
    amounts: npt.NDArray[np.float32]


class DrawLater(Protocol):
    """Draws tokens that stay on the device, so that the host need not wait for them."""

    def arrays(self, filters: Filters, numbers: Sequence[float], changes: Changes) -> list[npt.NDArray[Any]]:
        """What has to be on the device, as `launch` takes it. temperatures of `filters` may be 0."""
        ...

    def launch(self, logits: Tensor, uploaded: Sequence[Tensor]) -> Tensor:
        """int32 ``[rows]``, as `Draw` gives them; never waits for the device. uploaded: `arrays` on the device."""
        ...


class Filters(NamedTuple):
    """What may be drawn, one of each for every row. temperatures: above 0. top_ks: 0 for all."""

    temperatures: Sequence[float]
    top_ks: Sequence[int]
    top_ps: Sequence[float]
    min_ps: Sequence[float]

    def of(self, rows: Sequence[int]) -> Filters:
        """Those of some rows."""

        def pick(values: Sequence[T]) -> list[T]:
            return [values[row] for row in rows]

        return Filters(pick(self.temperatures), pick(self.top_ks), pick(self.top_ps), pick(self.min_ps))


def draw(
    logits: Tensor,
    *,
    temperatures: Sequence[float],
    top_ks: Sequence[int],
    top_ps: Sequence[float],
    min_ps: Sequence[float],
    numbers: Sequence[float],
) -> list[int]:
    """See `Draw`."""
    filters = Filters(temperatures, top_ks, top_ps, min_ps)
    greedy = [row for row, temperature in enumerate(temperatures) if temperature == 0]
    random = [row for row, temperature in enumerate(temperatures) if temperature > 0]
    tokens = [-1] * len(logits)
    for rows, by_chance in ((greedy, False), (random, True)):
        if rows:
            subset = logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]
            chosen = _draw(subset, filters.of(rows), [numbers[row] for row in rows]) if by_chance else _argmax(subset)
            for row, token in zip(rows, chosen, strict=True):
                tokens[row] = token
    return tokens


def filter_logits(logits: Tensor, filters: Filters) -> Tensor:
    """Temperature, top-k, top-p and min-p, in place: -inf for what may not be drawn, 0 for the likeliest tokens."""
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
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
    """``[rows, 1]``: the smallest logit that top-k and top-p keep.

    Only the `candidates` largest logits are sorted; where top-p wants more of them, that row is sorted whole.
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
    # Where every candidate was kept though more tokens may be wanted, the limit lies further down.
    unsure = (kept[:, -1:] & all_kept).flatten() if ordered.shape[1] < vocabulary else None
    if unsure is not None and bool(unsure.any()):
        rows = unsure.nonzero().flatten()
        lowest[rows] = _lowest_kept(logits[rows], filters.of(rows.tolist()), vocabulary)
    return lowest


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device).unsqueeze(1)


def _argmax(logits: Tensor) -> list[int]:
    # On a CPU numpy's argmax is vectorized and several times faster than torch's.
    best = torch.from_numpy(logits.numpy().argmax(-1)) if logits.device.type == "cpu" else logits.argmax(-1)
    # The largest of values with a NaN among them is a NaN, so one pass over the logits is enough.
    return _unless_unusable(best.tolist(), logits.gather(1, best.unsqueeze(1)))


def _unless_unusable(tokens: list[int], signs: Tensor) -> list[int]:
    """-1 for tokens of unusable rows. signs: ``[rows, 1]``, a finite number for each row that is usable."""
    return [token if math.isfinite(sign) else -1 for token, (sign,) in zip(tokens, signs.tolist(), strict=True)]


def _draw(logits: Tensor, filters: Filters, numbers: Sequence[float]) -> list[int]:
    """Inverse transform sampling: the token at which the cumulated probability passes the row's random number."""
    weights = filter_logits(logits, filters).exp_()
    rows = len(weights)
    padding = -weights.shape[1] % _CDF_CHUNK
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    weights = weights.view(rows, -1, _CDF_CHUNK)
    # Summing chunk by chunk in float64 is exact enough for any vocabulary, and only one chunk a row is cumulated.
    # The CPU does it for all devices: the sums are small, and not every accelerator has float64.
    chunk_ends = weights.sum(-1).cpu().double().cumsum(-1)
    targets = torch.tensor(numbers, dtype=torch.float64)[:, None] * chunk_ends[:, -1:]
    chunk = torch.searchsorted(chunk_ends, targets, right=True).clamp_(max=chunk_ends.shape[1] - 1)
    start = torch.where(chunk > 0, chunk_ends.gather(1, (chunk - 1).clamp_(min=0)), 0.0)
    picked = weights[torch.arange(rows, device=weights.device), chunk.squeeze(1).to(weights.device)].cpu()
    ends = start + picked.double().cumsum(-1)
    inside = torch.searchsorted(ends, targets, right=True)
    # Rounding may point just past the last possible token of the chunk: fall back on that one.
    last_possible = (picked > 0) * torch.arange(_CDF_CHUNK)
    inside = torch.minimum(inside, last_possible.amax(-1, keepdim=True))
    # What was filtered has a largest weight of 1, or a NaN where the logits are unusable.
    return _unless_unusable((chunk * _CDF_CHUNK + inside).squeeze(1).tolist(), chunk_ends[:, -1:])
