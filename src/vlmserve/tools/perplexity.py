"""Measures perplexity: e to the mean loss per token. Each token sees the earlier ones of its window."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module

import msgspec
import torch
from torch import Tensor

from vlmserve.errors import InvalidRequestError
from vlmserve.kernels.attention import BatchMetadata
from vlmserve.kernels.blocks import allocate_states
from vlmserve.kernels.states import StateRows
from vlmserve.models.protocols import LoadedModel

BLOCK_SIZE = 16
ROWS_AT_ONCE = 256
"""Rows of logits in memory; each has the size of the vocabulary."""


class Perplexity(msgspec.Struct, frozen=True):
    """tokens: predicted tokens. loss: mean of -log(probability)."""

    num_tokens: int
    loss: float

    @property
    def value(self) -> float:
        return math.exp(self.loss)


def python_manual() -> str:
    """A long English text in every Python: the topics of ``help()``."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name].strip() for name in sorted(topics))


@torch.inference_mode()
def perplexity(
    model: LoadedModel,
    token_ids: Sequence[int],
    *,
    window: int = 1024,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Perplexity:
    """window: tokens, limited by the model's positions. progress: called with tokens done and total.

    Raises InvalidRequestError for fewer than two tokens.
    """
    window = min(window, model.max_position)
    if len(token_ids) < 2:
        raise InvalidRequestError("the text needs at least two tokens")
    decoder = model.language_model
    num_blocks = -(-window // BLOCK_SIZE)
    caches = decoder.allocate_cache(num_blocks, BLOCK_SIZE)
    states = allocate_states(decoder.state_specs, 1, model.dtype, model.device.torch_device)
    total, count = 0.0, 0
    for start in range(0, len(token_ids) - 1, window):
        tokens = torch.tensor(token_ids[start : start + window], device=model.device.torch_device)
        if len(tokens) < 2:
            break
        positions = torch.arange(len(tokens) - 1, device=model.device.torch_device)
        short = decoder.max_short_len
        offset = decoder.first_position(len(positions))
        if short is not None and len(positions) > short:
            offset = short
        metadata = BatchMetadata.of_chunks([(0, len(positions))], [range(num_blocks)], BLOCK_SIZE, positions.device)
        metadata = replace(metadata, states=StateRows.of_prompts([len(positions)], positions.device))
        embeddings = decoder.embed(tokens[:-1])
        hidden = decoder.forward(embeddings, positions + offset, metadata, caches, states=states)
        for first in range(0, len(hidden), ROWS_AT_ONCE):
            targets = tokens[1 + first : 1 + first + ROWS_AT_ONCE]
            total += _loss(decoder.logits(hidden[first : first + ROWS_AT_ONCE]), targets)
        count += len(tokens) - 1
        progress(start + len(tokens), len(token_ids))
    return Perplexity(count, total / count)


def _loss(logits: Tensor, targets: Tensor) -> float:
    losses = logits.logsumexp(-1) - logits.gather(1, targets[:, None]).squeeze(1)
    return float(losses.double().sum()) if losses.device.type == "cpu" else float(losses.sum())
