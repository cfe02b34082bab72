"""The native drawing of tokens, each instruction set of this machine against float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native import built
from vlmserve.kernels.cpu_sampling import draw
from vlmserve.kernels.torch_sampling import Filters

CPU = torch.device("cpu")


class Row(NamedTuple):
    """How a row of logits is drawn from. spread: of the logits; steps: how many values they can have, 0: any."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    number: float
    spread: float
    steps: int
    masked: float


rows = st.builds(
    Row,
    st.sampled_from([1e-6, 0.1, 0.7, 1.0, 3.0]),
    st.sampled_from([0, 1, 2, 7, 50, 10_000]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    st.sampled_from([0.0, 0.0, 0.05, 0.5]),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([0.0, 0.01, 1.0, 30.0]),
    st.sampled_from([0, 0, 2, 5]),
    st.sampled_from([0.0, 0.5, 0.99]),
)


def make_logits(row: Row, vocabulary: int, generator: torch.Generator) -> torch.Tensor:
    logits = torch.randn(vocabulary, generator=generator) * row.spread
    if row.steps:
        logits = torch.randint(0, row.steps, (vocabulary,), generator=generator).float()
    masked = torch.rand(vocabulary, generator=generator) < row.masked
    masked[vocabulary // 2] = False
    return logits.masked_fill(masked, -torch.inf)


def may_be_drawn(logits: torch.Tensor, row: Row, token: int, slack: float) -> bool:
    """Whether filters and the number allow a token, if everything is computed in float64 but for `slack`."""
    # Scores are rounded to float32 as the kernel has them: which tokens tie depends on that.
    scores = ((logits - logits.max()) / torch.tensor(row.temperature)).double()
    weights = scores.exp()
    ordered, order = scores.sort(descending=True)
    top_k = min(row.top_k, len(scores)) if row.top_k else len(scores)
    lowest_of_k = ordered[top_k - 1]
    in_k = weights[order][:top_k]
    before = in_k.cumsum(0) - in_k

    def kept(share: float) -> torch.Tensor:
        lowest = max(lowest_of_k, ordered[int((before < share * in_k.sum()).sum().clamp(min=1)) - 1])
        return scores >= lowest

    for share in {row.top_p, row.top_p * (1 - slack), row.top_p * (1 + slack)} if row.top_p < 1 else {2.0}:
        for least in {row.min_p * (1 - slack), row.min_p * (1 + slack)}:
            chosen = torch.where(kept(share) & (weights >= least), weights, 0.0)
            ends = chosen.cumsum(0)
            total, end, start = float(ends[-1]), float(ends[token]), float(ends[token] - chosen[token])
            target = row.number * total
            if chosen[token] > 0 and start - slack * total <= target <= end + slack * total:
                return True
    return False


@built
@given(st.lists(rows, min_size=1, max_size=4), st.integers(1, 700), st.integers(0, 1000))
@settings(max_examples=80, deadline=None)
@pytest.mark.usefixtures("isa")
def test_drawn_tokens_are_those_that_float64_allows(parameters: list[Row], vocabulary: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.stack([make_logits(row, vocabulary, generator) for row in parameters])
    tokens = draw(
        logits,
        Filters(
            [row.temperature for row in parameters],
            [row.top_k for row in parameters],
            [row.top_p for row in parameters],
            [row.min_p for row in parameters],
        ),
        [row.number for row in parameters],
    )
    for row, values, token in zip(parameters, logits, tokens, strict=True):
        assert 0 <= token < vocabulary
        assert may_be_drawn(values, row, token, slack=1e-5), row


@built
@pytest.mark.usefixtures("isa")
def test_a_flat_vocabulary_is_drawn_from_all_over() -> None:
    numbers = [(number + 0.5) / 1000 for number in range(1000)]
    same = Filters([1.0] * 1000, [0] * 1000, [0.999] * 1000, [0.0] * 1000)
    tokens = draw(torch.zeros(1000, 5000), same, numbers)
    assert tokens == [number * 5 + 2 for number in range(1000)]


@built
@given(st.integers(1, 700), st.integers(0, 1000), st.sampled_from([2, 1000]))
@settings(max_examples=60, deadline=None)
@pytest.mark.usefixtures("isa")
def test_no_temperature_takes_the_first_of_the_highest(vocabulary: int, seed: int, values: int) -> None:
    logits = torch.randint(-values, 0, (3, vocabulary), generator=torch.Generator().manual_seed(seed)).float()
    same = Filters([0.0] * 3, [0] * 3, [1.0] * 3, [0.0] * 3)
    assert draw(logits, same, [0.0] * 3) == logits.numpy().argmax(1).tolist()


@built
def test_parameters_must_be_as_many_as_rows() -> None:
    one = Filters([1.0], [0], [1.0], [0.0])
    with pytest.raises(ValueError, match="2 rows"):
        draw(torch.zeros(2, 8), one, [0.5])
    with pytest.raises(ValueError, match="float64"):
        draw(torch.zeros(1, 8).double(), one, [0.5])
