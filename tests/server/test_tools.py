"""Functions that the model may call, through the real openai client."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.mock_checkpoint import make_mock_checkpoint
from tests.server.live import QUESTION, LiveServer
from tests.server.test_bad_input import refused
from vlmserve.frontend.tools import Function
from vlmserve.server.schema.tools import NamedTool, tool_use

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Of a city.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop"}},
]
SCHEMAS = {"get_weather": WEATHER, "stop": {"type": "object", "maxProperties": 0}}
BROKEN = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "foo"}}}}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A server whose context holds the descriptions of tools, and in which special tokens are around calls."""
    folder = tmp_path_factory.mktemp("mock")
    make_mock_checkpoint(folder, context=2048, special=("<tool_call>", "</tool_call>"))
    with LiveServer(folder) as server:
        yield server


@pytest.fixture(params=["mock", "real"])
def either(request, live, real):
    return {"mock": live, "real": real}[request.param]


def ask(server: LiveServer, **fields):
    fields = {"temperature": 1.2, "max_tokens": 300, "tools": TOOLS, **fields}
    return server.openai.chat.completions.create(model="tiny", messages=QUESTION, **fields)


def check_calls(calls) -> None:
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_is_required_comes_and_fits(either, choice):
    for seed in range(2):
        [answer] = ask(either, tool_choice=choice, seed=seed, parallel_tool_calls=False).choices
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        [call] = answer.message.tool_calls
        check_calls([call])
        if choice is NAMED:
            assert call.function.name == "get_weather"


def test_a_function_may_be_called_required():
    functions = [Function("required"), Function("stop")]
    assert tool_use(functions, "required", True).callable == tuple(functions)
    named = NamedTool.model_validate({"type": "function", "function": {"name": "required"}})
    assert [function.name for function in tool_use(functions, named, True).callable] == ["required"]


def test_several_calls_come_if_they_may(live):
    answers = [ask(live, tool_choice="required", seed=seed, max_tokens=400).choices[0] for seed in range(8)]
    ended = [answer for answer in answers if answer.finish_reason == "tool_calls"]
    assert ended
    for answer in ended:
        check_calls(answer.message.tool_calls)


def test_optional_call_leaves_room_for_text(live):
    [answer] = ask(live, temperature=0).choices
    assert answer.finish_reason == "stop"
    assert answer.message.content
    assert answer.message.tool_calls is None


def test_without_a_choice_to_call_tools_change_nothing(live):
    fields = {"temperature": 0}
    assert (
        ask(live, tool_choice="none", **fields).choices[0].message.content
        == live.ask(**fields).json()["choices"][0]["message"]["content"]
    )


def test_stream_has_each_call_once_in_pieces(either):
    fields = {"tool_choice": "required", "seed": 3, "parallel_tool_calls": False}
    chunks = list(ask(either, stream=True, **fields))
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    first, *rest = deltas
    assert (first.index, first.type, first.function.arguments) == (0, "function", "")
    assert first.id
    assert first.function.name in SCHEMAS
    assert all(call.id is None and call.function.name is None and call.index == 0 for call in rest)
    assert rest
    [answer] = ask(either, **fields).choices
    assert "".join(call.function.arguments for call in rest) == answer.message.tool_calls[0].function.arguments
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["tool_calls"]
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_the_clients_own_stream_puts_calls_together(live):
    with live.openai.chat.completions.stream(
        model="tiny", messages=QUESTION, tools=TOOLS, tool_choice="required", max_tokens=300, seed=2, temperature=1.0
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    check_calls(message.tool_calls)


def test_tools_are_told_even_with_short_questions(either):
    def num_prompt_tokens(**fields):
        return ask(either, max_tokens=1, **fields).usage.prompt_tokens

    without = num_prompt_tokens(tools=[])
    assert num_prompt_tokens(tool_choice="none") == without
    assert num_prompt_tokens() > num_prompt_tokens(tools=TOOLS[:1]) > without


def test_a_call_that_is_cut_says_length(live):
    [answer] = ask(live, tool_choice=NAMED, max_tokens=50).choices
    assert answer.finish_reason == "length"


def test_each_of_n_answers_has_its_own_calls(live):
    answers = ask(live, tool_choice=NAMED, n=3, seed=1).choices
    for answer in answers:
        check_calls(answer.message.tool_calls)
    assert len({answer.message.tool_calls[0].function.arguments for answer in answers}) == 3


def test_answer_is_a_call_or_fits_its_schema(live):
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    kinds = set()
    for seed in range(12):
        [answer] = ask(live, response_format=wanted, seed=seed).choices
        if answer.message.tool_calls:
            check_calls(answer.message.tool_calls)
        elif answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.message.content), schema)
        kinds.add(answer.finish_reason)
    assert kinds >= {"stop"}


def test_results_go_back_to_the_model(live):
    call = ask(live, tool_choice=NAMED, seed=1).choices[0].message
    messages = [*QUESTION, call, {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "rain"}]
    prompts = [
        live.openai.chat.completions.create(model="tiny", messages=asked, tools=TOOLS).usage.prompt_tokens
        for asked in (QUESTION, messages)
    ]
    assert prompts[0] < prompts[1]


def test_truncated_call_is_taken_back_with_its_result(live):
    answer = ask(live, tool_choice=NAMED, seed=1, max_tokens=60).choices[0]
    assert answer.finish_reason == "length"
    with pytest.raises(ValueError, match=r"Expecting|Unterminated|Invalid"):
        json.loads(answer.message.tool_calls[0].function.arguments)
    messages = [
        *QUESTION,
        answer.message,
        {"role": "tool", "tool_call_id": answer.message.tool_calls[0].id, "content": "?"},
    ]
    again = live.openai.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, max_tokens=1)
    assert again.usage.prompt_tokens > ask(live, max_tokens=1).usage.prompt_tokens


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"tool_choice": "required", "tools": []}, "no tools", "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "fly", "tool_choice"),
        ({"tool_choice": "sometimes"}, "required", "tool_choice"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "two tools", "tools[1].function.name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "there are no tools", "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "must match", "tools[0].function.name"),
        ({"tools": [TOOLS[1], BROKEN]}, "foo", "tools[1].function.parameters"),
        ({"guided_regex": "a"}, "tools", "guided_regex"),
        ({"messages": [*QUESTION, {"role": "tool", "content": "x"}]}, "tool_call_id", "messages[1].tool_call_id"),
        ({"messages": [*QUESTION, {"role": "assistant", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[1]"}}]}]},
         "JSON object", "messages[1].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(live, fields, message, param):
    refused(live.ask(**{"tools": TOOLS, **fields}), 400, message, param=param, code="invalid_request")
