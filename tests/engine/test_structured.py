"""Answers of a random model, which by itself would write garbage, obey what their requests ask for."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel, Field

from tests.checkpoints import make_llama
from tests.gguf_files import write_gguf
from tests.mock_checkpoint import make_mock_checkpoint
from vlmserve.engine.engine import Engine
from vlmserve.errors import InvalidRequestError
from vlmserve.offline.llm import LLM
from vlmserve.settings.config import EngineConfig
from vlmserve.types import EngineOutput, EngineRequest, Grammar, Prompt, SamplingParams

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
POINTS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4}
SETTINGS = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "4MiB", "num_threads": 1}
SETTINGS |= {"speculation": "off"}  # so that each step adds one token to an answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(str(folder), **SETTINGS)


def engine_of(folder: Path, **settings: Any) -> Engine:
    return Engine(EngineConfig(model=str(folder), **{**SETTINGS, **settings}), folder)


def request_of(name: str, grammar: Grammar | None, seed: int = 0, **params: Any) -> EngineRequest:
    params = {"temperature": 1.5, "max_tokens": 120, "seed": seed, **params}
    tokens = [5 + (len(name) * 7 + seed * 3 + i) % 200 for i in range(20)]
    return EngineRequest(name, Prompt(tokens), SamplingParams(grammar=grammar, **params))


def run(engine: Engine, requests: list[EngineRequest]) -> dict[str, list[EngineOutput]]:
    outputs: dict[str, list[EngineOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for output in engine.step():
            outputs[output.request_id].append(output)
    return outputs


def tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def mixed(max_tokens: int = 120) -> list[EngineRequest]:
    """Requests with and without grammars side by side, greedy ones among them."""
    grammars = [None, Grammar.json(PERSON), Grammar.regex("[a-z]{1,30}!"), None, Grammar.choice(["left", "right"])]
    return [
        request_of(f"r{seed}-{index}", grammar, seed, temperature=0.0 if seed == 0 else 1.5, max_tokens=max_tokens)
        for seed in range(3)
        for index, grammar in enumerate(grammars)
    ]


def test_random_answers_fit_their_schemas(llm):
    grammars = [Grammar.json(PERSON), Grammar.json(POINTS), Grammar.json_object()] * 8
    params = [
        SamplingParams(temperature=1.5, seed=seed, max_tokens=200, grammar=grammar)
        for seed, grammar in enumerate(grammars)
    ]
    ended = 0
    for result, grammar in zip(llm.generate(["hello world"] * len(params), params, False), grammars, strict=True):
        [answer] = result.outputs
        assert answer.finish_reason in ("stop", "length")
        if answer.finish_reason == "stop":
            ended += 1
            jsonschema.validate(json.loads(answer.text), json.loads(grammar.text or '{"type": "object"}'))
    assert ended >= 16


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_regular_expressions_and_choices_hold_at_any_temperature(llm, temperature):
    patterns = [r"\d{3}-[a-z]{2,5}", r"(yes|no), because [a-z ]{1,20}\."]
    choices = ["red", "green and blue", "jaune"]
    for seed in range(6):
        sampling = {"temperature": temperature, "seed": seed}
        for pattern in patterns:
            params = SamplingParams(grammar=Grammar.regex(pattern), **sampling)
            [result] = llm.generate("hello", params, False)
            assert re.fullmatch(pattern, result.outputs[0].text)
        [result] = llm.generate("hello", SamplingParams(grammar=Grammar.choice(choices), **sampling), False)
        assert result.outputs[0].text in choices
        assert result.outputs[0].finish_reason == "stop"


def test_a_pydantic_model_is_a_schema(llm):
    class Point(BaseModel, extra="forbid"):
        x: int = Field(ge=0, le=9)
        y: bool

    [result] = llm.generate("hello", SamplingParams(grammar=Grammar.json(Point), seed=1), False)
    assert 0 <= Point.model_validate_json(result.outputs[0].text).x <= 9


def test_a_gguf_model_obeys_too(folder, tmp_path):
    llm = LLM(str(write_gguf(folder, tmp_path / "model.gguf")), **SETTINGS)
    for seed in range(4):
        params = SamplingParams(temperature=1.5, seed=seed, grammar=Grammar.choice(["one way", "or another"]))
        [result] = llm.generate("hello", params, False)
        assert result.outputs[0].text in ("one way", "or another")


@pytest.fixture(scope="module")
def together(folder) -> dict[str, list[EngineOutput]]:
    """The answers to `mixed` in one batch."""
    return run(engine_of(folder), mixed())


def test_tokens_are_those_of_each_request_alone(folder, together):
    requests = mixed()
    one_by_one = engine_of(folder, enable_prefix_caching=False)
    for request in requests:
        alone = run(one_by_one, [request])[request.request_id]
        assert tokens(together[request.request_id]) == tokens(alone)
        assert together[request.request_id][-1].finish_reason == alone[-1].finish_reason


@pytest.mark.parametrize("swap", [0, "1MiB"])
def test_preempted_requests_go_on_where_they_were(folder, together, swap, saving_pays):
    probe = engine_of(folder)
    block = probe.info.kv_cache_bytes // probe.stats().kv_blocks_total
    tight = engine_of(folder, kv_cache_memory=14 * block, max_model_len=160, kv_offload_memory=swap)
    outputs = run(tight, mixed())
    assert tight.stats().preemptions > 0
    assert {name: tokens(answer) for name, answer in outputs.items()} == {
        name: tokens(answer) for name, answer in together.items()
    }


def test_an_answer_that_is_cut_ends_with_length(folder):
    [outputs] = run(engine_of(folder), [request_of("a", Grammar.json(PERSON), max_tokens=4)]).values()
    assert len(tokens(outputs)) == 4
    assert outputs[-1].finish_reason == "length"


def test_an_answer_stops_at_its_last_token(folder):
    [outputs] = run(engine_of(folder), [request_of("a", Grammar.choice(["ab"]), max_tokens=2)]).values()
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].token_ids
    assert outputs[-1].stop_token_id is None


@pytest.mark.parametrize("params", [{"ignore_eos": True}, {"min_tokens": 60}])
def test_grammars_bound_min_tokens(folder, params):
    requests = [
        request_of("open", Grammar.regex("[a-z]*"), **params),
        request_of("shut", Grammar.choice(["ab"]), **params),
    ]
    outputs = run(engine_of(folder), requests)
    assert len(tokens(outputs["open"])) >= 60
    assert outputs["shut"][-1].finish_reason == "stop"


def test_a_complex_grammar_ends_its_own_request_only(folder):
    bad = request_of("bad", Grammar.regex(r"[xy](((a{100}){100}){100}){100}"))
    outputs = run(engine_of(folder), [bad, request_of("good", Grammar.choice(["left"]))])
    assert outputs["bad"][-1].finish_reason == "error"
    assert "grammar" in outputs["bad"][-1].error
    assert outputs["good"][-1].finish_reason == "stop"


@pytest.mark.parametrize("kind", ["real", "mock"])
def test_a_broken_grammar_spares_the_next_request(folder, tmp_path, kind):
    llm = LLM(str(folder), **SETTINGS) if kind == "real" else LLM(str(make_mock_checkpoint(tmp_path)), engine="mock")
    with pytest.raises(InvalidRequestError, match="unclosed") as refusal:
        llm.generate("hello", SamplingParams(grammar=Grammar.regex("(")), False)
    assert refusal.value.param == "grammar"
    assert not llm.engine.has_work()
    [result] = llm.generate("hello", SamplingParams(grammar=Grammar.choice(["fine"])), False)
    assert result.outputs[0].text == "fine"


def test_the_mock_engine_obeys_and_ends(tmp_path):
    llm = LLM(str(make_mock_checkpoint(tmp_path)), engine="mock")
    params = [SamplingParams(grammar=Grammar.json(PERSON), temperature=1.0, seed=seed) for seed in range(10)]
    for result in llm.generate(["hello"] * 10, params, False):
        jsonschema.validate(json.loads(result.outputs[0].text), PERSON)


def test_padded_vocabularies_are_masked(folder):
    [outputs] = run(engine_of(folder), [request_of("a", Grammar.regex("[a-z]{40}"), temperature=100.0)]).values()
    assert outputs[-1].finish_reason == "stop"


def test_grammars_may_force_repeated_ngrams(llm):
    guard = {"temperature": 1.0, "seed": 0, "no_repeat_ngram_size": 2}
    free, fixed = llm.generate(
        ["hello"] * 2, [SamplingParams(grammar=Grammar.regex(form), **guard) for form in ("[a-d]{12}", "a{12}")], False
    )
    assert fixed.text == "a" * 12
    assert len(free.text) == 12
    pairs = list(itertools.pairwise(free.outputs[0].token_ids))
    assert len(pairs) == len(set(pairs)) > 5


class Shape(BaseModel):
    name: str
    count: int
    sizes: list[float]


def test_open_schemas_are_complete_within_max_tokens(llm):
    for seed in range(6):
        params = SamplingParams(temperature=1.5, seed=seed, max_tokens=60, logprobs=0, grammar=Grammar.json(Shape))
        [result] = llm.generate("A shape", params, use_tqdm=False)
        [answer] = result.outputs
        shape = Shape.model_validate_json(answer.text)
        assert abs(shape.count) < 10**15
        assert len(answer.token_ids) == len(answer.logprobs) <= 60
        assert result.parsed == (shape if answer.finish_reason == "stop" else None)


class Point(BaseModel):
    x: int = Field(ge=0, le=9)
    y: int = Field(ge=0, le=9)


def test_results_are_parsed_into_what_the_schema_was(llm):
    params = {"temperature": 0, "max_tokens": 200}
    [shape] = llm.generate("A", SamplingParams(grammar=Grammar.json(Point), **params), use_tqdm=False)
    assert isinstance(shape.parsed, Point)
    [points] = llm.generate("A", SamplingParams(grammar=Grammar.json(POINTS), **params), use_tqdm=False)
    assert points.parsed == json.loads(points.text)
    [text] = llm.generate("A", SamplingParams(grammar=Grammar.regex("[a-z]{3}"), **params), use_tqdm=False)
    assert text.parsed is None


def test_bounds_of_open_schemas_are_settings(folder):
    llm = LLM(str(folder), **SETTINGS, json_max_digits=2, json_max_items=1, json_max_length=3)
    properties = {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": ["a", "b"]}
    for seed in range(6):
        params = SamplingParams(temperature=1.5, seed=seed, max_tokens=100, grammar=Grammar.json(schema))
        [result] = llm.generate("A", params, use_tqdm=False)
        value = json.loads(result.text)
        assert len(value["a"]) <= 1
        assert all(abs(number) < 100 for number in value["a"])
        assert len(value["b"]) <= 3
