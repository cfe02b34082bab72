"""Functions in /v1/responses and /v1/conversations, through the real openai client."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall
from pydantic import BaseModel

from tests.mock_checkpoint import make_mock_checkpoint
from tests.server.live import LiveServer
from tests.server.test_chat import data_url
from tests.server.test_responses import refused, shown
from tests.server.test_tools import BROKEN, NAMED, SCHEMAS
from tests.server.test_tools import TOOLS as NESTED
from vlmserve.models.hub import resolve_model
from vlmserve.settings.config import BUILT_IN_MODEL

TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in NESTED]
WEATHER: Any = {"type": "function", "name": "get_weather"}
STOP: Any = {"type": "function", "name": "stop"}
QUESTION: Any = {"role": "user", "content": "What is in the picture?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a context that holds the descriptions of tools."""
    return make_mock_checkpoint(tmp_path_factory.mktemp("mock"), context=2048)


@pytest.fixture(scope="module")
def live(folder):
    with LiveServer(folder, server={"storage_url": "memory"}) as server:
        yield server


@pytest.fixture(params=["mock", "real"])
def either(request, live, real):
    return {"mock": live, "real": real}[request.param]


def ask(server: LiveServer, input: Any = "What is in the picture?", **fields: Any) -> Any:
    fields = {"temperature": 1.2, "max_output_tokens": 400, "tools": TOOLS, "extra_body": {"seed": 1}, **fields}
    return server.openai.responses.create(model="tiny", input=input, **fields)


def seeded(seed: int) -> Any:
    return {"extra_body": {"seed": seed}}


def calls_of(response: Response) -> list[ResponseFunctionToolCall]:
    """Its output, which is nothing but calls that are as they should be."""
    calls = [item for item in response.output if isinstance(item, ResponseFunctionToolCall)]
    assert calls == response.output
    assert len({call.call_id for call in calls}) == len({call.id for call in calls}) == len(calls) > 0
    for call in calls:
        assert (call.type, call.status) == ("function_call", "completed")
        assert call.id.startswith("fc_")
        assert call.call_id.startswith("call_")
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    return calls


def returned(call_id: str, output: Any = "rain") -> Any:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


@pytest.mark.parametrize("choice", ["required", WEATHER])
def test_required_call_comes_alone_if_needed(either, choice):
    for seed in range(2):
        response = ask(either, tool_choice=choice, parallel_tool_calls=False, **seeded(seed))
        assert response.status == "completed"
        [call] = calls_of(response)
        if choice is WEATHER:
            assert call.name == "get_weather"


def test_several_calls_come_if_they_may(either):
    fields: Any = {"tool_choice": "required", "tools": TOOLS[1:], "extra_body": {"min_tokens": 120}}
    assert len(calls_of(ask(either, **fields))) > 1
    assert len(calls_of(ask(either, parallel_tool_calls=False, **fields))) == 1


def test_response_shows_its_request_and_is_found(live):
    response = ask(live, tool_choice=WEATHER, parallel_tool_calls=False, max_tool_calls=3)
    assert [tool.to_dict() for tool in response.tools] == [
        {"description": None, "parameters": None, "strict": False, **tool} for tool in TOOLS
    ]
    assert response.tool_choice.to_dict() == WEATHER
    assert (response.parallel_tool_calls, response.max_tool_calls) == (False, 3)
    assert live.openai.responses.retrieve(response.id) == response
    plain = ask(live, temperature=0)
    assert (plain.tool_choice, plain.parallel_tool_calls, plain.max_tool_calls) == ("auto", True, None)
    assert plain.output_text
    assert ask(live, tools=[]).tools == []


def test_model_may_know_functions_it_cannot_call(either):
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [STOP]}
    for seed in range(2):
        response = ask(either, tool_choice=allowed, **seeded(seed))
        assert {call.name for call in calls_of(response)} == {"stop"}
    assert response.tool_choice.to_dict() == allowed
    may = ask(either, tool_choice={**allowed, "mode": "auto"}, max_output_tokens=1)
    without = ask(either, tool_choice="none", max_output_tokens=1)
    assert may.usage.input_tokens == response.usage.input_tokens > without.usage.input_tokens


