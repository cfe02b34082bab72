"""Schemas as pydantic, zod and people write them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.prompt.tokenizers_for_tests import byte_level, write_checkpoint
from tests.sampling.test_grammar import compiler, walk
from vlmserve.errors import InvalidRequestError
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.sampling.grammar import GrammarCompiler
from vlmserve.sampling.schemas import JSONBounds, guided_schema, relaxed_keywords
from vlmserve.types import Grammar

BOUNDS = JSONBounds(15, 20, 3)


def holding(schema: Any, **others: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], **others}


DRAFT_7 = "https://json-schema.org/draft-07/schema#"
NAMED = {"type": "object", "properties": {"a": {"$ref": "#/$defs/Of<int>"}}, "$defs": {"Of<int>": {"type": "boolean"}}}
EXACT: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "any character": (holding({"type": "string", "pattern": "^[^]{2}$"}), holding({"minLength": 2, "maxLength": 2})),
    "control character": (holding({"type": "string", "pattern": r"^\cA$"}), holding({"const": "\x01"})),
    "bracket in a class": (
        holding({"type": "string", "pattern": r"^[^[\]]{2}$"}),
        holding({"minLength": 2, "maxLength": 2}),
    ),
    "int64": (holding({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}), None),
    "float32": (holding({"type": "number", "minimum": -3.4028235e38, "maximum": 3.4028235e38}), None),
    "float64": (holding({"type": "number", "minimum": -1.797e308, "maximum": 1.797e308}), None),
    "one side": (holding({"type": "number", "minimum": 0, "maximum": 1e30}), None),
    "unnamed property": (holding({"type": "boolean"}, required=["a", "b"]), None),
    "float count": (holding({"type": "string", "minLength": 1.0, "maxLength": 3.0}), None),
    "draft 7": (holding({"type": "boolean"}, **{"$schema": DRAFT_7}), holding({"type": "boolean"})),
    "reference": (NAMED, holding({"type": "boolean"}, required=[])),
    "null keywords": (holding({"type": "boolean"}, required=None, description=None), {"type": "object"}),
    "no properties": ({"type": "object", "properties": None}, {"type": "object"}),
    "any": (holding({"type": "any"}), holding({})),
    "true": (holding(True), None),
    "no items": (holding({"type": "array"}), None),
    "no schema": (holding({}), None),
    "root": ({}, None),
    "unevaluated": (holding({"type": "boolean"}, unevaluatedProperties=False), None),
}
"""Schema as sent, and a readable one with the same meaning where jsonschema does not read the first."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("dialects")
    return Tokenizer.from_folder(write_checkpoint(folder, byte_level()))


@pytest.fixture(scope="module")
def grammars(tokenizer) -> GrammarCompiler:
    return compiler(tokenizer, bounds=BOUNDS)


def answers(grammars: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, count: int = 6) -> list[Any]:
    texts = [walk(grammars, tokenizer, grammar, seed) for seed in range(count)]
    ended = [json.loads(text) for text in texts if text is not None]
    assert ended
    return ended


def numbers_in(value: Any) -> list[float]:
    if isinstance(value, dict | list):
        return [number for one in (value.values() if isinstance(value, dict) else value) for number in numbers_in(one)]
    return [value] if isinstance(value, int | float) else []


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", EXACT)
def test_answers_fit_what_clients_write(grammars, tokenizer, name, strict):
    schema, meaning = EXACT[name]
    for answer in answers(grammars, tokenizer, Grammar.json(schema, strict=strict)):
        jsonschema.validate(answer, schema if meaning is None else meaning)
        assert all(math.isfinite(number) and abs(number) < 10**15 for number in numbers_in(answer))


