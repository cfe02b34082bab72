"""Samples tokens for a batch whose rows have their own parameters."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vlmserve.kernels.torch_sampling import Changes, Draw, Filters
from vlmserve.kernels.transfers import to_device
from vlmserve.sampling.grammar import Allowed
from vlmserve.sampling.logits_processor import LogitsProcessor
from vlmserve.types import SamplingParams

_IMPOSSIBLE = -math.inf
"""Logit of a banned token."""


class SamplingRow(NamedTuple):
    params: SamplingParams
    seed: int
    num_generated: int
    banned: frozenset[int] = frozenset()
    """Token ids that must not come next."""
    logits_processor: LogitsProcessor | None = None
    """Biases and penalties."""
    allowed: Allowed | None = None
    """The grammar's mask, ``[vocabulary]``; None: all tokens."""
    forced: int | None = None
    """The only allowed token, whatever the other fields say."""


def uniform(seed: int, index: int) -> float:
    """Number `index` of a seed's stream, in [0, 1), the same on every machine."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    # times a positive float64, the product stays below it
    return (int.from_bytes(digest, "little") >> 12) / 2**52


def draw_seed(seed: int, number: int) -> int:
    """Return the seed for request `number` of an engine."""
    return int(uniform(seed, number) * 2**52)


def sample(logits: Tensor, rows: list[SamplingRow], draw: Draw) -> list[int | None]:
    """Sample float32 ``[rows, vocabulary]`` logits, overwriting them. None: a NaN or only -inf.

    The order is: grammars, biases and penalties, temperature, top-k, top-p, min-p. Filters keep ties. Random numbers
    depend only on the row's seed and number of tokens. draw: the device's kernel.
    """
    for number, row in enumerate(rows):
        if row.allowed is not None:
            _forbid(logits[number], ~row.allowed)
    processors = {index: row.logits_processor for index, row in enumerate(rows) if row.logits_processor is not None}
    if processors:
        process_logits(logits, processors)
    for number, row in enumerate(rows):
        if row.banned:
            logits[number, to_device(torch.tensor(sorted(row.banned)), logits.device)] = _IMPOSSIBLE
        if row.forced is not None:
            score = logits[number, row.forced].clone()
            logits[number] = _IMPOSSIBLE
            logits[number, row.forced] = score
    filters, numbers = filters_of(rows)
    tokens = draw(logits, filters, numbers)
    return [None if token < 0 else token for token in tokens]


def filters_of(rows: Sequence[SamplingRow]) -> tuple[Filters, list[float]]:
    params = [row.params for row in rows]
    filters = Filters(
        [one.temperature for one in params],
        [one.top_k for one in params],
        [one.top_p for one in params],
        [one.min_p for one in params],
    )
    return filters, [uniform(row.seed, row.num_generated) if row.params.temperature else 0.0 for row in rows]


def changes_of(rows: Sequence[SamplingRow]) -> Changes:
    """Each token of a row comes once; a ban is a bias of -inf."""
    entries, amounts = [np.empty((2, 0), np.int64)], [np.empty((3, 0), np.float32)]
    for number, row in enumerate(rows):
        processor = row.logits_processor
        if processor is None and not row.banned:
            continue
        banned = np.fromiter(row.banned, np.int64, len(row.banned))
        counts = None if processor is None else processor.counts
        biased = banned[:0] if processor is None else processor.bias_ids
        counted = banned[:0] if counts is None else counts.ids
        ids = np.unique(np.concatenate((banned, biased, counted)))
        own = np.zeros((3, len(ids)), np.float32)
        own[1] = 1.0
        if processor is not None:
            own[0, np.searchsorted(ids, biased)] = processor.biases
        if processor is not None and counts is not None:
            places = np.searchsorted(ids, counted)
            own[1, places] = processor.params.repetition_penalty
            own[2, places] = processor.subtracted
        own[0, np.searchsorted(ids, banned)] = _IMPOSSIBLE
        entries.append(np.stack((np.full(len(ids), number), ids)))
        amounts.append(own)
    return Changes(np.concatenate(entries, 1), np.concatenate(amounts, 1))


def _forbid(row: Tensor, forbidden: Allowed) -> None:
    """row: ``[vocabulary]``, changed in place."""
    if row.device.type == "cpu":
        np.copyto(row.numpy(), _IMPOSSIBLE, where=forbidden)  # 4x faster than torch
    else:
        row.masked_fill_(to_device(torch.from_numpy(forbidden), row.device), _IMPOSSIBLE)


def process_logits(logits: Tensor, processors: Mapping[int, LogitsProcessor]) -> None:
    """Add biases, then apply penalties, to float32 ``[rows, vocabulary]`` logits in place.

    The repetition penalty is from CTRL (https://arxiv.org/abs/1909.05858, 4.1), for logits of either sign as in
    transformers. Frequency and presence penalties are OpenAI's.
    """

    def on_device(arrays: Sequence[npt.NDArray[Any]]) -> Tensor:
        return to_device(torch.from_numpy(np.concatenate(arrays)), logits.device)

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