def test_chat_completions_call_the_same(either):
    fields: Any = {"temperature": 1.2, "seed": 5, "parallel_tool_calls": False}
    chat = either.openai.chat.completions.create(
        model="tiny", messages=[QUESTION], tools=NESTED, tool_choice=NAMED, max_tokens=400, **fields
    )
    [call] = calls_of(ask(either, tool_choice=WEATHER, parallel_tool_calls=False, **seeded(5)))
    assert call.arguments == chat.choices[0].message.tool_calls[0].function.arguments


@pytest.mark.parametrize("min_tokens", [0, 120])
def test_stream_reports_calls_in_openais_order(either, min_tokens):
    fields: Any = {"tool_choice": "required", "extra_body": {"seed": 3, "min_tokens": min_tokens}}
    whole = ask(either, **fields)
    events = list(ask(either, stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    last = events[-1].response
    rest = events[2:-1]
    for index, (item, same) in enumerate(zip(last.output, whole.output, strict=True)):
        mine = [event for event in rest if event.output_index == index]
        assert mine == rest[: len(mine)]
        rest = rest[len(mine) :]
        added, *deltas, done, item_done = mine
        assert (added.type, done.type, item_done.type) == (
            "response.output_item.added", "response.function_call_arguments.done", "response.output_item.done",
        )  # fmt: skip
        assert {event.type for event in deltas} == {"response.function_call_arguments.delta"}
        assert (added.item.id, added.item.call_id, added.item.name) == (item.id, item.call_id, item.name)
        assert (added.item.arguments, added.item.status) == ("", "in_progress")
        assert {event.item_id for event in (*deltas, done)} == {item.id}
        assert "".join(event.delta for event in deltas) == done.arguments == item.arguments == same.arguments
        assert item_done.item == item
    assert not rest
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert either.openai.responses.retrieve(last.id) == last


def test_the_clients_own_helpers_read_calls(live):
    class GetWeather(BaseModel):
        city: str

    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    tool["function"]["parameters"]["properties"]["city"]["maxLength"] = 12
    fields: Any = {"model": "tiny", "input": "Rain?", "tools": [tool], "tool_choice": "required", "temperature": 1.0}
    fields |= {"parallel_tool_calls": False, **seeded(2)}
    [call] = live.openai.responses.parse(**fields).output
    assert isinstance(call.parsed_arguments, GetWeather)
    with live.openai.responses.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        [streamed] = stream.get_final_response().output
    assert streamed.parsed_arguments == call.parsed_arguments
    assert "response.function_call_arguments.delta" in kinds
    follow_up = live.openai.responses.parse(
        model="tiny", input=[{"role": "user", "content": "Rain?"}, streamed, returned(streamed.call_id)], tools=[tool]
    )
    assert follow_up.output_text


def test_function_output_with_images_reaches_the_model(live):
    first = ask(live, shown(data_url("blue")), tool_choice=WEATHER)
    [call] = calls_of(first)

    def answer(*images: str) -> Response:
        parts = [{"type": "input_image", "image_url": data_url(colour)} for colour in images]
        output = returned(call.call_id, [{"type": "input_text", "text": "Here:"}, *parts])
        kept = ask(live, [output], previous_response_id=first.id, temperature=0)
        sent = ask(live, [*shown(data_url("blue")), *first.output, output], store=False, temperature=0)
        assert kept.output_text == sent.output_text
        assert kept.usage.input_tokens == sent.usage.input_tokens
        assert kept.usage.to_dict()["input_tokens_details"]["images"] == 1 + len(images)
        return kept

    red, green = answer("red", "green"), answer("green", "red")
    assert len({red.output_text, green.output_text, answer("red").output_text, answer().output_text}) == 4
    [item] = live.openai.responses.input_items.list(red.id).data
    assert item.id.startswith("fco_")
    assert (item.call_id, [part.type for part in item.output]) == (
        call.call_id, ["input_text", "input_image", "input_image"],
    )  # fmt: skip
    assert [part.image_url for part in item.output[1:]] == [data_url("red"), data_url("green")]
    chat = live.openai.chat.completions.create(
        model="tiny",
        temperature=0,
        max_tokens=400,
        tools=NESTED,
        messages=[
            {"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": data_url("blue")}},
                {"type": "text", "text": "What is in the picture?"},
            ]},
            {"role": "assistant", "tool_calls": [
                {"id": call.call_id, "type": "function",
                 "function": {"name": call.name, "arguments": call.arguments}}]},
            {"role": "tool", "tool_call_id": call.call_id, "content": [
                {"type": "text", "text": "Here:"},
                {"type": "image_url", "image_url": {"url": data_url("red")}},
                {"type": "image_url", "image_url": {"url": data_url("green")}},
            ]},
        ],
    )  # fmt: skip
    assert chat.choices[0].message.content == red.output_text
    assert chat.usage.prompt_tokens == red.usage.input_tokens


