"""How much a model differs from the one that it is a quantized copy of, on the same tokens of the same prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from vlmserve.calibration.forward import Group, hidden_states, make_groups
from vlmserve.calibration.prompts import drawn_samples, file_samples, take
from vlmserve.calibration.samples import Sample, of_text
from vlmserve.errors import ConfigurationError
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.models.protocols import LoadedModel
from vlmserve.perplexity import ROWS_AT_ONCE, python_manual
from vlmserve.pixie.scenes import HELD_OUT_SEEDS
from vlmserve.types import Prompt

FIRST_SEED = HELD_OUT_SEEDS + 500_000_000
"""Of conversations; behind those of pixie's tasks."""
WINDOW = 1024
"""Tokens of a piece of text."""


class Quality(msgspec.Struct, frozen=True):
    """What came of a model beside a reference.

    num_tokens: that were predicted. loss, reference_loss: means of -log(probability). divergence: the mean of
    KL(reference || model) of a next token, in nats. agreement: how often both find the same token likeliest, 0 to 1.
    """

    num_tokens: int
    loss: float
    reference_loss: float
    divergence: float
    agreement: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def reference_perplexity(self) -> float:
        return math.exp(self.reference_loss)


def quality_samples(preparer: RequestPreparer, num_tokens: int, conversations: Path | None = None) -> list[Sample]:
    """About so many tokens to compare on. conversations: a file of prompts with answers, see `file_samples`; None:
    held-out conversations about drawn images, if the model takes images, or else the beginning of the manual that comes
    with Python, with whose end models are calibrated."""
    if conversations is not None:
        return take(file_samples(conversations, preparer, "--conversations"), num_tokens)
    if preparer.supports_images and preparer.can_chat:
        return take(drawn_samples(preparer, FIRST_SEED), num_tokens)
    ids = preparer.encode(python_manual())[:num_tokens]
    return [of_text(preparer.tokens(ids[first : first + WINDOW])) for first in range(0, len(ids) - 1, WINDOW)]


@torch.inference_mode()
def compare(
    model: LoadedModel,
    reference: LoadedModel,
    samples: Sequence[Sample],
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Quality:
    """Predict each token that counts from those before it, with both models.

    progress: is told the tokens done and how many there are. Raises ConfigurationError for models that do not have the
    same tokens, and where no token can be predicted.
    """
    decoders = model.language_model, reference.language_model
    if decoders[0].vocab_size != decoders[1].vocab_size:
        raise ConfigurationError("the models have different tokens; give a quantized model and the one it was made of")
    sums = torch.zeros(4, dtype=torch.float64)
    count = done = 0
    counted = {sample.prompt: sample.counted for sample in samples}
    total = sum(len(prompt.token_ids) for prompt in counted)
    for group in make_groups(decoders[1], list(counted)):
        rows, targets = _predicted(group, counted)
        hidden = [hidden_states(one, group)[rows] for one in (model, reference)]
        for first in range(0, len(rows), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            logits = [decoder.logits(states[part]) for decoder, states in zip(decoders, hidden, strict=True)]
            own, right = (one.log_softmax(-1) for one in logits)
            sums += _measured(own, right, targets[part])
        count += len(rows)
        done += group.num_tokens
        progress(done, total)
    if not count:
        raise ConfigurationError("there is no token to predict: give conversations with answers, or longer texts")
    loss, reference_loss, divergence, agreement = (sums / count).tolist()
    return Quality(count, loss, reference_loss, divergence, agreement)


def _predicted(group: Group, counted: Mapping[Prompt, Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Rows of a group's batch after which a token comes that counts, and these tokens."""
    rows: list[int] = []
    targets: list[int] = []
    start = 0
    for prompt in group.prompts:
        rows += [start + place - 1 for place in counted[prompt]]
        targets += [prompt.token_ids[place] for place in counted[prompt]]
        start += len(prompt.token_ids)
    return torch.tensor(rows, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64)


def _measured(own: Tensor, right: Tensor, targets: Tensor) -> Tensor:
    """Sums of what `Quality` has means of, of log-probabilities ``[rows, vocabulary]``."""
    targets = targets[:, None].to(own.device)
    sums = [
        -own.gather(1, targets).double().sum(),
        -right.gather(1, targets).double().sum(),
        (right.exp() * (right - own)).double().sum(),
        (own.argmax(-1) == right.argmax(-1)).double().sum(),
    ]
    return torch.stack(sums).cpu()
