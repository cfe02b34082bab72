"""Thoughts apart from answers in all three APIs, through their own clients."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import pytest

from tests.mock_checkpoint import make_mock_checkpoint
from tests.server.live import QUESTION, LiveServer
from tests.server.test_tools import SCHEMAS, TOOLS, WEATHER
from tests.thinking_checkpoint import teach_thoughts

if TYPE_CHECKING:
    from anthropic.types import Message

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["color", "count"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA}}
BUDGET = 6


@pytest.fixture(scope="module")
def mock(tmp_path_factory):
    """A server whose mock engine thinks, with markers that are special tokens."""
    folder = teach_thoughts(make_mock_checkpoint(tmp_path_factory.mktemp("mock"), context=4096), special=True)
    with LiveServer(folder, server={"storage_url": "memory"}) as server:
        yield server


@pytest.fixture(scope="module")
def random(tmp_path_factory):
    """A server whose random model thinks without end."""
    from tests.checkpoints import make_llama

    folder = teach_thoughts(make_llama(tmp_path_factory.mktemp("llama"), max_position_embeddings=4096))
    engine = {"engine": "real", "dtype": "float32", "device": "cpu", "kv_cache_memory": "8MiB", "num_threads": 1}
    with LiveServer(folder, engine=engine, server={"storage_url": "memory"}) as server:
        yield server


@pytest.fixture(params=["mock", "random"])
def either(request, mock, random):
    return {"mock": mock, "random": random}[request.param]


def beside(fields: dict[str, Any]) -> dict[str, Any]:
    """What no client knows, with thoughts that are begun and have a budget."""
    ours = {
        "thinking_token_budget": BUDGET,
        "chat_template_kwargs": {"enable_thinking": True},
        "min_tokens": BUDGET + 3,
    }
    return {name: fields.pop(name, value) for name, value in ours.items()}


def chat(server: LiveServer, *, without: bool = False, **fields):
    body = beside(fields) | ({"include_reasoning": False} if without else {})
    fields = {"temperature": 0, "max_tokens": 200, "messages": QUESTION, "extra_body": body, **fields}
    return server.openai.chat.completions.create(model="tiny", **fields)


def respond(server: LiveServer, **fields):
    body = beside(fields)
    fields = {"temperature": 0, "max_output_tokens": 200, "input": "What is there?", "extra_body": body, **fields}
    return server.openai.responses.create(model="tiny", **fields)


def message(server: LiveServer, *, stream: bool = False, **fields) -> Message:
    thinking = {"type": "enabled", "budget_tokens": BUDGET}
    body = {"temperature": 0, "min_tokens": BUDGET + 3, **fields.pop("extra_body", {})}
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "messages": QUESTION, "thinking": thinking}
    if not stream:
        return server.anthropic.messages.create(**{**asked, "extra_body": body, **fields})
    with server.anthropic.messages.stream(**{**asked, "extra_body": body, **fields}) as events:
        return events.get_final_message()


def test_a_chat_has_thoughts_beside_its_text(either):
    answer = chat(either)
    said = answer.choices[0].message
    assert said.content
    assert said.reasoning_content
    assert said.reasoning == said.reasoning_content
    assert "think>" not in said.content + said.reasoning_content
    usage = answer.usage
    assert 1 < usage.completion_tokens_details.reasoning_tokens <= BUDGET + 2
    assert usage.completion_tokens > usage.completion_tokens_details.reasoning_tokens


def test_a_stream_has_the_same_thoughts_first(either):
    whole = chat(either).choices[0].message
    chunks = list(chat(either, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert thoughts == [getattr(delta, "reasoning", None) or "" for delta in deltas]
    assert "".join(thoughts) == whole.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == whole.content
    last_thought = max(place for place, thought in enumerate(thoughts) if thought)
    assert not any(delta.content for delta in deltas[:last_thought])
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens > 1


def test_several_answers_have_their_own_thoughts(mock):
    many = chat(mock, n=3, temperature=1.0, seed=5).choices
    alone = [chat(mock, temperature=1.0, seed=5 + number).choices[0] for number in range(3)]
    assert [one.message for one in many] == [one.message for one in alone]
    assert len({one.message.reasoning_content for one in many}) > 1


def test_whoever_wants_no_thoughts_gets_none(mock):
    kept, left_out = chat(mock), chat(mock, without=True)
    assert left_out.choices[0].message.content == kept.choices[0].message.content
    assert left_out.choices[0].message.reasoning is None
    assert left_out.usage == kept.usage
    for off in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        answer = mock.ask(**off).json()
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] is message["reasoning"] is None
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_thoughts_that_never_end_leave_no_answer(random):
    answer = chat(random, thinking_token_budget=None, max_tokens=20)
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("", "length")
    assert choice.message.reasoning_content
    assert answer.usage.completion_tokens == answer.usage.completion_tokens_details.reasoning_tokens == 20
    response = respond(random, thinking_token_budget=None, max_output_tokens=20)
    [item] = response.output
    assert (item.type, item.status, response.status) == ("reasoning", "incomplete", "incomplete")
    assert response.output_text == ""


@pytest.mark.parametrize("stream", [False, True])
def test_a_format_holds_behind_thoughts(either, stream):
    for seed in range(2):
        fields = {"response_format": FORMAT, "temperature": 1.3, "seed": seed, "stream": stream}
        if stream:
            deltas = [chunk.choices[0].delta for chunk in chat(either, **fields) if chunk.choices]
            text = "".join(delta.content or "" for delta in deltas)
            thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        else:
            said = chat(either, **fields).choices[0].message
            text, thoughts = said.content, said.reasoning_content
        jsonschema.validate(json.loads(text), SCHEMA)
        assert thoughts


@pytest.mark.parametrize("stream", [False, True])
def test_calls_come_behind_thoughts(either, stream):
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0, "seed": 2,
              "max_tokens": 400, "stream": stream}  # fmt: skip
    if stream:
        deltas = [chunk.choices[0].delta for chunk in chat(either, **fields) if chunk.choices]
        thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        calls = [call.function for delta in deltas for call in delta.tool_calls or []]
        name, arguments = calls[0].name, "".join(call.arguments for call in calls)
        assert not any(delta.content for delta in deltas)
    else:
        said = chat(either, **fields).choices[0].message
        [call] = said.tool_calls
        thoughts, name, arguments = said.reasoning_content, call.function.name, call.function.arguments
        assert said.content is None
    assert thoughts
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def test_optional_call_leaves_room_for_reasoning_and_text(mock):
    said = chat(mock, tools=TOOLS).choices[0].message
    assert said.content
    assert said.reasoning_content
    assert said.tool_calls is None


def test_stop_strings_end_text_not_reasoning(mock):
    said = chat(mock).choices[0].message
    word = said.content.split()[1]
    letter = next(letter for letter in said.reasoning_content if letter.isalpha())
    assert chat(mock, stop=[word]).choices[0].message.content == said.content.partition(word)[0]
    stopped = chat(mock, stop=[letter]).choices[0].message
    assert stopped.reasoning_content == said.reasoning_content
    assert stopped.content == said.content.partition(letter)[0]


def test_logprobs_are_those_of_the_text(either):
    answer = chat(either, logprobs=True, top_logprobs=2, max_tokens=30)
    [choice] = answer.choices
    spelled = b"".join(bytes(one.bytes) for one in choice.logprobs.content).decode(errors="replace")
    assert spelled.strip() == choice.message.content.strip() or choice.finish_reason == "length"
    tokens = answer.usage.completion_tokens - answer.usage.completion_tokens_details.reasoning_tokens
    assert tokens - len(choice.logprobs.content) in (0, 1), "the end token has none"
    chunks = [chunk.choices[0] for chunk in chat(either, logprobs=True, max_tokens=30, stream=True) if chunk.choices]
    streamed = [one.token for chunk in chunks if chunk.logprobs for one in chunk.logprobs.content]
    assert streamed == [one.token for one in choice.logprobs.content]
    assert not any(chunk.logprobs for chunk in chunks if getattr(chunk.delta, "reasoning", None))


def test_confidences_are_those_of_the_format(mock):
    answer = chat(mock, response_format=FORMAT, logprobs=True)
    assert set(answer.choices[0].confidence) == set(json.loads(answer.choices[0].message.content))


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_an_item_of_thoughts(either, stream):
    if stream:
        events = list(respond(either, stream=True))
        response = events[-1].response
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == response.output[0].content[0].text
        added = [event.item.type for event in events if event.type == "response.output_item.added"]
        assert added == ["reasoning", "message"]
        assert [event.sequence_number for event in events] == list(range(len(events)))
    else:
        response = respond(either)
    thoughts, said = response.output
    assert (thoughts.type, thoughts.status, thoughts.summary) == ("reasoning", "completed", [])
    assert thoughts.id.startswith("rs_")
    same = chat(either, messages=[{"role": "user", "content": "What is there?"}]).choices[0].message
    assert [part.text for part in thoughts.content] == [same.reasoning_content]
    assert (said.type, response.output_text) == ("message", same.content)
    assert response.usage.output_tokens_details.reasoning_tokens > 1


def test_response_calls_after_reasoning_and_continues(mock):
    tools = [{"type": "function", "name": "get_weather", "parameters": WEATHER}]
    fields = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 400}
    first = respond(mock, **fields)
    assert [item.type for item in first.output] == ["reasoning", "function_call"]
    output = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "Sun."}
    stored = respond(mock, tools=tools, tool_choice="none", input=[output], previous_response_id=first.id)
    said = [item.to_dict() for item in first.output]
    asked = {"role": "user", "content": "What is there?"}
    sent = respond(mock, tools=tools, tool_choice="none", input=[asked, *said, output])
    assert stored.output_text == sent.output_text
    assert stored.usage.input_tokens == sent.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_has_a_block_of_thoughts(either, stream):
    answer = message(either, stream=stream)
    thoughts, said = answer.content
    assert (thoughts.type, said.type, answer.stop_reason in ("end_turn", "max_tokens")) == ("thinking", "text", True)
    assert thoughts.thinking
    assert said.text
    same = message(either, stream=not stream)
    assert [block.to_dict() for block in same.content] == [block.to_dict() for block in answer.content]
    if not stream:
        details = answer.usage.to_dict()["output_tokens_details"]
        assert 0 < details["thinking_tokens"] <= BUDGET + 2


def test_message_calls_after_reasoning_and_continues(mock):
    tools: list[Any] = [{"name": "get_weather", "input_schema": WEATHER}]
    fields: dict[str, Any] = {"tools": tools, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    for stream in (False, True):
        answer = message(mock, stream=stream, max_tokens=400, **fields)
        assert [block.type for block in answer.content] == ["thinking", "tool_use"]
        jsonschema.validate(answer.content[1].input, WEATHER)
    result = {"type": "tool_result", "tool_use_id": answer.content[1].id, "content": "Sun."}
    called, returned = {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}
    again = message(mock, messages=[*QUESTION, called, returned], tools=tools)
    called["content"] = answer.content[1:]
    forgotten = message(mock, messages=[*QUESTION, called, returned], tools=tools)
    assert again.usage.input_tokens > forgotten.usage.input_tokens


def test_whoever_asks_messages_for_no_thoughts_gets_none(mock):
    from anthropic import NOT_GIVEN

    for thinking in (NOT_GIVEN, {"type": "disabled"}, {"type": "enabled", "budget_tokens": 9, "display": "omitted"}):
        answer = message(mock, thinking=thinking)
        assert [block.type for block in answer.content] == ["text"]
    free = message(mock, thinking={"type": "adaptive"})
    assert free.content[0].type == "thinking"


def num_prompt_tokens(server: LiveServer, answer: dict[str, Any]) -> int:
    turns = [*QUESTION, answer, {"role": "user", "content": "And why?"}]
    return server.ask(messages=turns, max_tokens=1).json()["usage"]["prompt_tokens"]


def test_returned_reasoning_is_shown_by_supporting_templates(mock):
    plain = {"role": "assistant", "content": "Red."}
    without = num_prompt_tokens(mock, plain)
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert num_prompt_tokens(mock, plain | {name: "It looks red."}) > without
    assert num_prompt_tokens(mock, plain | {"reasoning": None, "reasoning_details": []}) == without


def test_thoughts_that_are_no_text_are_refused(mock):
    answer = {"role": "assistant", "content": "Red.", "reasoning_content": 5}
    refusal = mock.ask(messages=[*QUESTION, answer]).json()["error"]
    assert refusal["param"] == "messages[1].reasoning_content"
    budget = mock.ask(thinking_token_budget=-1)
    assert (budget.status_code, budget.json()["error"]["param"]) == (400, "thinking_token_budget")
    body = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": [
        {"type": "thinking", "thinking": "x", "signature": ""}]}]}  # fmt: skip
    misplaced = httpx.post(f"{mock.url}/v1/messages", json=body, timeout=30).json()["error"]
    assert "thinking, which belongs in a message of the assistant" in misplaced["message"]