def test_returned_image_may_be_an_uploaded_file(live):
    png = base64.b64decode(data_url("red").partition(",")[2])
    file = live.openai.files.create(file=("red.png", png), purpose="vision")
    call = {"type": "function_call", "call_id": "c", "name": "stop", "arguments": "{}"}
    answers = [
        ask(live, [QUESTION, call, returned("c", [part])], temperature=0)
        for part in (
            {"type": "input_image", "file_id": file.id},
            {"type": "input_file", "file_id": file.id},
            {"type": "input_image", "image_url": data_url("red")},
        )
    ]
    assert len({answer.output_text for answer in answers}) == 1
    [_, _, item] = live.openai.responses.input_items.list(answers[0].id, order="asc").data
    assert item.output[0].file_id == file.id


def test_text_and_calls_form_one_message(live):
    function = {"name": "stop", "arguments": "{}"}
    calls = [{"type": "function_call", "call_id": id_, **function} for id_ in "ab"]
    spoken = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me stop."}]}
    answer = ask(live, [QUESTION, spoken, *calls, returned("a"), returned("b", [])], temperature=0)
    chat = live.openai.chat.completions.create(
        model="tiny",
        temperature=0,
        tools=NESTED,
        messages=[
            QUESTION,
            {"role": "assistant", "content": "Let me stop.",
             "tool_calls": [{"id": id_, "type": "function", "function": function} for id_ in "ab"]},
            {"role": "tool", "tool_call_id": "a", "content": "rain"},
            {"role": "tool", "tool_call_id": "b", "content": ""},
        ],
    )  # fmt: skip
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    one_by_one = ask(live, [QUESTION, calls[0], returned("a"), calls[1], returned("b")], temperature=0)
    assert one_by_one.output_text


