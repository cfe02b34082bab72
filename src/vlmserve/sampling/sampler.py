"""From logits to tokens, for a batch in which every row has its own parameters.

A row's random number is a function of its seed and of how many tokens it has generated, so a request gives the same
tokens alone, in any batch and after a preemption.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vlmserve.kernels import cpu_sampling
from vlmserve.sampling.grammar import Allowed, Matcher
from vlmserve.sampling.logits_processor import LogitsProcessor
from vlmserve.types import SamplingParams

_CDF_CHUNK = 256
_TOP_P_CANDIDATES = 256


class SamplingRow(NamedTuple):
    """How to sample one row. num_generated: tokens so far. banned: token ids that must not come now. logits_processor:
    of its biases and penalties, if it has any. allowed: ``[vocabulary]``, what a grammar leaves; None: all. matcher:
    where it stands in that grammar."""

    params: SamplingParams
    seed: int
    num_generated: int
    banned: frozenset[int] = frozenset()
    logits_processor: LogitsProcessor | None = None
    allowed: Allowed | None = None
    matcher: Matcher | None = None


def uniform(seed: int, index: int) -> float:
    """The `index`-th number of a seed's stream, uniform in [0, 1), the same on every machine."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    # 52 bits: times any positive float64, a number below 1 stays below it.
    return (int.from_bytes(digest, "little") >> 12) / 2**52


def draw_seed(seed: int, number: int) -> int:
    """The seed of an engine's `number`-th request, if it brings none."""
    return int(uniform(seed, number) * 2**52)


def sample(logits: Tensor, rows: list[SamplingRow], *, native: bool = False) -> list[int | None]:
    """One token for each row of float32 ``[rows, vocabulary]`` logits; None where they hold a NaN or only -inf.

    native: draw by the native kernel, which sorts nothing. Overwrites `logits`. Grammars come first, then biases and
    penalties, then filters in the order temperature, top-k, top-p, min-p, each on what the one before has left; tokens
    that tie with the last one kept are kept, too.
    """
    for number, row in enumerate(rows):
        if row.allowed is not None:
            _forbid(logits[number], ~row.allowed)
    processors = {index: row.logits_processor for index, row in enumerate(rows) if row.logits_processor is not None}
    if processors:
        process_logits(logits, processors)
    for number, row in enumerate(rows):
        if row.banned:
            logits[number, torch.tensor(sorted(row.banned), device=logits.device)] = -torch.inf
    if native:
        return _draw_natively(logits, rows)
    greedy = [number for number, row in enumerate(rows) if row.params.temperature == 0]
    random = [number for number, row in enumerate(rows) if row.params.temperature > 0]
    tokens: list[int | None] = [None] * len(rows)
    for numbers, choose in ((greedy, _argmax), (random, _draw)):
        if numbers:
            subset = logits if len(numbers) == len(rows) else logits[torch.tensor(numbers, device=logits.device)]
            chosen = choose(subset, [rows[number] for number in numbers])
            for number, token in zip(numbers, chosen, strict=True):
                tokens[number] = token
    return tokens


def _forbid(row: Tensor, forbidden: Allowed) -> None:
    """Make tokens of a ``[vocabulary]`` row impossible, in place."""
    if row.device.type == "cpu":
        np.copyto(row.numpy(), -np.inf, where=forbidden)  # takes a quarter of torch's time
    else:
        row.masked_fill_(torch.from_numpy(forbidden).to(row.device), -torch.inf)


