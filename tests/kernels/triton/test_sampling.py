"""Drawing tokens, beside torch's operations in float64 and beside what a draw must be."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from vlmserve.kernels.torch_sampling import Filters, filter_logits
from vlmserve.kernels.triton.sampling import TritonDraw, change

VOCABULARY = 300


def drawn(
    device: torch.device,
    logits: Tensor,
    numbers: Sequence[float],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[int]:
    """A token for each row, all with the same options."""
    rows = len(logits)
    draw = TritonDraw(lambda values: torch.from_numpy(values).to(device), block=256)
    return draw(
        logits.clone().to(device),
        Filters([temperature] * rows, [top_k] * rows, [top_p] * rows, [min_p] * rows),
        numbers,
    )


def probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """By sorting everything, in float64: ``[vocabulary]``."""
    x = logits.double() / temperature
    if top_k:
        x = x.masked_fill(x < x.topk(top_k).values[-1], -torch.inf)
    ordered = x.softmax(-1).sort(descending=True).values
    kept = ordered[(ordered.cumsum(-1) - ordered) < top_p]
    x = x.masked_fill(x.softmax(-1) < kept[-1] * (1 - 1e-9), -torch.inf)
    if min_p:
        x = x.masked_fill(x < x.max() + math.log(min_p), -torch.inf)
    return x.softmax(-1)


OPTIONS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.3, 20, 1.0, 0.0),
    (1.0, VOCABULARY, 1.0, 0.0),
    (1.0, 200, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (1.0, 0, 1e-9, 0.0),
    (0.9, 40, 0.9, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.5, 50, 0.95, 0.05),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), OPTIONS)
def test_samples_follow_the_cumulative_distribution(
    device: torch.device, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(VOCABULARY) * 3
    numbers = [0.0, 0.45, 1 - 2**-52]
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    tokens = drawn(device, logits.expand(len(numbers), -1), numbers, **options)
    shares = probabilities(logits, temperature, top_k, top_p, min_p)
    ends = shares.cumsum(-1)
    for token, number in zip(tokens, numbers, strict=True):
        assert shares[token] > 0
        # Sums in float32 may end a little sooner or later.
        assert ends[token] - shares[token] - 1e-6 <= number <= ends[token] + 1e-6


def test_filters_keep_what_the_reference_keeps(device: torch.device) -> None:
    """Over many numbers, each token that may be drawn is drawn, and no other."""
    torch.manual_seed(9)
    logits = torch.randn(40) * 0.8
    numbers = [(number + 0.5) / 8 for number in range(8)]
    options = {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.05}
    tokens = drawn(device, logits.expand(len(numbers), -1), numbers, **options)
    kept = filter_logits(logits[None].clone(), Filters([0.8], [6], [0.9], [0.05]))[0]
    shares = kept.softmax(-1)
    assert 1 < len(shares.nonzero()) < 6
    assert set(tokens) == set(torch.nonzero(kept > -torch.inf).flatten().tolist())
    counts = np.bincount(tokens, minlength=40) / len(tokens)
    assert np.abs(counts - shares.numpy()).max() <= 1 / 8 + 1e-6


def test_ties_with_the_last_kept_token_survive(device: torch.device) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 2.0, 1.0, -3.0]])
    numbers = [number / 6 for number in range(6)]
    rows = logits.expand(6, -1)
    assert set(drawn(device, rows, numbers, top_k=2)) == {1, 2, 3, 4}
    assert set(drawn(device, rows, numbers, top_p=0.5)) == {1, 2, 3, 4}
    assert set(drawn(device, rows, numbers, min_p=math.exp(-1.001))) == {1, 2, 3, 4}


def test_temperature_zero_takes_the_first_of_the_likeliest(device: torch.device) -> None:
    logits = torch.full((3, VOCABULARY), -1.0)
    logits[0, [200, 131]] = 5.0
    logits[2, 299] = torch.inf
    assert drawn(device, logits, [0.5] * 3, temperature=0.0) == [131, 0, -1]


def test_a_tiny_temperature_does_not_overflow(device: torch.device) -> None:
    logits = torch.tensor([[100.0, 90.0, -80.0]])
    assert drawn(device, logits, [0.99], temperature=1e-30, top_p=0.9, top_k=2) == [0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_unusable_rows_fail(device: torch.device, temperature: float) -> None:
    logits = torch.zeros(4, VOCABULARY)
    logits[0, 250] = torch.nan
    logits[1] = -torch.inf
    logits[2, :-1] = -torch.inf
    logits[3, 5] = 50.0
    assert drawn(device, logits, [0.3] * 4, temperature=temperature, top_k=3, top_p=0.5) == [-1, -1, 299, 5]


def test_rows_have_options_of_their_own(device: torch.device) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, VOCABULARY)
    draw = TritonDraw(lambda values: torch.from_numpy(values).to(device))
    tokens = draw(
        logits.clone().to(device),
        Filters([0.0, 1.0, 1.0], [0, 1, 0], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0]),
        [0.0, 0.9, 0.9],
    )
    assert tokens == logits.argmax(-1).tolist()


def test_biases_and_penalties_change_their_tokens_alone(device: torch.device) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 20)
    entries = np.array([[0, 0, 2, 2], [3, 19, 0, 7]])
    changes = np.array([[1.0, 0.0, -100.0, 0.0], [1.0, 1.5, 2.0, 0.5], [0.0, 0.25, 0.0, 1.0]], np.float32)
    expected = logits.double()
    for (row, token), (bias, repetition, subtracted) in zip(entries.T, changes.T.astype(float), strict=True):
        logit = expected[row, token] + bias
        expected[row, token] = (logit / repetition if logit > 0 else logit * repetition) - subtracted
    on_device = logits.to(device)
    change(on_device, *(torch.from_numpy(values).to(device) for values in (entries, changes)))
    torch.testing.assert_close(on_device.cpu().double(), expected, atol=1e-5, rtol=1e-6)