def test_truncated_call_is_kept_but_unanswerable(live):
    for first in (ask(live, tool_choice=WEATHER, max_output_tokens=60),
                  list(ask(live, tool_choice=WEATHER, max_output_tokens=60, stream=True))[-1].response):  # fmt: skip
        assert (first.status, first.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        [call] = first.output
        assert call.status == "incomplete"
        with pytest.raises(json.JSONDecodeError):
            json.loads(call.arguments)
        assert live.openai.responses.retrieve(first.id) == first
        again = ask(live, "Go on.", previous_response_id=first.id, temperature=0)
        sent = ask(live, [QUESTION, *first.output, {"role": "user", "content": "Go on."}], temperature=0, store=False)
        assert again.output_text == sent.output_text
        error = refused(live, 400, input=[returned(call.call_id)], previous_response_id=first.id)
        assert (error["param"], call.call_id in error["message"]) == ("input[0].call_id", True)


def test_long_loop_is_truncated_before_the_user_message(live):
    turns: list[Any] = []
    for number in range(12):
        turns += [
            {"role": "user", "content": f"question {number} " + "red square " * 20},
            {**CALL, "call_id": f"c{number}"},
            returned(f"c{number}", "blue circle " * 20),
        ]
    assert refused(live, 400, input=turns, tools=TOOLS)["code"] == "context_length_exceeded"
    cut = ask(live, turns, truncation="auto", store=False, temperature=0)
    fields = {"tools": TOOLS, "temperature": 0, "max_output_tokens": 400}
    longest = next(
        response
        for start in range(0, len(turns), 3)
        if (response := httpx.post(
            f"{live.url}/v1/responses", json={"input": turns[start:], **fields}, timeout=60
        )).status_code == 200
        and response.json()["usage"]["input_tokens"] + 400 <= 2048
    )  # fmt: skip
    assert cut.usage.input_tokens == longest.json()["usage"]["input_tokens"] < 2048


def test_a_reference_to_a_call_is_the_call(live):
    first = ask(live, tool_choice="required", parallel_tool_calls=False, **seeded(1))
    [call] = calls_of(first)
    reference = {"type": "item_reference", "id": call.id}
    named = ask(live, [QUESTION, reference, returned(call.call_id)])
    whole = ask(live, [QUESTION, call.to_dict(), returned(call.call_id)])
    assert (named.output_text, named.usage.input_tokens) == (whole.output_text, whole.usage.input_tokens)


def test_calls_and_results_are_conversation_items(live):
    items = live.openai.conversations.items
    conversation = live.openai.conversations.create(items=[{"type": "message", **QUESTION}])
    [call] = calls_of(ask(live, [], conversation=conversation.id, tool_choice=WEATHER))
    image = [{"type": "input_image", "image_url": data_url("red")}]
    answer = ask(live, [returned(call.call_id, image)], conversation=conversation.id, temperature=0)
    _, called, output, said = listed = items.list(conversation.id, order="asc").data
    assert called.to_dict() == call.to_dict()
    assert (output.type, output.call_id, output.output[0].image_url) == (
        "function_call_output", call.call_id, data_url("red"),
    )  # fmt: skip
    assert said.id == answer.output[0].id
    for item in listed:
        assert items.retrieve(item.id, conversation_id=conversation.id) == item
    copy = live.openai.conversations.create(items=[item.to_dict() for item in listed[:2]])
    items.create(copy.id, items=[output.to_dict()])
    assert ask(live, [], conversation=copy.id, temperature=0).output_text == answer.output_text
    items.delete(called.id, conversation_id=conversation.id)
    error = refused(live, 400, input=[QUESTION], conversation=conversation.id)
    assert (error["param"], output.id in error["message"]) == ("input", True)
    items.delete(output.id, conversation_id=conversation.id)
    assert ask(live, conversation=conversation.id, temperature=0).output_text


def test_a_loop_goes_on_after_a_restart(folder, tmp_path):
    settings = {"storage_path": str(tmp_path / "history.db")}
    with LiveServer(folder, server=settings) as server:
        first = ask(server, tool_choice=WEATHER)
        conversation = server.openai.conversations.create(items=[{"type": "message", **QUESTION}])
        [spoken] = calls_of(ask(server, [], conversation=conversation.id, tool_choice=WEATHER))
    with LiveServer(folder, server=settings) as server:
        assert server.openai.responses.retrieve(first.id) == first
        [call] = calls_of(first)
        output = returned(call.call_id, [{"type": "input_image", "image_url": data_url("red")}])
        second = ask(server, [output], previous_response_id=first.id, temperature=0)
        assert second.usage.to_dict()["input_tokens_details"]["images"] == 1
        assert ask(server, [returned(spoken.call_id)], conversation=conversation.id, temperature=0).output_text


def test_result_turn_pays_only_for_the_result(tmp_path):
    engine = {"engine": "real", "kv_cache_memory": "16MiB", "num_threads": 1}
    with LiveServer(resolve_model(BUILT_IN_MODEL), engine=engine, server={"storage_url": "memory"}) as server:
        fields: Any = {"tools": TOOLS[1:], "max_output_tokens": 60, "temperature": 0}
        first = ask(server, shown(data_url("red")), tool_choice=STOP, **fields)
        [call] = calls_of(first)
        output = returned(call.call_id, [{"type": "input_image", "image_url": data_url("blue")}])
        second = ask(server, [output], previous_response_id=first.id, **fields)
        details = second.usage.to_dict()["input_tokens_details"]
        assert details["cached_tokens"] > first.usage.input_tokens - 16
        assert (details["images"], details["images_encoded"]) == (2, 1)


CALL = {"type": "function_call", "call_id": "c", "name": "stop", "arguments": "{}"}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice", "'web_search'"),
        ({"tools": [NESTED[0]]}, "tools[0]", "next to type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "must match"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools[1].name", "two tools"),
        ({"tools": [TOOLS[1], {"type": "function", **BROKEN["function"]}]}, "tools[1].parameters", "foo"),
        ({"tools": [{**STOP, "strict": True, "parameters": {"not": {}}}]}, "tools[0].parameters", "not"),
        ({"tools": [{**STOP, "stricts": True}]}, "tools[0].stricts", "did you mean strict?"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [], "tool_choice": STOP}, "tool_choice", "no tools"),
        ({"tool_choice": {"type": "function", "name": "fly"}}, "tool_choice", "'fly'"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice", "'web_search_preview'"),
        ({"tool_choice": NAMED}, "tool_choice", "next to type"),
        ({"tool_choice": "sometimes"}, "tool_choice", "required"),
        ({"tool_choice": 5}, "tool_choice", "required"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "fly"}]}},
         "tool_choice", "'fly'"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools", "empty"),
        ({"max_tool_calls": 0}, "max_tool_calls", "1"),
        ({"guided_regex": "a"}, "guided_regex", "tools"),
        ({"input": [QUESTION, returned("x")]}, "input[1].call_id", "'x'"),
        ({"input": [QUESTION, returned("c"), CALL]}, "input[1].call_id", "'c'"),
        ({"input": [QUESTION, {**CALL, "status": "incomplete"}, returned("c")]}, "input[2].call_id", "complete"),
        ({"input": [QUESTION, {**CALL, "arguments": "[1]"}]}, "input[1].arguments", "JSON object"),
        ({"input": [QUESTION, {**CALL, "name": ""}]}, "input[1].name", "must not be empty"),
        ({"input": [QUESTION, {"type": "function_call", "name": "stop", "arguments": ""}]},
         "input[1].call_id", "missing"),
        ({"input": [QUESTION, CALL, returned("c", 5)]}, "input[2].output", "string or a list"),
        ({"input": [QUESTION, CALL, returned("c", [{"type": "refusal", "refusal": "x"}])]},
         "input[2].output[0]", "input_text"),
        ({"input": [QUESTION, CALL, returned("c", [{"type": "input_image", "image_url": "x"}])]},
         "input[2].output[0].image_url", "http"),
        ({"input": [QUESTION, CALL, returned("c", [{"type": "input_file", "file_data": "x"}])]},
         "input[2].output[0].file_data", "not valid base64"),
        ({"input": [QUESTION, {"type": "computer_call", "id": "x"}]}, "input[1].call_id", "missing"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(live, fields, param, words):
    error = refused(live, 400, **{"tools": TOOLS, **fields})
    assert error["param"] == param
    assert words in error["message"]
    assert ".function" not in error["message"]
    assert "messages[" not in error["message"]


def test_missing_file_is_named_and_good_request_answered(live):
    output = returned("c", [{"type": "input_image", "file_id": "file-x"}])
    error = refused(live, 404, input=[QUESTION, CALL, output], tools=TOOLS)
    assert (error["param"], "file-x" in error["message"]) == ("input[2].output[0].file_id", True)
    assert ask(live, [QUESTION, CALL, returned("c")], temperature=0).output_text
    bad = httpx.post(f"{live.url}/v1/conversations", json={"items": [{**CALL, "call_id": ""}]}, timeout=30)
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "items[0].call_id")
    assert live.service.bodies.used == 0
