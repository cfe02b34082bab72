from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmserve.sampling.logprobs import token_logprobs


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(1, 300), st.integers(0, 20), st.integers(0, 99))
def test_logprobs_equal_log_softmax_in_order(rows, vocabulary, count, seed):
    generator = np.random.default_rng(seed)
    logits = torch.from_numpy(generator.standard_normal((rows, vocabulary)).astype(np.float32)) * 4
    tokens = generator.integers(0, vocabulary, rows).tolist()
    expected = logits.double().log_softmax(-1)
    for row, told in enumerate(token_logprobs(logits.clone(), tokens, [count] * rows)):
        assert told.token_id == tokens[row]
        assert abs(told.logprob - float(expected[row, tokens[row]])) < 1e-5
        assert told.rank == 1 + int((expected[row] > expected[row, tokens[row]]).sum())
        assert [token for token, _ in told.top] == expected[row].argsort(descending=True)[:count].tolist()
        for token, score in told.top:
            assert abs(score - float(expected[row, token])) < 1e-5


def test_each_row_gets_its_alternatives():
    told = token_logprobs(torch.randn(4, 10), [1, 2, 3, 4], [0, 3, 1, 99])
    assert [len(one.top) for one in told] == [0, 3, 1, 10]


def test_equal_tokens_are_listed_in_greedy_order():
    logits = torch.zeros(2, 1000)
    logits[1, 500:] = 1.0
    first, second = token_logprobs(logits, [0, 500], [3, 2])
    assert [token for token, _ in first.top] == [0, 1, 2]
    assert [token for token, _ in second.top] == [500, 501]
    assert (first.rank, second.rank) == (1, 1)
    logits[0, 600:602] = torch.tensor([1.5, 2.0])
    [third] = token_logprobs(logits[:1], [0], [3])
    assert [token for token, _ in third.top] == [601, 600, 0]


def test_impossible_tokens_and_nan_rows_harm_no_others():
    logits = torch.tensor([[0.0, -torch.inf, 1.0], [torch.nan, 0.0, 1.0], [3.0, 2.0, 1.0]])
    expected = logits[2].log_softmax(-1)
    first, _, last = token_logprobs(logits, [1, 0, 0], [3, 3, 2])
    assert first.logprob == -torch.inf
    assert [token for token, _ in first.top] == [2, 0, 1]
    assert [token for token, _ in last.top] == [0, 1]
    torch.testing.assert_close(last.logprob, float(expected[0]))
