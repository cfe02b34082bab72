"""Calls with a tag for each argument, as Qwen3-Coder writes them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoints import make_llama
from tests.frontend.test_tools import follow, preparer_for, read
from tests.prompt.tokenizers_for_tests import byte_level
from tests.server.live import QUESTION, LiveServer
from tests.thinking_checkpoint import teach_thoughts
from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.frontend.tool_parser import ToolParser
from vlmserve.frontend.tools import Function, ToolForm, ToolUse
from vlmserve.types import Grammar

TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\n<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}"
    "{%- endfor %}{{- '\n</tools>\n<tool_call>\n<function=name>\n<parameter=argument>\nvalue\n</parameter>\n"
    "</function>\n</tool_call><|im_end|>\n' }}{%- endif %}{%- for message in messages %}"
    "{%- if message.role == 'tool' %}{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response>"
    "<|im_end|>\n' }}{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{%- for name, value in call.function.arguments | items %}{{- '<parameter=' + name + '>\n' }}"
    "{{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}"
    "{{- '\n</parameter>\n' }}{%- endfor %}{{- '</function>\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""As Qwen3-Coder and Qwen3.5 write it."""
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "color": {"enum": ["red", "dark blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "deep": {"type": "boolean"},
        "at": {"$ref": "#/$defs/point"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "either": {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "null"}]},
        "anything": {},
    },
    "required": ["text", "count"],
    "additionalProperties": False,
    "$defs": {"point": POINT},
}
USE = ToolUse(
    (Function("write_file", "Writes.", PARAMETERS), Function("stop"), Function("free", None, {"type": "object"}))
)
TEXTS = st.text(st.sampled_from('ab<>/"\\{}\n é日😀'), max_size=12).filter(lambda text: "\n</parameter>" not in text)
ARGUMENTS = st.fixed_dictionaries(
    {"text": TEXTS, "count": st.integers(0, 99)},
    optional={
        "color": st.sampled_from(["red", "dark blue"]),
        "deep": st.booleans(),
        "at": st.fixed_dictionaries({"x": st.integers(-9, 9)}),
        "tags": st.lists(TEXTS, max_size=3),
        "either": st.one_of(st.none(), st.integers(-5, 5), st.sampled_from(["", "a b", "[1"])),
        "anything": st.one_of(st.booleans(), st.lists(st.integers(0, 9), max_size=2), st.sampled_from(["x", "{"])),
    },
)


@pytest.fixture(scope="module")
def preparer(tmp_path_factory) -> RequestPreparer:
    return preparer_for(tmp_path_factory.mktemp("xml"), TEMPLATE, byte_level())


def checked_grammar(preparer: RequestPreparer, use: ToolUse) -> tuple[ToolForm, Grammar]:
    """Return the form of calls and its grammar, which takes text, and no calls that the functions do not allow."""
    form = preparer.answers.tool_form
    grammar = form.grammar(use, None)
    preparer.answers.check_grammar(grammar, use)
    good = {"text": "a", "count": 5}
    for bad in (
        {"count": 5, "text": "a"},
        {"text": "a"},
        good | {"count": 100},
        good | {"color": "green"},
        good | {"deep": "perhaps"},
        good | {"at": {"x": 1, "y": 2}},
        good | {"tags": [5]},
        good | {"other": 1},
    ):
        assert follow(preparer, grammar, form.written("write_file", bad)).startswith("stops")
    assert follow(preparer, grammar, form.written("other", {})).startswith("stops")
    assert follow(preparer, grammar, form.written("stop", {"x": "1"})).startswith("stops")
    assert follow(preparer, grammar, "Just text.") == "complete"
    return form, grammar


def in_order(arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: arguments[key] for key in PARAMETERS["properties"] if key in arguments}


def parser(preparer: RequestPreparer) -> ToolParser:
    return ToolParser(preparer.answers.tool_form, USE, anywhere=True)


@settings(deadline=None, max_examples=200)
@given(ARGUMENTS, st.sampled_from([1, 2, 3, 5, 8, 13, 1000]))
def test_arguments_are_parsed_verbatim_in_any_chunks(preparer, arguments, size):
    written = preparer.answers.tool_form.written("write_file", in_order(arguments))
    text = f"Let me see.\n{written}\n{preparer.answers.tool_form.written('stop', {})}"
    said, calls = read(parser(preparer), [text[start : start + size] for start in range(0, len(text), size)])
    assert said == "Let me see.\n"
    assert [name for name, _ in calls] == ["write_file", "stop"]
    assert [json.loads(call) for _, call in calls] == [arguments, {}]


