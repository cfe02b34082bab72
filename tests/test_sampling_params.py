from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from vlmserve.errors import InvalidRequestError
from vlmserve.sampling_params import GuidedDecodingParams, StructuredOutputsParams
from vlmserve.types import MAX_BIASES, Grammar, SamplingParams


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
        {"allowed_token_ids": []},
        {"bad_words": [""]},
        {"bad_words": ["x"] * 1025},
        {"logprob_token_ids": [5]},
        {"truncate_prompt_tokens": 0},
        {"logit_bias": {5: 100.5}},
        {"logit_bias": {5: math.nan}},
        {"logit_bias": {-5: 1.0}},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": dict.fromkeys(range(MAX_BIASES + 1), 1.0)},
    ],
)
def test_an_out_of_range_value_is_named(params):
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


@pytest.mark.parametrize("params", [{"stop": "blue circle"}, {"stop": ["blue circle"]}, {"stop": ("blue circle",)}])
def test_a_string_is_one_stop_string(params):
    assert SamplingParams(**params).stop == ("blue circle",)


def test_lists_none_and_numbers_of_numpy_are_taken():
    params = SamplingParams(stop=None, stop_token_ids=[5, 6], temperature=np.float32(0.5), seed=np.int64(7))
    assert (params.stop, params.stop_token_ids, params.seed) == ((), (5, 6), 7)
    assert type(params.seed) is int
    assert type(params.temperature) is float


@pytest.mark.parametrize(
    "params",
    [
        {"stop": b"bytes"},
        {"stop": ["a", 5]},
        {"stop": {"a": 1}},
        {"stop_token_ids": "57"},
        {"stop_token_ids": 57},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": ["57"]},
        {"logit_bias": [5]},
        {"logit_bias": {True: 1.0}},
        {"temperature": "0"},
        {"max_tokens": "16"},
        {"max_tokens": 16.0},
        {"max_tokens": True},
        {"seed": "1"},
        {"grammar": '{"type": "object"}'},
        {"n": 0},
        {"best_of": 0},
        {"n": 3, "best_of": 2},
    ],
)
def test_a_wrong_type_is_rejected_by_name(params):
    name = list(params)[-1]
    with pytest.raises(InvalidRequestError, match=f"^{name} must ") as caught:
        SamplingParams(**params)
    assert caught.value.param == name


def test_one_choice_is_no_list_of_choices():
    with pytest.raises(InvalidRequestError, match="choices must be a list of strings"):
        Grammar.choice("yes")


def test_only_penalties_that_look_at_something_penalize():
    assert not SamplingParams().penalizes
    assert not SamplingParams(repetition_penalty=2.0, repeat_last_n=0).penalizes
    assert not SamplingParams(logit_bias={5: 1.0}).penalizes
    for params in ({"repetition_penalty": 2.0}, {"frequency_penalty": -1}, {"presence_penalty": 0.5}):
        assert SamplingParams(**params, repeat_last_n=64).penalizes


READ_TOKENS = {
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "no_repeat_ngram_size": 3,
    "bad_token_ids": ((5, 6),),
    "thinking_token_budget": 9,
    "grammar": Grammar.json_object(),
    "structured_outputs": {"json_object": True},
    "guided_decoding": {"json_object": True},
}
NEED_HOST = {
    **{name: READ_TOKENS[name] for name in ("grammar", "structured_outputs", "guided_decoding")},
    "allowed_token_ids": (5,),
    "logprobs": 0,
}
OTHERS = {
    "n": 2, "best_of": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.5, "min_p": 0.5, "logit_bias": {5: 1.0}, "seed": 3,
    "repeat_last_n": 5, "no_repeat_ngram_window": 5, "prompt_logprobs": 2, "stop": "a", "stop_token_ids": (5,),
    "ignore_eos": True, "max_tokens": 5, "min_tokens": 2, "bad_words": ("a",), "include_stop_str_in_output": True,
    "skip_special_tokens": False, "spaces_between_special_tokens": False, "truncate_prompt_tokens": 5,
}  # fmt: skip


def test_each_parameter_declares_what_it_depends_on():
    for name, value in (READ_TOKENS | NEED_HOST | OTHERS).items():
        params = SamplingParams(**{name: value})
        assert (params.reads_tokens, params.needs_host) == (name in READ_TOKENS, name in NEED_HOST), name
    assert not SamplingParams(bad_token_ids=((5,), (6,))).reads_tokens
    # Named tokens come with logprobs only.
    assert {*READ_TOKENS, *NEED_HOST, *OTHERS, "logprob_token_ids"} == set(SamplingParams.__struct_fields__)


SCHEMA = {"type": "object", "properties": {"colour": {"type": "string"}}}


@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding"])
def test_vllms_formats_become_grammars(name):
    class Theirs:
        """vLLM's own object, which has more fields."""

        json = SCHEMA
        regex = choice = grammar = json_object = whitespace_pattern = None

    for form, grammar in [
        (StructuredOutputsParams(json=SCHEMA), Grammar.json(SCHEMA)),
        (GuidedDecodingParams(regex="a+"), Grammar.regex("a+")),
        ({"choice": ["a", "b"]}, Grammar.choice(["a", "b"])),
        ({"grammar": "start: /a/"}, Grammar.lark("start: /a/")),
        ({"json_object": True}, Grammar.json_object()),
        (Theirs(), Grammar.json(SCHEMA)),
    ]:
        params = SamplingParams(**{name: form})
        assert params == SamplingParams(grammar=grammar)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    for wrong in ({}, {"json": SCHEMA, "regex": "a"}, "json", {"jason": SCHEMA}):
        with pytest.raises(InvalidRequestError, match=f"{name} must have one of json, regex") as caught:
            SamplingParams(**{name: wrong})
        assert caught.value.param == name
    with pytest.raises(InvalidRequestError, match=f"either grammar or {name}"):
        SamplingParams(**{name: {"regex": "a"}, "grammar": Grammar.regex("a")})


def test_vllms_defaults_are_accepted():
    params = {"skip_special_tokens": True, "detokenize": True, "bad_words": [], "logits_processors": None}
    params |= {"top_k": -1, "seed": -1, "bad_words": None, "allowed_token_ids": None}
    assert SamplingParams(**params) == SamplingParams()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temprature": 0.5}, "has no parameter temprature; did you mean temperature?"),
        ({"max_token": 5}, "did you mean max_tokens?"),
        ({"zzz": 1}, "has no parameter zzz$"),
        ({"detokenize": False}, "takes no other detokenize than True; leave it out"),
        ({"logits_processors": [print]}, "takes no other logits_processors than None"),
    ],
)
def test_a_misspelt_parameter_is_explained(params, message):
    with pytest.raises(TypeError, match=message):
        SamplingParams(**params)
