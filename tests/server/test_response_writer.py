"""Answers that say something and then call, as the openai client reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import httpx
import openai

from vlmserve.frontend.tool_parser import ContentDelta, Event, ToolCallDelta, ToolCallStart
from vlmserve.server.routes.response_writer import ResponseWriter
from vlmserve.server.schema.responses import ResponseObject
from vlmserve.server.schema.usage import CompletionTokensDetails, PromptTokensDetails, Usage

USAGE = Usage(3, 4, 7, PromptTokensDetails(0, 0, 0, 0), CompletionTokensDetails(2))
SAID: list[Event] = [
    ContentDelta("Let me "), ContentDelta("see. "),
    ToolCallStart(0, "call_a", "look"), ToolCallDelta(0, '{"at": '), ToolCallDelta(0, '"sky"}'),
    ToolCallStart(1, "call_b", "stop"), ToolCallDelta(1, "{}"),
]  # fmt: skip


def written(news: Iterable[Event], finish_reason: str = "stop", *, only_text: bool = False) -> bytes:
    """A whole stream, each piece of news on its own."""
    writer = ResponseWriter(
        ResponseObject(
            id="resp_x",
            created_at=1,
            metadata={},
            model="tiny",
            reasoning={"effort": None, "summary": None},
            store=False,
            temperature=1,
            top_p=1,
            truncation="auto",
        )
    )
    parts = [writer.begin(only_text=only_text), *(writer.write([new]) for new in news)]
    return b"".join([*parts, writer.finish(finish_reason, USAGE), writer.end()])


def read(stream: bytes) -> tuple[list[Any], Any]:
    """The events that the client's own stream tells of, and the response that it ends with."""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, content=stream)

    with httpx.Client(transport=httpx.MockTransport(answer)) as http:
        client = openai.OpenAI(base_url="http://test/v1", api_key="none", http_client=http)
        with client.responses.stream(model="tiny", input="x") as events:
            told = list(events)
    return told, told[-1].response


def test_text_and_calls_are_successive_items():
    events, response = read(written(SAID))
    text, look, stop = response.output
    assert (text.type, text.status, response.output_text) == ("message", "completed", "Let me see. ")
    assert (look.call_id, look.name, json.loads(look.arguments)) == ("call_a", "look", {"at": "sky"})
    assert (stop.call_id, stop.name, json.loads(stop.arguments)) == ("call_b", "stop", {})
    assert {look.status, stop.status, response.status} == {"completed"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    placed = [(event.output_index, event.type.removeprefix("response.")) for event in events[2:-1]]
    assert placed == [
        (0, "output_item.added"), (0, "content_part.added"), (0, "output_text.delta"), (0, "output_text.delta"),
        (0, "output_text.done"), (0, "content_part.done"), (0, "output_item.done"),
        (1, "output_item.added"), (1, "function_call_arguments.delta"), (1, "function_call_arguments.delta"),
        (1, "function_call_arguments.done"), (1, "output_item.done"),
        (2, "output_item.added"), (2, "function_call_arguments.delta"), (2, "function_call_arguments.done"),
        (2, "output_item.done"),
    ]  # fmt: skip


def test_only_what_was_cut_is_incomplete():
    _, response = read(written(SAID[:4], "length"))
    assert [item.status for item in response.output] == ["completed", "incomplete"]
    assert response.output[1].arguments == '{"at": '
    _, response = read(written(SAID[:5], "length"))
    assert [item.status for item in response.output] == ["completed", "completed"]
    assert response.status == "incomplete"
    _, response = read(written(SAID[:2], "length"))
    assert [item.status for item in response.output] == ["incomplete"]


def test_empty_answer_is_an_empty_message():
    for only_text in (False, True):
        events, response = read(written([], only_text=only_text))
        [item] = response.output
        assert (item.type, item.content[0].text) == ("message", "")
        assert [event.type for event in events[2:4]] == ["response.output_item.added", "response.content_part.added"]
