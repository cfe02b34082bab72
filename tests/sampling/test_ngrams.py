"""The ban of repeated n-grams, against transformers' processor and a search by hand."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import NoRepeatNGramLogitsProcessor

from vlmserve.sampling.ngrams import RepeatedNgrams

VOCABULARY = 4

texts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40)


@given(texts, texts, st.integers(2, 5))
def test_tokens_are_those_that_transformers_bans(prompt, answer, size):
    ngrams = RepeatedNgrams(prompt, size, -1)
    for token_id in answer:
        ngrams.append(token_id)
    scores = torch.zeros(1, VOCABULARY)
    banned = NoRepeatNGramLogitsProcessor(size)(torch.tensor([prompt + answer]), scores)[0].isinf()
    assert ngrams.repeating() == set(banned.nonzero().flatten().tolist())


@given(texts, st.integers(2, 5), st.integers(0, 20))
def test_only_ngrams_that_begin_in_the_window_count(tokens, size, more):
    window = size + more
    expected = set()
    for start in range(max(0, len(tokens) - window), len(tokens) - size + 1):
        if tokens[start : start + size - 1] == tokens[len(tokens) - size + 1 :]:
            expected.add(tokens[start + size - 1])
    assert RepeatedNgrams(tokens, size, window).repeating() == expected


def test_an_image_is_no_token_and_joins_nothing():
    assert RepeatedNgrams([5, 7, 3, 5], 2, -1).repeating() == {7}
    assert RepeatedNgrams([5, -1, 7, 3, 5], 2, -1).repeating() == set()


def test_the_same_hash_is_not_the_same_ngram():
    assert hash((-1,)) == hash((-2,))
    assert RepeatedNgrams([-1, 3, -2], 2, -1).repeating() == set()
    assert RepeatedNgrams([-1, 3, -1], 2, -1).repeating() == {3}