ZOD_4_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
RELAXED = {
    "pattern": holding({"type": "string", "pattern": r"^(?=.*\d).+$"}),
    "pattern of zod": holding({"type": "string", "format": "email", "pattern": ZOD_4_EMAIL}),
    "pattern that repeats": holding({"type": "string", "pattern": r"^(a)\1$"}),
    "pattern that is broken": holding({"type": "string", "pattern": "[]"}),
    "pattern that is long and broken": holding({"type": "string", "pattern": "a" * 9000 + "("}),
    "pattern that is slow and broken": holding({"type": "string", "pattern": "(?i)[a-z]x["}),
    "pattern with a word boundary": holding({"type": "string", "pattern": r"\bword\b"}),
    "pattern with an unknown property": holding({"type": "string", "pattern": r"\p{Foo}"}),
    "format": holding({"type": "string", "format": "phone"}),
    "oneOf": holding({"oneOf": [{"type": "integer"}, {"type": "number"}]}),
    "not": holding({"type": "integer", "not": {"const": 1}}),
    "contains": holding({"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}}),
    "dependentRequired": holding({"type": "boolean"}, dependentRequired={"a": ["b"]}),
    "propertyNames": {"type": "object", "additionalProperties": {"type": "null"}, "propertyNames": {"minLength": 1}},
    "if": holding({"type": "boolean"}, **{"if": {}, "then": {}}),
}


@pytest.mark.parametrize("name", RELAXED)
def test_loose_schema_relaxes_one_keyword(grammars, tokenizer, name):
    schema, keyword = RELAXED[name], name.partition(" ")[0]
    assert relaxed_keywords(json.dumps(schema)) == (keyword,)
    assert all(isinstance(answer, dict) for answer in answers(grammars, tokenizer, Grammar.json(schema, strict=False)))
    with pytest.raises(InvalidRequestError, match=f"look-?around|backreferences|regex parse error|{keyword}"):
        grammars.matcher(Grammar.json(schema, strict=True))


def test_exact_schemas_relax_nothing():
    assert not any(relaxed_keywords(json.dumps(schema)) for schema, _ in EXACT.values())


@pytest.mark.parametrize(
    "schemas",
    [
        [{"type": "string"}, {"type": ["null", "integer"]}],
        [{"const": 1}, {"enum": ["1", 2]}],
        [holding({"const": "circle"}), holding({"const": "square"})],
    ],
)
def test_disjoint_one_of_is_enforced(schemas):
    assert not relaxed_keywords(json.dumps({"oneOf": schemas}))


def accepts(grammars: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, answer: Any) -> bool:
    matcher = grammars.matcher(grammar)
    for character in json.dumps(answer, separators=(",", ":")):
        token = tokenizer.token_id(character)
        if not matcher.allowed(frozenset({2}), may_end=True)[token]:
            return False
        matcher.advance(token)
    return matcher.complete


def optional(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


INTEGER = {"type": "integer"}
FIRST, SECOND = ({**optional(**{name: INTEGER}), "required": [name]} for name in "ab")
SHORT = {"type": "string", "maxLength": 2}


@pytest.mark.parametrize(
    ("schema", "answer", "fits"),
    [
        ({"anyOf": [FIRST, SECOND]}, {"a": 1, "b": 2}, True),
        ({"anyOf": [FIRST, SECOND]}, {"b": 2, "a": 1}, True),
        ({"anyOf": [FIRST, SECOND]}, {"b": 2}, True),
        ({"anyOf": [FIRST, SECOND]}, {"a": 1, "c": 2}, False),
        ({"anyOf": [FIRST, SECOND]}, {}, False),
        (holding({"anyOf": [FIRST, SECOND]}), {"a": {"a": 1, "b": 2}}, True),
        ({"anyOf": [optional(a=SHORT), optional(a={"type": "string"}, b=INTEGER)]}, {"a": "x", "b": 2}, True),
        ({"anyOf": [optional(k={"const": 1}, a=INTEGER), optional(k={"const": 2}, b=INTEGER)]},
         {"k": 1, "a": 1, "b": 2}, False),
        ({"anyOf": [FIRST, {**SECOND, "additionalProperties": False}]}, {"a": 1, "b": 2}, False),
        ({"oneOf": [FIRST, SECOND]}, {"a": 1, "b": 2}, False),
        ({"anyOf": [{"$ref": "#/$defs/x~1 y"}, {"$ref": "#/$defs/second", "description": "b"}],
          "$defs": {"x/ y": FIRST, "second": {"$ref": "#/definitions/b"}}, "definitions": {"b": SECOND}},
         {"a": 1, "b": 2}, True),
        ({"anyOf": [optional(**{f"p{number}": SHORT}) for number in range(12)]}, {"p11": "a", "p0": "b"}, True),
        ({"anyOf": [optional(**{f"p{number}": INTEGER}) for number in range(12)]}, {"p11": 1}, True),
    ],
    ids=str,
)  # fmt: skip
def test_loose_any_of_combines_objects(grammars, tokenizer, schema, answer, fits):
    grammar = Grammar.json(schema, strict=False)
    assert accepts(grammars, tokenizer, grammar, answer) is fits
    for one in answers(grammars, tokenizer, grammar):
        jsonschema.validate(one, {"anyOf": schema["oneOf"]} if "oneOf" in schema else schema)


def test_endless_reference_in_any_of_is_kept():
    endless = {"$ref": "#/$defs/a"}
    guided = guided_schema({"anyOf": [endless, SECOND], "$defs": {"a": endless}}, strict=False, bounds=BOUNDS)
    assert guided["anyOf"][0] == endless


@pytest.mark.parametrize("reference", [5, "other.json"])
def test_broken_reference_in_any_of_is_kept(reference):
    guided = guided_schema({"anyOf": [{"$ref": reference}, SECOND]}, strict=False, bounds=BOUNDS)
    assert guided["anyOf"][0] == {"$ref": reference}


def test_broken_prefix_items_are_kept():
    guided = guided_schema({"type": "array", "prefixItems": 5}, strict=False, bounds=BOUNDS)
    assert guided["prefixItems"] == 5


def test_any_of_large_objects_stays_as_large():
    objects = [optional(**{f"p{number}_{index}": INTEGER for index in range(90)}) for number in range(8)]
    guided = guided_schema({"anyOf": objects}, strict=False, bounds=BOUNDS)
    assert [len(one["properties"]) for one in guided["anyOf"]] == [90] * 8


def test_nested_any_of_grows_slowly():
    schema: dict[str, Any] = SECOND
    for _ in range(30):
        schema = {"anyOf": [optional(a=schema), SECOND]}
    guided = guided_schema(schema, strict=False, bounds=BOUNDS)
    assert len(json.dumps(guided)) < 5 * len(json.dumps(schema))
