"""Calls as Gemma 4 writes them: bare keys, and strings between tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.frontend.test_tools import follow, preparer_for, read
from tests.frontend.test_xml_tools import ARGUMENTS, PARAMETERS, checked_grammar, in_order
from tests.prompt.tokenizers_for_tests import byte_level
from tests.server.live import QUESTION
from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.frontend.tool_forms import choose_form
from vlmserve.frontend.tool_parser import ToolParser
from vlmserve.frontend.tools import Function, ToolUse

TEMPLATE = (
    "{%- if tools %}{{- '<|turn>system\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<turn|>\n' }}"
    "{%- endif %}{%- for message in messages %}{{- '<|turn>' + message.role + '\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}{{- '<|tool_call>call:' + call.function.name + '{}<tool_call|>' }}"
    "{%- endfor %}{{- '<turn|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|turn>model\n' }}{%- endif %}"
)
NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tree": {"$ref": "#/$defs/node"},
        "pair": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
        "table": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "label": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["label"],
        }
    },
}
USE = ToolUse(
    (
        Function("write_file", "Writes.", PARAMETERS),
        Function("write", None, NESTED),
        Function("stop"),
        Function("free", None, {"type": "object"}),
    )
)
TREE = {"label": "a{b}:<|", "children": [{"label": ""}, {"label": "c", "children": []}]}


@pytest.fixture(scope="module")
def preparer(tmp_path_factory: pytest.TempPathFactory) -> RequestPreparer:
    return preparer_for(tmp_path_factory.mktemp("gemma"), TEMPLATE, byte_level())


def parser(preparer: RequestPreparer) -> ToolParser:
    return ToolParser(preparer.answers.tool_form, USE, anywhere=True)


@settings(deadline=None, max_examples=60)
@given(ARGUMENTS, st.sampled_from([1, 2, 3, 5, 13, 1000]))
def test_arguments_are_parsed_in_any_chunks(preparer, arguments, size):
    form = preparer.answers.tool_form
    text = f"Let me see.{form.written('write_file', in_order(arguments))}{form.written('stop', {})}"
    said, calls = read(parser(preparer), [text[start : start + size] for start in range(0, len(text), size)])
    assert said == "Let me see."
    assert [name for name, _ in calls] == ["write_file", "stop"]
    assert [json.loads(call) for _, call in calls] == [arguments, {}]


@settings(deadline=None, max_examples=15)
@given(ARGUMENTS)
def test_grammar_takes_arguments_of_the_schema(preparer, arguments):
    text = preparer.answers.tool_form.written("write_file", in_order(arguments))
    assert follow(preparer, preparer.answers.tool_form.grammar(USE, None), text) in ("complete", "finished")


def test_grammar_takes_nothing_else(preparer):
    form, grammar = checked_grammar(preparer, USE)
    assert follow(preparer, grammar, form.written("write", {"pair": [1]})).startswith("stops")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("write", {"tree": TREE, "pair": [1, -2], "table": {"one": "x", "two": ""}}),
        ("write", {"pair": [3, 4]}),
        ("free", {"a": "x", "b": 1.5, "c": [True, None, {"d": ["e"]}], "f": {}}),
    ],
)
def test_nested_arguments_are_read_back(preparer, name, arguments):
    form = preparer.answers.tool_form
    text = form.written(name, arguments)
    assert follow(preparer, form.grammar(USE, None), text) in ("complete", "finished")
    [(called, read_back)] = read(parser(preparer), list(text))[1]
    assert (called, json.loads(read_back)) == (name, arguments)


def test_quoted_keys_and_python_words_are_read(preparer):
    text = '<|tool_call>call:free{<|"|>a b<|"|>: None, c:True, d:plain}<tool_call|>'
    assert read(parser(preparer), [text])[1] == [("free", '{"a b": null, "c": true, "d": "plain"}')]


def test_instructions_show_a_readable_call(tmp_path):
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    told = preparer_for(tmp_path, plain, parser="gemma4")
    text = told.decode(told.chat(QUESTION, tools=USE).token_ids)
    shown = text[text.index("<|tool_call>") : text.index("<tool_call|>") + len("<tool_call|>")]
    call = shown.replace("NAME", "free").replace("ARGUMENT", "a", 1).replace("ARGUMENT", "b").replace("NUMBER", "5")
    assert read(parser(told), [call])[1] == [("free", '{"a": 5, "b": "TEXT"}')]


def schema_of(**parameter: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": parameter}}


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (schema_of(type="array", items={"type": "integer"}, maxItems=1), {"a": [1]}, {"a": [1, 2]}),
        (schema_of(type="array", items={"type": "null"}, minItems=1.0, maxItems=1), {"a": [None]}, {"a": []}),
        (schema_of(allOf=[{"type": "integer"}], description="x"), {"a": 1}, {"a": "x"}),
        ({"$ref": "#/$defs/own", "$defs": {"own": schema_of(type="integer")}}, {"a": 1}, {"b": 1}),
        (schema_of(type="integer", minimum=0, exclusiveMinimum=True), {"a": 1}, {"a": 0}),
        (schema_of(type="integer"), {"a": 9}, {"a": 10**30}),
        (schema_of(type="array"), {"a": [1] * 1000}, {"a": [1] * 1001}),
        (schema_of(allOf=[{"type": "object"}, {"required": ["x"]}]), {"a": {"x": [1.5, None, "t", True]}}, {"b": 1}),
    ],
)
def test_grammar_obeys_schemas_and_bounds(preparer, schema, good, bad):
    form = preparer.answers.tool_form
    use = ToolUse((Function("f", None, schema),))
    grammar = form.grammar(use, None)
    preparer.answers.check_grammar(grammar, use)
    assert follow(preparer, grammar, form.written("f", good)) in ("complete", "finished")
    assert follow(preparer, grammar, form.written("f", bad)).startswith("stops")


def test_repeated_types_do_not_multiply_rules(preparer):
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(40):
        schema = {"type": ["object"] * 2, "properties": {"a": schema}}
    use = ToolUse((Function("f", None, schema),))
    assert len(preparer.answers.tool_form.grammar(use, None).text) < 10_000


def test_hundreds_of_optional_parameters_compile(preparer):
    use = ToolUse((Function("f", None, {"properties": {f"k{number}": {"const": 1} for number in range(300)}}),))
    preparer.answers.check_grammar(preparer.answers.tool_form.grammar(use, None), use)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({**schema_of(), "required": True}, "required in a schema of f has to be a list of names, not True"),
        (schema_of(type="array", minItems="2"), "minItems in a schema of f has to be a whole number, at least 0"),
        (schema_of(type="array", minItems=3, maxItems=2), "maxItems in a schema of f has to be at least minItems, 3"),
        (schema_of(enum=[nested(900)]), "nested too deeply"),
        (schema_of(enum=[]), r"enum in a schema of f has to be a list of values, not \[\]"),
    ],
)
def test_unusable_schemas_are_rejected(preparer, schema, words):
    with pytest.raises(InvalidRequestError, match=words):
        preparer.answers.tool_form.grammar(ToolUse((Function("f", None, schema),)), None)


def test_unwritable_parameters_are_rejected(preparer):
    use = ToolUse((Function("f", None, {"properties": {"a:b": {"type": "string"}}}),))
    with pytest.raises(InvalidRequestError, match="parameter 'a:b' of f; rename it"):
        preparer.answers.tool_form.grammar(use, None)


def test_gemmas_template_chooses_its_form(preparer):
    form = preparer.answers.tool_form
    assert (form.name, form.native) == ("gemma4", True)
    assert choose_form(None, preparer.tokenizer, "gemma4").native is False