@settings(deadline=None, max_examples=40)
@given(ARGUMENTS)
def test_the_grammar_takes_what_fits_the_schema(preparer, arguments):
    grammar = preparer.answers.tool_form.grammar(USE, None)
    text = preparer.answers.tool_form.written("write_file", in_order(arguments))
    assert follow(preparer, grammar, text) in ("complete", "finished")


def test_the_grammar_takes_nothing_else(preparer):
    form, grammar = checked_grammar(preparer, USE)
    free = form.written("free", {"a": "x", "b": "1"})
    assert follow(preparer, grammar, free) in ("complete", "finished")
    assert read(parser(preparer), [free]) == ("", [("free", '{"a": "x", "b": 1}')])


def test_values_may_be_written_as_python_does(preparer):
    """As the template writes them, so as models have learnt them."""
    arguments = {"text": "True", "count": 1, "deep": True, "either": None}
    written = preparer.answers.tool_form.written("write_file", in_order(arguments))
    python = written.replace("\ntrue\n", "\nTrue\n").replace("\nnull\n", "\nNone\n")
    assert python != written
    assert follow(preparer, preparer.answers.tool_form.grammar(USE, None), python) in ("complete", "finished")
    [(_, read_back)] = read(parser(preparer), [python])[1]
    assert json.loads(read_back) == arguments


@pytest.mark.parametrize("word", ["NaN", "-Infinity"])
def test_numbers_outside_json_stay_strings(preparer, word):
    text = preparer.answers.tool_form.written("free", {"a": word})
    assert read(parser(preparer), [text])[1] == [("free", json.dumps({"a": word}))]


def test_instructions_show_a_readable_call(tmp_path):
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    told = preparer_for(tmp_path, plain, parser="qwen3_coder")
    text = told.decode(told.chat(QUESTION, tools=USE).token_ids)
    shown = text[text.index("<tool_call>") : text.index("</tool_call>") + len("</tool_call>")]
    call = shown.replace("NAME", "write_file").replace("ARGUMENT", "text")
    assert read(parser(told), [call])[1] == [("write_file", '{"text": "VALUE"}')]


def test_long_strings_are_streamed(preparer):
    text = preparer.answers.tool_form.written("write_file", {"text": "line\n" * 50, "count": 1})
    shown = parser(preparer)
    pieces = [shown.push(character) for character in text]
    assert sum(map(len, pieces)) > 100


def test_the_form_is_the_templates_own(preparer, tmp_path):
    assert (preparer.answers.tool_form.name, preparer.answers.tool_form.native) == ("qwen3_xml", True)
    told = preparer_for(tmp_path, None, parser="qwen3_coder").answers.tool_form
    assert (told.name, told.native) == ("qwen3_xml", False)
    call = {"id": "call_1", "type": "function", "function": {"name": "write_file", "arguments": '{"text": "a\\nb"}'}}
    messages = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = preparer.decode(preparer.chat(messages, tools=USE).token_ids)
    assert preparer.answers.tool_form.written("write_file", {"text": "a\nb"}) in text


def test_a_parameter_that_cannot_be_written_is_refused(preparer):
    use = ToolUse((Function("f", None, {"type": "object", "properties": {"a>b": {"type": "string"}}}),))
    with pytest.raises(InvalidRequestError, match="'a>b' of f"):
        preparer.answers.tool_form.grammar(use, None)


def test_random_model_calls_by_schema_after_reasoning(tmp_path):
    folder = teach_thoughts(make_llama(tmp_path, max_position_embeddings=2048))
    (folder / "chat_template.jinja").write_text(f"{TEMPLATE}<think>\n")
    engine = {"engine": "real", "dtype": "float32", "device": "cpu", "kv_cache_memory": "8MiB", "num_threads": 1}
    properties = {key: PARAMETERS["properties"][key] for key in ("color", "count", "deep", "at")}
    schema = {**PARAMETERS, "properties": properties, "required": ["color", "count", "at"]}
    tools: Any = [{"type": "function", "function": {"name": "paint", "parameters": schema}}]
    with LiveServer(folder, engine=engine) as server:
        for seed in range(3):
            fields = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400,
                      "extra_body": {"thinking_token_budget": 8}}  # fmt: skip
            ask = server.openai.chat.completions.create
            answer = ask(model="tiny", messages=QUESTION, temperature=1.2, seed=seed, **fields).choices[0]
            [call] = answer.message.tool_calls
            assert (answer.finish_reason, call.function.name) == ("tool_calls", "paint")
            jsonschema.validate(json.loads(call.function.arguments), schema)
            assert answer.message.reasoning_content
            assert answer.message.content is None
            chunks = ask(model="tiny", messages=QUESTION, temperature=1.2, seed=seed, stream=True, **fields)
            calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
            assert "".join(call.function.arguments for call in calls) == answer.message.tool_calls[0].function.arguments