def process_logits(logits: Tensor, processors: Mapping[int, LogitsProcessor]) -> None:
    """Biases, then penalties, in place, of some rows of float32 ``[rows, vocabulary]`` logits.

    The repetition penalty is that of CTRL (https://arxiv.org/abs/1909.05858, 4.1), applied to logits of either sign as
    transformers does; the other two are OpenAI's.
    """

    def on_device(arrays: Sequence[npt.NDArray[Any]]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(logits.device)

    biased = [(number, own) for number, own in processors.items() if len(own.bias_ids)]
    if biased:
        rows = on_device([np.full(len(own.bias_ids), number) for number, own in biased])
        ids = on_device([own.bias_ids for _, own in biased])
        logits[rows, ids] += on_device([own.biases for _, own in biased])
    penalized = [(number, own, own.counts) for number, own in processors.items() if own.counts is not None]
    if penalized:
        rows = on_device([np.full(len(counts.ids), number) for number, _, counts in penalized])
        ids = on_device([counts.ids for _, _, counts in penalized])
        penalties = [
            np.full(len(counts.ids), own.params.repetition_penalty, np.float32) for _, own, counts in penalized
        ]
        repetition, scores = on_device(penalties), logits[rows, ids]
        scores = torch.where(scores > 0, scores / repetition, scores * repetition)
        logits[rows, ids] = scores - on_device([own.subtracted for _, own, _ in penalized])


def filter_logits(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Temperature, top-k, top-p and min-p, in place: -inf for what may not be drawn, 0 for the likeliest tokens."""
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    logits.sub_(logits.amax(-1, keepdim=True)).div_(_column([p.temperature for p in params], logits))
    vocabulary = logits.shape[1]
    restricted = [number for number, p in enumerate(params) if 0 < p.top_k < vocabulary or p.top_p < 1]
    if restricted:
        subset = torch.tensor(restricted, device=logits.device)
        lowest = torch.full((len(params), 1), -torch.inf, device=logits.device)
        lowest[subset] = _lowest_kept(
            logits if len(restricted) == len(params) else logits[subset], [params[number] for number in restricted]
        )
        logits.masked_fill_(logits < lowest, -torch.inf)
    if any(p.min_p > 0 for p in params):
        logits.masked_fill_(logits < _column([p.min_p for p in params], logits).log(), -torch.inf)
    return logits


def _lowest_kept(logits: Tensor, params: list[SamplingParams], candidates: int = _TOP_P_CANDIDATES) -> Tensor:
    """``[rows, 1]``: the smallest logit that top-k and top-p keep.

    Only the `candidates` largest logits are sorted; where top-p wants more of them, that row is sorted whole.
    """
    vocabulary = logits.shape[1]
    top_ks = [min(p.top_k, vocabulary) if p.top_k else vocabulary for p in params]
    limited = [k for k in top_ks if k < vocabulary]
    needed = max([*limited, candidates if any(p.top_p < 1 for p in params) else 1])
    ordered = logits.topk(min(needed, vocabulary), dim=-1).values
    rank = torch.arange(ordered.shape[1], device=logits.device)
    in_top_k = rank < torch.tensor(top_ks, device=logits.device).unsqueeze(1)
    weights = ordered.exp().masked_fill(~in_top_k, 0)
    total = weights.sum(-1, keepdim=True)
    all_kept = torch.tensor([[k == vocabulary] for k in top_ks], device=logits.device)
    if len(limited) < len(params):
        total = torch.where(all_kept, logits.exp().sum(-1, keepdim=True), total)
    mass_before = (weights.cumsum(-1) - weights) / total
    kept = in_top_k & (mass_before < _column([p.top_p for p in params], logits))
    kept[:, 0] = True
    lowest = ordered.gather(1, kept.sum(-1, keepdim=True) - 1)
    # Where every candidate was kept though more tokens may be wanted, the limit lies further down.
    unsure = (kept[:, -1:] & all_kept).flatten() if ordered.shape[1] < vocabulary else None
    if unsure is not None and bool(unsure.any()):
        numbers = unsure.nonzero().flatten()
        lowest[numbers] = _lowest_kept(logits[numbers], [params[number] for number in numbers.tolist()], vocabulary)
    return lowest


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device).unsqueeze(1)


def _argmax(logits: Tensor, rows: list[SamplingRow]) -> list[int | None]:
    # On a CPU numpy's argmax is vectorized and several times faster than torch's.
    best = torch.from_numpy(logits.numpy().argmax(-1)) if logits.device.type == "cpu" else logits.argmax(-1)
    # The largest of values with a NaN among them is a NaN, so one pass over the logits is enough.
    return _unless_unusable(best.tolist(), logits.gather(1, best.unsqueeze(1)))


def _unless_unusable(tokens: list[int], signs: Tensor) -> list[int | None]:
    """None for tokens of unusable rows. signs: ``[rows, 1]``, a finite number for each row that is usable."""
    return [token if math.isfinite(sign) else None for token, (sign,) in zip(tokens, signs.tolist(), strict=True)]


def _draw(logits: Tensor, rows: list[SamplingRow]) -> list[int | None]:
    """Inverse transform sampling: the token at which the cumulated probability passes the row's random number."""
    weights = filter_logits(logits, [row.params for row in rows]).exp_()
    padding = -weights.shape[1] % _CDF_CHUNK
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    weights = weights.view(len(rows), -1, _CDF_CHUNK)
    # Summing chunk by chunk in float64 is exact enough for any vocabulary, and only one chunk a row is cumulated.
    # The CPU does it for all devices: the sums are small, and not every accelerator has float64.
    chunk_ends = weights.sum(-1).cpu().double().cumsum(-1)
    numbers = torch.tensor([[uniform(row.seed, row.num_generated)] for row in rows], dtype=torch.float64)
    targets = numbers * chunk_ends[:, -1:]
    chunk = torch.searchsorted(chunk_ends, targets, right=True).clamp_(max=chunk_ends.shape[1] - 1)
    start = torch.where(chunk > 0, chunk_ends.gather(1, (chunk - 1).clamp_(min=0)), 0.0)
    picked = weights[torch.arange(len(rows), device=weights.device), chunk.squeeze(1).to(weights.device)].cpu()
    ends = start + picked.double().cumsum(-1)
    inside = torch.searchsorted(ends, targets, right=True)
    # Rounding may point just past the last possible token of the chunk: fall back on that one.
    last_possible = (picked > 0) * torch.arange(_CDF_CHUNK)
    inside = torch.minimum(inside, last_possible.amax(-1, keepdim=True))
    # What was filtered has a largest weight of 1, or a NaN where the logits are unusable.
    return _unless_unusable((chunk * _CDF_CHUNK + inside).squeeze(1).tolist(), chunk_ends[:, -1:])


def _draw_natively(logits: Tensor, rows: list[SamplingRow]) -> list[int | None]:
    tokens = cpu_sampling.draw(
        logits,
        temperatures=[row.params.temperature for row in rows],
        top_ks=[row.params.top_k for row in rows],
        top_ps=[row.params.top_p for row in rows],
        min_ps=[row.params.min_p for row in rows],
        numbers=[uniform(row.seed, row.num_generated) if row.params.temperature else 0.0 for row in rows],
    )
    return [None if token < 0 else token for token in tokens]
