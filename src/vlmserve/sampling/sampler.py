"""From logits to tokens, for a batch in which every row has its own parameters.

A row's random number is a function of its seed and of how many tokens it has generated, so a request gives the same
tokens alone, in any batch and after a preemption.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmserve.types import SamplingParams

_CDF_CHUNK = 256


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How to sample one row. index: tokens generated so far. banned: token ids that must not come now."""

    params: SamplingParams
    seed: int
    index: int
    banned: frozenset[int] = frozenset()


def uniform(seed: int, index: int) -> float:
    """The `index`-th number of a seed's stream, uniform in [0, 1), the same on every machine."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    # 52 bits: times any positive float64, a number below 1 stays below it.
    return (int.from_bytes(digest, "little") >> 12) / 2**52


def draw_seed(seed: int, number: int) -> int:
    """The seed of an engine's `number`-th request, if it brings none."""
    return int(uniform(seed, number) * 2**52)


def sample(logits: Tensor, rows: list[SamplingRow]) -> list[int | None]:
    """One token for each row of float32 ``[rows, vocabulary]`` logits; None where they hold a NaN or only -inf.

    Changes `logits` in place. Filters apply in the order temperature, top-k, top-p, min-p, each on what the one
    before has left.
    """
    for number, row in enumerate(rows):
        if row.banned:
            logits[number, torch.tensor(sorted(row.banned), device=logits.device)] = -torch.inf
    best_values, tokens = logits.max(dim=-1)
    random = [number for number, row in enumerate(rows) if row.params.temperature > 0]
    if random:
        subset = torch.tensor(random, device=logits.device)
        tokens[subset] = _sample_random(logits[subset], [rows[number] for number in random])
    usable = torch.isfinite(best_values).tolist()
    return [token if ok else None for token, ok in zip(tokens.tolist(), usable, strict=True)]


def filter_logits(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Temperature, top-k, top-p and min-p: float32 ``[rows, vocabulary]`` with -inf for what may not be drawn."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device).unsqueeze(1)

    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    logits = (logits - logits.amax(-1, keepdim=True)) / column([p.temperature for p in params])
    vocabulary = logits.shape[1]
    top_ks = [min(p.top_k, vocabulary) if p.top_k else vocabulary for p in params]
    needs_top_p = any(p.top_p < 1 for p in params)
    if min(top_ks) < vocabulary or needs_top_p:
        if needs_top_p:
            ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        else:
            largest = max(k for k in top_ks if k < vocabulary)
            ordered, order = logits.topk(largest, dim=-1)
            top_ks = [min(k, largest) if k < vocabulary else vocabulary for k in top_ks]
        rank = torch.arange(ordered.shape[1], device=logits.device).unsqueeze(0)
        dropped = rank >= torch.tensor(top_ks, device=logits.device).unsqueeze(1)
        if needs_top_p:
            probabilities = ordered.masked_fill(dropped, -torch.inf).softmax(-1)
            before = probabilities.cumsum(-1) - probabilities
            dropped |= before >= column([p.top_p for p in params])
            dropped[:, 0] = False
        kept = torch.full_like(logits, -torch.inf).scatter_(1, order, ordered.masked_fill(dropped, -torch.inf))
        unlimited = torch.tensor([k >= vocabulary and p.top_p >= 1 for k, p in zip(top_ks, params, strict=True)])
        logits = torch.where(unlimited.to(logits.device).unsqueeze(1), logits, kept)
    if any(p.min_p > 0 for p in params):
        floor = column([p.min_p for p in params]).log()
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return logits


def _sample_random(logits: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Inverse transform sampling: the token at which the cumulated probability passes the row's random number."""
    weights = filter_logits(logits, [row.params for row in rows]).exp()
    vocabulary = weights.shape[1]
    weights = torch.nn.functional.pad(weights, (0, -vocabulary % _CDF_CHUNK)).view(len(rows), -1, _CDF_CHUNK)
    # Summing chunk by chunk in float64 is exact enough for any vocabulary, and only one chunk a row is cumulated.
    # The CPU does this for accelerators without float64, too: the sums are small.
    chunk_ends = weights.sum(-1).cpu().double().cumsum(-1)
    numbers = torch.tensor([[uniform(row.seed, row.index)] for row in rows], dtype=torch.float64)
    targets = numbers * chunk_ends[:, -1:]
    chunk = torch.searchsorted(chunk_ends, targets, right=True).clamp_(max=chunk_ends.shape[1] - 1)
    start = torch.where(chunk > 0, chunk_ends.gather(1, (chunk - 1).clamp_(min=0)), 0.0)
    picked = weights[torch.arange(len(rows), device=weights.device), chunk.squeeze(1).to(weights.device)].cpu()
    ends = start + picked.double().cumsum(-1)
    inside = torch.searchsorted(ends, targets, right=True).clamp_(max=_CDF_CHUNK - 1)
    # Rounding may point just past the last possible token of the chunk: fall back on that one.
    last_possible = (picked > 0) * torch.arange(_CDF_CHUNK)
    inside = torch.minimum(inside, last_possible.amax(-1, keepdim=True))
    return (chunk * _CDF_CHUNK + inside).squeeze(1).to(logits.device)
