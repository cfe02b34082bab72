from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from vlmserve.kernels import cpu_sampling, torch_sampling
from vlmserve.kernels.extension import supported_isas
from vlmserve.kernels.torch_sampling import Filters, filter_logits
from vlmserve.sampling import sampler
from vlmserve.sampling.sampler import SamplingRow, draw_seed, uniform
from vlmserve.types import SamplingParams


def row(seed=0, index=0, banned=frozenset(), **params) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed, index, banned)


DRAWS = {"torch": torch_sampling.draw, "native": cpu_sampling.draw}


@pytest.fixture(params=["torch", *(["native"] if supported_isas() else [])])
def sample(request):
    """The function under test, with each kind of kernels."""
    return functools.partial(sampler.sample, draw=DRAWS[request.param])


def random_logits(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def test_greedy_takes_the_most_likely_token(sample):
    logits = random_logits(5, 1000)
    assert sample(logits.clone(), [row(temperature=0)] * 5) == logits.argmax(-1).tolist()


def test_banned_tokens_are_not_sampled(sample):
    logits = torch.tensor([[1.0, 3.0, 2.0]] * 2)
    assert sample(logits, [row(temperature=0, banned=frozenset({1})), row(temperature=0)]) == [2, 1]


@settings(deadline=None)
@given(
    st.integers(2, 600), st.floats(0.1, 5), st.integers(0, 20), st.floats(0.05, 1), st.floats(0, 0.5),
    st.integers(0, 1000),
)  # fmt: skip
def test_filters_agree_with_transformers(vocabulary, temperature, top_k, top_p, min_p, seed):
    logits = random_logits(1, vocabulary, seed)
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    if min_p:
        processors.append(MinPLogitsWarper(min_p))
    expected = processors(None, logits.clone()).softmax(-1)
    actual = filter_logits(logits.clone(), Filters([temperature], [top_k], [top_p], [min_p])).softmax(-1)
    # A token exactly on a threshold may fall on either side; its probability is then tiny or at the rim.
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_other_rows_parameters_do_not_change_a_row(sample):
    logits = random_logits(4, 300)
    rows = [
        row(seed=1, temperature=0.8), row(seed=2, top_k=5), row(seed=3, top_p=0.4), row(temperature=0),
    ]  # fmt: skip
    alone = [sample(logits[i : i + 1].clone(), [rows[i]])[0] for i in range(4)]
    assert sample(logits.clone(), rows) == alone
    assert sample(logits.flip(0).clone(), rows[::-1]) == alone[::-1]


def test_same_seed_and_index_sample_the_same_token(sample):
    logits = torch.zeros(200, 500)
    same = sample(logits.clone(), [row(seed=5, index=3)] * 200)
    assert len(set(same)) == 1
    assert len(set(sample(logits.clone(), [row(seed=5, index=index) for index in range(200)]))) > 100
    assert len(set(sample(logits.clone(), [row(seed=seed, index=3) for seed in range(200)]))) > 100


@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3}, {"temperature": 0.5}])
def test_tokens_come_as_often_as_their_probability_says(sample, params):
    draws = 20_000
    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0, -torch.inf, 0.7]])
    wanted = SamplingParams(**params)
    filters = Filters([wanted.temperature], [wanted.top_k], [wanted.top_p], [wanted.min_p])
    expected = filter_logits(logits.clone(), filters).softmax(-1)[0]
    drawn = sample(logits.repeat(draws, 1), [SamplingRow(wanted, 9, index, frozenset()) for index in range(draws)])
    counts = torch.bincount(torch.tensor(drawn), minlength=6) / draws
    torch.testing.assert_close(counts, expected, atol=0.015, rtol=0)
    assert (counts[expected == 0] == 0).all()


@pytest.mark.parametrize("vocabulary", [1, 255, 256, 257, 5000])
def test_only_possible_tokens_are_drawn_whatever_the_vocabulary(sample, vocabulary):
    logits = torch.full((300, vocabulary), -torch.inf)
    possible = {0, vocabulary // 2, vocabulary - 1}
    for token in possible:
        logits[:, token] = 1.0
    drawn = sample(logits, [row(index=index) for index in range(300)])
    assert set(drawn) == possible


def test_banned_tokens_never_come(sample):
    logits = torch.tensor([[5.0, 1.0, 0.0]])
    assert sample(logits.clone(), [row(temperature=0, banned=frozenset({0}))]) == [1]
    assert sample(logits.clone(), [row(seed=1, banned=frozenset({0, 1}))]) == [2]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("unusable", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_fails_alone(sample, temperature, unusable):
    logits = random_logits(5, 50)
    logits[1, 7:] = unusable
    logits[1, :7] = -torch.inf
    logits[3, 0] = torch.nan
    tokens = sample(logits, [row(temperature=temperature) for _ in range(4)] + [row(seed=3)])
    assert [token is None for token in tokens] == [False, True, False, True, False]


def test_tiny_temperature_is_greedy_without_overflow(sample):
    logits = random_logits(1, 100)
    assert sample(logits.clone() * 1e4, [row(temperature=1e-6)]) == [int(logits.argmax())]


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_random_numbers_lie_in_the_unit_interval(seed, index):
    assert 0 <= uniform(seed, index) < 1
    assert 0 <= draw_seed(seed, index) < 2**63


def test_step_without_sampling_gives_no_tokens(sample):
    assert sample(torch.empty(0, 8), []) == []
