"""Answers that are held to JSON and have few tokens: they are complete, whatever a model would rather write."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.prompt.tokenizers_for_tests import byte_level, sentencepiece, write_checkpoint
from vlmserve.prompt.detokenize import Detokenizer
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.sampling.grammar import GrammarCompiler
from vlmserve.sampling.schemas import JSONBounds
from vlmserve.types import Grammar

END = frozenset({2})
BOUNDS = JSONBounds(digits=15, length=200, items=50)
KINDS = {"byte level": byte_level, "sentencepiece": sentencepiece}


@pytest.fixture(scope="module", params=KINDS)
def grammars(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer.from_folder(write_checkpoint(folder / "model", KINDS[request.param]()))
    return GrammarCompiler(lambda: tokenizer, max_bytes=100_000, cache_size=4, bounds=BOUNDS)


def answer(
    grammars: GrammarCompiler, grammar: Grammar, limit: int, seed: int, *, ends: bool = False
) -> tuple[str, str]:
    """What a model says that chooses at random and, unless it `ends`, never ends by itself; and why it ended."""
    matcher, chance = grammars.matcher(grammar), random.Random(seed)
    tokenizer = grammars.tokenizer()
    detokenizer = Detokenizer(tokenizer)
    text = ""
    for used in range(limit):
        possible = np.flatnonzero(matcher.allowed(END, may_end=True, left=limit - used)).tolist()
        assert matcher.error is None
        others = [token for token in possible if token not in END]
        token = matcher.settle(chance.choice(others if others and not (ends and 2 in possible) else possible))
        if token in END:
            return text + detokenizer.finish(), "stop"
        text += detokenizer.push([token])
        matcher.advance(token)
        assert matcher.error is None
        if matcher.cut and matcher.complete:
            return text + detokenizer.finish(), "length"
        if matcher.finished:
            return text + detokenizer.finish(), "stop"
    return text + detokenizer.finish(), "length"


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def build(properties: dict[str, Any], required: set[str], closed: bool) -> dict[str, Any]:
        schema = {"type": "object", "properties": properties, "required": sorted(required & set(properties))}
        return {**schema, "additionalProperties": False} if closed else schema

    names = st.sampled_from(["a", "count", "red square", "é"])
    return st.builds(build, st.dictionaries(names, inner, max_size=4), st.sets(names), st.booleans())


SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {"type": "integer"},
            {"type": "number"},
            {"type": "string"},
            {"type": "boolean"},
            {"type": "null"},
            {},
            {"type": "string", "minLength": 7},
            {"type": "integer", "minimum": 1000},
            {"type": ["string", "null"]},
            {"enum": ["red", "green", 3]},
            {"const": "a constant"},
            {"type": "string", "format": "date"},
            {"type": "string", "pattern": "^[a-z]{2,40}-[0-9]+$"},
            {"type": "object"},
            {"type": "array"},
            {"type": "object", "additionalProperties": {"type": "integer"}},
        ]
    ),
    lambda inner: st.one_of(
        objects(inner),
        st.builds(lambda items, least: {"type": "array", "items": items, "minItems": least}, inner, st.integers(0, 3)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=SCHEMAS, seed=st.integers(0, 2**32), spare=st.integers(0, 60))
def test_answer_completes_within_its_tokens_by_schema(
    grammars: GrammarCompiler, schema: dict[str, Any], seed: int, spare: int
) -> None:
    grammar = Grammar.json(schema)
    matcher = grammars.matcher(grammar)
    matcher.allowed(END, may_end=True, left=4000)
    limit = max(1, matcher.longest_end + spare)
    text, _ = answer(grammars, grammar, limit, seed)
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("kind", ["integer", "number", "string", "array", "object"])
def test_what_never_ends_by_itself_is_bounded(grammars: GrammarCompiler, kind: str) -> None:
    """Without a limit of tokens that is near."""
    schema = {"type": "object", "properties": {"x": {"type": kind}}, "required": ["x"], "additionalProperties": False}
    if kind == "array":
        schema["properties"]["x"]["items"] = {"type": "integer"}
    if kind == "object":
        schema["properties"]["x"] |= {"properties": {"y": {"type": "integer"}}, "required": ["y"]}
    for seed in range(4):
        text, reason = answer(grammars, Grammar.json(schema), 20_000, seed, ends=True)
        value = json.loads(text)["x"]
        assert reason == "stop"
        match kind:
            case "integer":
                assert abs(value) < 10**BOUNDS.digits
            case "number":
                assert len(text) < 15 + 1 + 9 + 12
            case "string" | "array":
                assert len(value) <= {"string": BOUNDS.length, "array": BOUNDS.items}[kind]


def test_own_bounds_of_a_schema_count(grammars: GrammarCompiler) -> None:
    for schema, values in {
        '{"type": "integer", "minimum": 10000000000000000, "maximum": 10000000000000001}': {10**16, 10**16 + 1},
        '{"type": "string", "minLength": 30, "maxLength": 30, "pattern": "^a*$"}': {"a" * 30},
        '{"type": "number", "minimum": 0.00000000001, "maximum": 0.00000000001}': {1e-11},
        '{"enum": [1234567890123456, "a"]}': {1234567890123456, "a"},
    }.items():
        for seed in range(3):
            assert json.loads(answer(grammars, Grammar.json(schema), 1000, seed, ends=True)[0]) in values


def test_forced_ending_is_reported(grammars: GrammarCompiler) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    answers = [answer(grammars, Grammar.json(schema), limit, seed) for limit in (20, 60) for seed in range(8)]
    assert {reason for _, reason in answers} == {"stop", "length"}
    for text, _ in answers:
        assert set(json.loads(text)) == {"a"}


@pytest.mark.parametrize("grammars", ["byte level"], indirect=True)
def test_value_may_leave_one_token_for_its_end(grammars: GrammarCompiler) -> None:
    opening, closing, one = (grammars.tokenizer().token_id(text) for text in "[]1")
    assert opening is not None
    assert one is not None
    for left, expected in ((2, {one, closing}), (1, {closing})):
        matcher = grammars.matcher(Grammar.json({"type": "array", "items": {"type": "integer"}}))
        matcher.advance(opening)
        allowed = np.flatnonzero(matcher.allowed(END, may_end=True, left=left)).tolist()
        assert {matcher.settle(token) for token in allowed if token in (one, closing)} == expected


def test_any_object_is_complete_as_well(grammars: GrammarCompiler) -> None:
    for seed in range(20):
        assert isinstance(json.loads(answer(grammars, Grammar.json_object(), 20 + 5 * seed, seed)[0]), dict)


def test_too_few_tokens_are_used_up(grammars: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"property": {"const": "a long constant"}}, "required": ["property"]}
    text, reason = answer(grammars, Grammar.json(schema), 2, 0)
    assert reason == "length"
    assert '{"property": "a long constant"}'.startswith(text.replace("\n", "").replace("\r", "")) or text
