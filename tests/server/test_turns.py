"""Items as messages, and what is said of them when they are wrong."""

from __future__ import annotations

from typing import Any

import pytest

from vlmserve.errors import InvalidRequestError
from vlmserve.server.schema.items import function_call, message
from vlmserve.server.turns import Turns


def said(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return message(role, list(parts))


def text(words: str) -> dict[str, Any]:
    return {"type": "input_text", "text": words}


def output(call_id: str, value: Any = "x") -> dict[str, Any]:
    return {"id": "fco_1", "type": "function_call_output", "call_id": call_id, "output": value}


IMAGE = {"type": "input_image", "image_url": "data:", "detail": "low", "max_pixels": 9}
SHOWN = {"type": "image_url", "image_url": {"url": "data:", "detail": "low"}, "max_pixels": 9}
BEFORE = [said("user", IMAGE), said("assistant", text("Let me "), text("look.")), function_call("a", "look", "{}")]
NEW = [
    function_call("b", "look", '{"at": 1}'),
    function_call("c", "look", '{"at', "incomplete"),
    output("a", [text("Here:"), IMAGE]),
    output("b", []),
    said("developer", text("Be brief.")),
    function_call("d", "look", "{}"),
]


def calls(*ids_and_arguments: tuple[str, str]) -> list[dict[str, Any]]:
    return [
        {"id": id_, "type": "function", "function": {"name": "look", "arguments": arguments}}
        for id_, arguments in ids_and_arguments
    ]


def test_text_and_calls_are_one_message_before_results() -> None:
    assert Turns("Hi.", BEFORE, NEW).messages == [
        {"role": "system", "content": "Hi."},
        {"role": "user", "content": [SHOWN]},
        {"role": "assistant", "content": "Let me look.", "tool_calls": calls(("a", "{}"), ("b", '{"at": 1}'))},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "Here:"}, SHOWN]},
        {"role": "tool", "tool_call_id": "b", "content": ""},
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "", "tool_calls": calls(("d", "{}"))},
    ]


@pytest.mark.parametrize(
    ("theirs", "ours", "param"),
    [
        ("messages[0].content", "instructions", "instructions"),
        ("messages[1].content[0].image_url.url", "an earlier turn", "input"),
        ("messages[2].tool_calls[0].function.arguments", "an earlier turn", "input"),
        ("messages[2].tool_calls[1].function.arguments", "input[0].arguments", "input[0].arguments"),
        ("messages[3].content[1].image_url.url", "input[2].output[1].image_url", "input[2].output[1].image_url"),
        ("messages[4].tool_call_id", "input[3].call_id", "input[3].call_id"),
        ("messages[5].content", "input[4].content", "input[4].content"),
        ("messages[6].tool_calls[0]", "input[5]", "input[5]"),
        ("messages[7].content", "messages[7].content", "messages[7].content"),
        ("messages", "messages", "input"),
    ],
)
def test_errors_speak_of_items(theirs: str, ours: str, param: str) -> None:
    error = InvalidRequestError(f"{theirs}: this is wrong", param=theirs)
    Turns("Hi.", BEFORE, NEW).reword(error)
    assert (str(error), error.param) == (f"{ours}: this is wrong", param)


@pytest.mark.parametrize(
    ("before", "new", "param"),
    [
        ([], [output("a")], "input[0].call_id"),
        ([], [output("a"), function_call("a", "look", "{}")], "input[0].call_id"),
        (BEFORE, [function_call("b", "look", "{", "incomplete"), output("b")], "input[1].call_id"),
        ([output("a")], [said("user", text("?"))], "input"),
    ],
)
def test_what_was_returned_to_nobody_is_refused(before: Any, new: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        Turns(None, before, new)
    assert refusal.value.param == param
    Turns(None, BEFORE, [output("a")])
