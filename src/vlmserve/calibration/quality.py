"""Compare a quantized model with its original on the same tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from vlmserve.calibration.forward import Group, hidden_states, make_groups
from vlmserve.calibration.prompts import drawn_samples, file_samples, take
from vlmserve.calibration.samples import Sample, of_text
from vlmserve.errors import ConfigurationError
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.models.protocols import LoadedModel
from vlmserve.pixie.scenes import HELD_OUT_SEEDS
from vlmserve.tools.perplexity import ROWS_AT_ONCE, python_manual
from vlmserve.types import Prompt

FIRST_SEED = HELD_OUT_SEEDS + 500_000_000
"""Seed of the first conversation. The seeds differ from the seeds of pixie's tasks."""
WINDOW = 1024
"""Tokens of a text sample."""


class Quality(msgspec.Struct, frozen=True):
    num_tokens: int
    """Predicted tokens."""
    loss: float
    """Mean negative log-likelihood in nats."""
    reference_loss: float
    """The reference's mean negative log-likelihood in nats."""
    divergence: float
    """Mean of ``KL(reference || model)`` of next tokens, in nats."""
    agreement: float
    """Share of tokens with the same argmax, 0 to 1."""
    change_error: float | None
    """Standard error of ``loss - reference_loss``, from the variance between prompts; None: one prompt."""
    divergence_error: float | None
    """Standard error of `divergence`, likewise."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def reference_perplexity(self) -> float:
        return math.exp(self.reference_loss)


def quality_samples(preparer: RequestPreparer, num_tokens: int, conversations: Path | None = None) -> list[Sample]:
    """conversations: a file (`file_samples`). None: held-out conversations about drawn images, if the model takes
    images, else the beginning of Python's manual."""
    if conversations is not None:
        return take(file_samples(conversations, preparer, "--conversations"), num_tokens)
    if preparer.media.supports_images and preparer.can_chat:
        return take(drawn_samples(preparer, FIRST_SEED), num_tokens)
    ids = preparer.encode(python_manual())[:num_tokens]
    return [of_text(preparer.tokens(ids[first : first + WINDOW])) for first in range(0, len(ids) - 1, WINDOW)]


class Comparison:
    """The reference predicts each counted token once. Its hidden states are stored, ``[counted tokens, hidden_size]``.

    progress: called with finished and total tokens. Raises ConfigurationError if no token can be predicted.
    """

    @torch.inference_mode()
    def __init__(
        self,
        reference: LoadedModel,
        samples: Sequence[Sample],
        progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        self._decoder = reference.language_model
        counted = {sample.prompt: sample.counted for sample in samples}
        if not any(counted.values()):
            raise ConfigurationError("there is no token to predict: give conversations with answers, or longer texts")
        self._total = sum(len(prompt.token_ids) for prompt in counted)
        self._groups = [(group, _predicted(group, counted)) for group in make_groups(self._decoder, list(counted))]
        self._states, done = [], 0
        for group, predicted in self._groups:
            self._states.append(hidden_states(reference, group)[predicted.rows])
            done += group.num_tokens
            progress(done, self._total)

    @torch.inference_mode()
    def of(self, model: LoadedModel, progress: Callable[[int, int], None] = lambda done, of: None) -> Quality:
        """Raises ConfigurationError if vocabularies differ in size."""
        decoder = model.language_model
        if decoder.vocab_size != self._decoder.vocab_size:
            raise ConfigurationError("the models have different vocabularies; give a quantized model and its original")
        sums, done = [], 0
        for (group, predicted), states in zip(self._groups, self._states, strict=True):
            hidden = hidden_states(model, group)[predicted.rows]
            of_prompts = torch.zeros(len(group.prompts), 5, dtype=torch.float64)
            for first in range(0, len(hidden), ROWS_AT_ONCE):
                part = slice(first, first + ROWS_AT_ONCE)
                own, right = decoder.logits(hidden[part]), self._decoder.logits(states[part])
                measured = _measured(own.log_softmax(-1), right.log_softmax(-1), predicted.targets[part])
                of_prompts.index_add_(0, predicted.prompts[part], measured)
            sums.append(of_prompts)
            done += group.num_tokens
            progress(done, self._total)
        return _quality(torch.cat(sums))


class _Predicted(NamedTuple):
    rows: Tensor
    """Rows of the batch before counted tokens."""
    targets: Tensor
    """The counted tokens."""
    prompts: Tensor
    """Index of each row's prompt in the group."""


def _predicted(group: Group, counted: Mapping[Prompt, Sequence[int]]) -> _Predicted:
    rows: list[int] = []
    targets: list[int] = []
    prompts: list[int] = []
    start = 0
    for number, prompt in enumerate(group.prompts):
        rows += [start + place - 1 for place in counted[prompt]]
        targets += [prompt.token_ids[place] for place in counted[prompt]]
        prompts += [number] * len(counted[prompt])
        start += len(prompt.token_ids)
    return _Predicted(*(torch.tensor(one, dtype=torch.int64) for one in (rows, targets, prompts)))


def _measured(own: Tensor, right: Tensor, targets: Tensor) -> Tensor:
    """Terms of the means in `Quality`, ``[rows, 5]``, from log-probabilities ``[rows, vocab_size]``. The first is 1."""
    targets = targets[:, None].to(own.device)
    measured = [
        torch.ones(len(own), device=own.device),
        -own.gather(1, targets)[:, 0],
        -right.gather(1, targets)[:, 0],
        (right.exp() * (right - own)).double().sum(1),
        own.argmax(-1) == right.argmax(-1),
    ]
    return torch.stack([one.double() for one in measured], 1).cpu()


def _quality(sums: Tensor) -> Quality:
    """Means from sums of `_measured` over prompts, ``[prompts, 5]``."""
    count, *means = (sums.sum(0) / torch.tensor([1.0, *[float(sums[:, 0].sum())] * 4])).tolist()
    loss, reference_loss, divergence, agreement = means
    change_error = divergence_error = None
    if (prompts := len(sums)) > 1:
        # Means are ratios of sums over prompts, because only prompts are independent.
        changes = sums[:, 1] - sums[:, 2] - (loss - reference_loss) * sums[:, 0]
        divergences = sums[:, 3] - divergence * sums[:, 0]
        change_error, divergence_error = (
            math.sqrt(prompts / (prompts - 1) * float(rest.square().sum())) / count for rest in (changes, divergences)
        )
    return Quality(round(count), loss, reference_loss, divergence, agreement, change_error, divergence_error)
