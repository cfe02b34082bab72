from __future__ import annotations

import math

import pytest

from vlmserve.errors import InvalidRequestError
from vlmserve.types import MAX_BIASES, SamplingParams


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.5},
        {"repetition_penalty": math.inf},
        {"repetition_penalty": math.nan},
        {"frequency_penalty": 2.01},
        {"frequency_penalty": math.nan},
        {"presence_penalty": -2.5},
        {"repeat_last_n": -2},
        {"logprobs": -1},
        {"prompt_logprobs": -1},
        {"logit_bias": {5: 100.5}},
        {"logit_bias": {5: math.nan}},
        {"logit_bias": {-5: 1.0}},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": dict.fromkeys(range(MAX_BIASES + 1), 1.0)},
    ],
)
def test_a_value_out_of_range_is_refused_by_name(params):
    [name] = params
    with pytest.raises(InvalidRequestError, match=f"^{name} must ") as caught:
        SamplingParams(**params)
    assert caught.value.param == name


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 0.01},
        {"frequency_penalty": -2, "presence_penalty": 2},
        {"logit_bias": {0: -100, 5: 100}},
        {"repeat_last_n": 0, "logprobs": 0, "prompt_logprobs": 5},
    ],
)
def test_the_rims_of_the_ranges_are_allowed(params):
    SamplingParams(**params)


def test_only_penalties_that_look_at_something_penalize():
    assert not SamplingParams().penalizes
    assert not SamplingParams(repetition_penalty=2.0, repeat_last_n=0).penalizes
    assert not SamplingParams(logit_bias={5: 1.0}).penalizes
    for params in ({"repetition_penalty": 2.0}, {"frequency_penalty": -1}, {"presence_penalty": 0.5}):
        assert SamplingParams(**params, repeat_last_n=64).penalizes
