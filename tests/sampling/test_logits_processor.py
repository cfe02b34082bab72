"""Biases and penalties against transformers' processors and against plain sums in float64."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor, TopPLogitsWarper

from vlmserve.kernels import cpu_sampling, torch_sampling
from vlmserve.kernels.extension import supported_isas
from vlmserve.sampling import sampler
from vlmserve.sampling.logits_processor import LogitsProcessor, TokenCounts
from vlmserve.sampling.sampler import SamplingRow, changes_of, process_logits
from vlmserve.types import SamplingParams

VOCABULARY = 40
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=60)


DRAWS = {"torch": torch_sampling.draw, "native": cpu_sampling.draw}


@pytest.fixture(params=["torch", *(["native"] if supported_isas() else [])])
def sample(request):
    """The function under test, with each kind of kernels."""
    return functools.partial(sampler.sample, draw=DRAWS[request.param])


def random_logits(rows: int, vocabulary: int = VOCABULARY, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def processor(prompt=(), answer=(), **params) -> LogitsProcessor:
    made = LogitsProcessor(SamplingParams(**params), list(prompt))
    for token in answer:
        made.append(token)
    return made


def processed(logits: torch.Tensor, *processors: LogitsProcessor) -> torch.Tensor:
    logits = logits.clone()
    process_logits(logits, dict(enumerate(processors)))
    return logits


def penalized(logits, prompt, answer, last_n, repetition, frequency, presence) -> np.ndarray:
    """One row in float64, from the definitions of OpenAI's and transformers' documentation."""
    history = [(token, False) for token in prompt] + [(token, True) for token in answer]
    history = history[len(history) - min(len(history), last_n) :] if last_n >= 0 else history
    row = logits.double().numpy().copy()
    for token in {token for token, _ in history}:
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        count = history.count((token, True))
        row[token] -= count * frequency + (count > 0) * presence
    return row


@settings(deadline=None, max_examples=60)
@given(
    tokens, tokens, st.integers(-1, 70), st.floats(0.3, 3), st.floats(-2, 2), st.floats(-2, 2), st.integers(0, 99)
)  # fmt: skip
def test_penalties_are_what_their_definitions_say(prompt, answer, last_n, repetition, frequency, presence, seed):
    logits = random_logits(1, seed=seed)
    params = {
        "repetition_penalty": repetition,
        "frequency_penalty": frequency,
        "presence_penalty": presence,
        "repeat_last_n": last_n,
    }
    actual = processed(logits, processor(prompt, answer, **params))
    expected = penalized(logits[0], prompt, answer, last_n, repetition, frequency, presence)
    np.testing.assert_allclose(actual[0].numpy(), expected, atol=1e-4, rtol=1e-5)


@settings(deadline=None, max_examples=40)
@given(tokens.filter(bool), tokens, st.floats(0.1, 5), st.integers(0, 99))
def test_the_repetition_penalty_is_transformers(prompt, answer, penalty, seed):
    logits = random_logits(1, seed=seed)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + answer]), logits.clone())
    assert torch.equal(processed(logits, processor(prompt, answer, repetition_penalty=penalty)), expected)


@settings(deadline=None, max_examples=40)
@given(st.dictionaries(st.integers(0, VOCABULARY - 1), st.integers(-100, 100), min_size=1), st.integers(0, 99))
def test_biases_are_transformers(biases, seed):
    logits = random_logits(1, seed=seed)
    oracle = SequenceBiasLogitsProcessor({(token,): float(bias) for token, bias in biases.items()})
    expected = oracle(torch.tensor([[1, 2]]), logits.clone())
    torch.testing.assert_close(processed(logits, processor(logit_bias=biases)), expected)


def test_biases_come_before_penalties():
    made = processor([3], repetition_penalty=2.0, logit_bias={3: 10.0})
    assert processed(torch.full((1, 5), -2.0), made)[0, 3] == (10 - 2) / 2


def test_each_row_changes_by_its_own_request():
    logits = random_logits(4)
    requests = {
        0: processor([1, 2], [3], repetition_penalty=1.7),
        2: processor([4], [5, 5], frequency_penalty=0.5, logit_bias={7: -3.0}),
        3: processor([6] * 9, [8], presence_penalty=1.5, repetition_penalty=0.5),
    }
    together = logits.clone()
    process_logits(together, requests)
    assert torch.equal(together[1], logits[1])
    for number, made in requests.items():
        assert torch.equal(together[number], processed(logits[number : number + 1], made)[0])
        assert not torch.equal(together[number], logits[number])


@settings(deadline=None, max_examples=60)
@given(tokens, st.lists(st.integers(0, 300), max_size=400), st.integers(-1, 500))
def test_kept_counts_equal_a_recount(prompt, answer, window):
    kept = TokenCounts(prompt, window)
    for token in answer:
        kept.append(token)
    history = [(token, False) for token in prompt] + [(token, True) for token in answer]
    latest = history if window < 0 else history[max(0, len(history) - window) :]
    expected = {token: latest.count((token, True)) for token, _ in latest}
    assert dict(zip(kept.ids.tolist(), kept.in_answer.tolist(), strict=True)) == expected


def test_edited_rows_are_drawn_as_others_are(sample):
    logits = random_logits(3, 500)
    banned = {token: -100.0 for token in range(499)}
    row = SamplingRow(SamplingParams(logit_bias=banned), 1, 0, logits_processor=processor(logit_bias=banned))
    greedy = SamplingRow(SamplingParams(temperature=0), 1, 0)
    best = logits[1:].argmax(-1).tolist()
    assert sample(logits.clone(), [row, greedy, greedy]) == [499, *best]
    penalty = processor([best[0]], repetition_penalty=100.0)
    penalized_row = SamplingRow(SamplingParams(temperature=0, repetition_penalty=100.0), 1, 0, logits_processor=penalty)
    assert sample(logits.clone(), [row, penalized_row, greedy])[1:] == [
        int(logits[1].topk(2).indices[1]), best[1]
    ]  # fmt: skip


def test_filters_apply_to_what_penalties_leave(sample):
    logits = random_logits(1, 60)
    prompt = logits[0].topk(10).indices.tolist()
    params = SamplingParams(repetition_penalty=3.0, top_p=0.6)
    left = RepetitionPenaltyLogitsProcessor(3.0)(torch.tensor([prompt]), logits.clone())
    left = TopPLogitsWarper(0.6)(torch.tensor([prompt]), left)
    possible = set(left[0].isfinite().nonzero().flatten().tolist())
    rows = [SamplingRow(params, 7, index, logits_processor=LogitsProcessor(params, prompt)) for index in range(3000)]
    assert set(sample(logits.repeat(3000, 1), rows)) == possible


def test_changes_of_rows_equal_processed_logits():
    params = {"logit_bias": {1: 2.0, 5: -3.0}, "repetition_penalty": 1.5, "frequency_penalty": 0.5}
    changing = processor([1, 2, 3], [2, 4, 4], **params)
    rows = [
        SamplingRow(SamplingParams(), 0, 0),
        SamplingRow(SamplingParams(), 0, 0, frozenset({7, 9})),
        SamplingRow(changing.params, 0, 6, frozenset({4}), logits_processor=changing),
    ]
    logits = random_logits(3)
    expected = logits.clone()
    process_logits(expected, {2: changing})
    for number, row in enumerate(rows):
        expected[number, sorted(row.banned)] = -torch.inf
    entries, (added, penalty, subtracted) = changes_of(rows)
    actual = logits.numpy()
    values = actual[*entries] + added
    actual[*entries] = np.where(values > 0, values / penalty, values * penalty) - subtracted
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    assert len(set(zip(*entries.tolist(), strict=True))) == entries.shape[1]
