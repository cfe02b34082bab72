"""Tools in /v1/messages, through Anthropic's own client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import pytest

from tests.mock_checkpoint import IMAGE_TOKENS, make_mock_checkpoint
from tests.server.live import LiveServer
from tests.server.test_chat import data_url
from tests.server.test_tools import SCHEMAS, WEATHER
from vlmserve.frontend.reasoning import Said

if TYPE_CHECKING:
    from anthropic.types import Message

ASK = [{"role": "user", "content": "What is in the picture?"}]
TOOLS: list[Any] = [
    {"name": "get_weather", "description": "Of a city.", "input_schema": WEATHER},
    {"name": "stop", "type": "custom", "input_schema": SCHEMAS["stop"], "cache_control": {"type": "ephemeral"}},
]
ANY, NAMED = {"type": "any"}, {"type": "tool", "name": "get_weather"}
ALONE = {"disable_parallel_tool_use": True}
BERN = '{"city": "Bern", "days": 2}'


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A server whose context holds the descriptions of tools."""
    folder = make_mock_checkpoint(tmp_path_factory.mktemp("mock"), context=4096)
    with LiveServer(folder, media={"max_images": 3}) as server:
        yield server


@pytest.fixture(params=["mock", "real"])
def either(request, live, real):
    return {"mock": live, "real": real}[request.param]


def fields_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Of a request that is complete. What no client knows goes beside them."""
    defaults = {"temperature": 1.0, "seed": 0, "min_tokens": 0}
    beside = {name: fields.pop(name, default) for name, default in defaults.items()}
    return {"model": "tiny", "max_tokens": 300, "messages": ASK, "tools": TOOLS, "extra_body": beside, **fields}


def ask(server: LiveServer, **fields) -> Message:
    return server.anthropic.messages.create(**fields_of(fields))


def streamed(server: LiveServer, **fields) -> Message:
    """What the client's own stream puts together."""
    with server.anthropic.messages.stream(**fields_of(fields)) as stream:
        return stream.get_final_message()


def count(server: LiveServer, **fields) -> int:
    return server.anthropic.messages.count_tokens(**{"model": "tiny", "messages": ASK, **fields}).input_tokens


def said(message: Message) -> list[Any]:
    """The blocks of an answer but for the ids of calls, which are new each time."""
    return [block.to_dict(mode="json") | {"id": None} for block in message.content]


def check_calls(blocks: list[Any]) -> None:
    assert len({block.id for block in blocks}) == len(blocks)
    for block in blocks:
        assert block.type == "tool_use"
        assert block.id.startswith("toolu_")
        jsonschema.validate(block.input, SCHEMAS[block.name])


class Script:
    """An `AnswerText` in which the model says this, whatever it says."""

    stop_string = None

    def __init__(self, text: str) -> None:
        self._rest = text
        self.num_tokens = self.num_decoded = self.num_shown = self.num_reasoning_tokens = 0
        self.stopped = False

    def push(self, token_ids: list[int]) -> Said:
        self.num_tokens += len(token_ids)
        text, self._rest = self._rest[:5], self._rest[5:]
        return Said("", text)

    def finish(self, end_token_id: int | None = None) -> Said:
        return Said("", self._rest)


@pytest.fixture
def says(live, monkeypatch):
    """Lets the model say something from now on."""

    def let(text: str) -> None:
        monkeypatch.setattr(live.service.preparer.answers, "text", lambda params, thoughts, shown_ids: Script(text))

    return let


def begun(name: str) -> str:
    """A call up to its arguments, as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": '


def written(name: str, arguments: str) -> str:
    return f"{begun(name)}{arguments}}}\n</tool_call>"


@pytest.mark.parametrize("choice", [ANY | ALONE, NAMED, NAMED | ALONE])
def test_forced_call_comes_alone_and_fits(either, choice):
    for seed in range(2):
        answer = ask(either, tool_choice=choice, seed=seed)
        assert answer.stop_reason == "tool_use"
        assert len(answer.content) == 1
        check_calls(answer.content)
        if choice["type"] == "tool":
            assert answer.content[0].name == "get_weather"


def test_a_stream_puts_together_the_same_call(either):
    fields = {"tool_choice": ANY | ALONE, "seed": 3}
    whole, stream = ask(either, **fields), streamed(either, **fields)
    assert said(stream) == said(whole)
    check_calls(stream.content)
    assert (stream.stop_reason, stream.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)


def test_several_calls_come_only_if_they_may(either):
    fields = {"tools": [TOOLS[1]], "min_tokens": 100}  # an answer that is complete sooner goes on if it can
    together = ask(either, tool_choice=ANY, **fields)
    check_calls(together.content)
    assert len(together.content) > 1
    assert said(streamed(either, tool_choice=ANY, **fields)) == said(together)
    alone = ask(either, tool_choice=ANY | ALONE, **fields)
    check_calls(alone.content)
    assert len(alone.content) == 1
    assert {together.stop_reason, alone.stop_reason} == {"tool_use"}


def test_optional_call_leaves_room_for_text(live):
    from anthropic import NOT_GIVEN

    for choice in (NOT_GIVEN, {"type": "auto"}, {"type": "auto"} | ALONE):
        answer = ask(live, temperature=0, tool_choice=choice)
        assert answer.stop_reason == "end_turn"
        assert [block.type for block in answer.content] == ["text"]
        assert said(streamed(live, temperature=0, tool_choice=choice)) == said(answer)


def test_text_and_calls_are_blocks_in_order(live, says):
    says("Let me look.\n" + written("get_weather", BERN) + "\n" + written("stop", "{}"))
    answer = ask(live)
    assert [block.type for block in answer.content] == ["text", "tool_use", "tool_use"]
    assert answer.content[0].text == "Let me look.\n"
    assert [block.input for block in answer.content[1:]] == [{"city": "Bern", "days": 2}, {}]
    check_calls(answer.content[1:])
    assert said(streamed(live)) == said(answer)
    events = list(live.anthropic.messages.create(**fields_of({"stream": True})))
    blocks = [event for event in events if event.type.startswith("content_block")]
    assert [block.index for block in blocks] == sorted(block.index for block in blocks)
    for index in range(3):
        begun, *deltas, ended = [block for block in blocks if block.index == index]
        assert (begun.type, ended.type) == ("content_block_start", "content_block_stop")
        assert {delta.delta.type for delta in deltas} == {"text_delta" if index == 0 else "input_json_delta"}
        if index:
            assert begun.content_block.input == {}
    pieces = [block.delta.partial_json for block in blocks if block.index == 1 and block.type == "content_block_delta"]
    assert "".join(pieces) == BERN
    assert [event.type for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2].delta.stop_reason == "tool_use"


def test_space_before_a_call_is_no_block(live, says):
    says("\n\n" + written("get_weather", BERN))
    for answer in (ask(live), streamed(live)):
        assert [block.type for block in answer.content] == ["tool_use"]


def test_input_is_verbatim_model_output(live, says):
    arguments = '{"x": 123456789012345678901234567890, "y": 1e999, "z": "\\u0007"}'
    says(written("stop", arguments))
    assert arguments in httpx.post(f"{live.url}/v1/messages", json={"messages": ASK, "tools": TOOLS}).text


@pytest.mark.parametrize(
    ("arguments", "whole"),
    [
        ("", {}),
        ("{", {}),
        ('{"city": "Be', {}),
        ('{"city": "Bern", "da', {"city": "Bern"}),
        ('{"city": "Bern", "days": [1, {"a": tr', {"city": "Bern", "days": [1, {}]}),
        (BERN, {"city": "Bern", "days": 2}),
    ],
)
def test_truncated_call_input_keeps_complete_values(live, says, arguments, whole):
    says(begun("get_weather") + arguments)
    for answer in (ask(live, max_tokens=2), streamed(live, max_tokens=2)):
        assert answer.stop_reason == "max_tokens"
        assert [block.input for block in answer.content] == [whole]


def image(color: str) -> dict[str, Any]:
    data = data_url(color).partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def result(call_id: str, *content: Any, **fields: Any) -> dict[str, Any]:
    blocks = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return {"type": "tool_result", "tool_use_id": call_id, "content": blocks, **fields}


def test_agent_sees_screenshots_of_its_tools(live):
    called = ask(live, tool_choice=NAMED)
    [call] = called.content
    turns = [*ASK, {"role": "assistant", "content": called.content}]

    def after(*shown: Any, more: Any = ()) -> dict[str, Any]:
        messages = [*turns, {"role": "user", "content": [result(call.id, "Done.", *shown), *more]}]
        return {"messages": messages, "temperature": 0}

    red, blue = image("red"), image("blue")
    answers = {
        name: ask(live, **fields)
        for name, fields in {
            "red": after(red), "blue": after(blue), "none": after(), "both": after(red, blue),
            "turned": after(blue, red), "beside": after(red, more=[{"type": "text", "text": "What colour?"}, blue]),
        }.items()
    }  # fmt: skip
    assert len({str(said(answer)) for answer in answers.values()}) == len(answers)
    assert said(streamed(live, **after(red))) == said(answers["red"])
    used = {name: answer.usage.input_tokens for name, answer in answers.items()}
    assert used["red"] == used["blue"] == used["none"] + IMAGE_TOKENS
    assert used["both"] == used["red"] + IMAGE_TOKENS
    fields = after(red, blue)
    assert count(live, messages=fields["messages"], tools=TOOLS) == used["both"]

    function = {"name": call.name, "arguments": str(call.input).replace("'", '"')}
    parts = [{"type": "text", "text": "Done."}, {"type": "image_url", "image_url": {"url": data_url("red")}}]
    same = live.openai.chat.completions.create(
        model="tiny", temperature=0, max_tokens=300,
        messages=[
            *ASK,
            {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": call.id, "content": parts},
        ],
        tools=[
            {"type": "function", "function": {"name": tool["name"], "parameters": tool["input_schema"]}
             | ({"description": tool["description"]} if "description" in tool else {})}
            for tool in TOOLS
        ],
    )  # fmt: skip
    assert same.choices[0].message.content == answers["red"].content[0].text
    assert same.usage.prompt_tokens == used["red"]


@pytest.mark.parametrize("stream", [False, True])
def test_clients_tool_loop_reaches_an_answer(live, monkeypatch, stream):
    from anthropic import beta_tool

    taken = []

    @beta_tool
    def screenshot(screen: int) -> list[Any]:
        """Shows a screen."""
        taken.append(screen)
        return [image("red")]

    scripts = iter(["Let me look.\n" + written("screenshot", '{"screen": 2}'), "It is red."])
    preparer = live.service.preparer
    monkeypatch.setattr(preparer.answers, "text", lambda params, thoughts, shown_ids: Script(next(scripts)))
    runner = live.anthropic.beta.messages.tool_runner(
        model="tiny", max_tokens=300, messages=ASK, tools=[screenshot], stream=stream
    )
    answers = [one.get_final_message() if stream else one for one in runner]
    assert taken == [2]
    assert [answer.stop_reason for answer in answers] == ["tool_use", "end_turn"]
    assert answers[1].content[0].text == "It is red."
    assert answers[1].usage.input_tokens > answers[0].usage.input_tokens + IMAGE_TOKENS


def test_several_results_and_text_are_one_turn(live):
    calls = [
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Bern", "days": 1}},
        {"type": "tool_use", "id": "toolu_2", "name": "stop", "input": {}, "caller": {"type": "direct"}},
    ]
    cached = {"cache_control": {"type": "ephemeral"}}
    results = [
        result("toolu_1", "rain", **cached),
        {"type": "tool_result", "tool_use_id": "toolu_2"} | cached,
        {"type": "text", "text": "And now?"} | cached,
    ]
    messages = [*ASK, {"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    assert ask(live, messages=messages).content
    failed = [*messages[:2], {"role": "user", "content": [{**results[0], "is_error": True}, *results[1:]]}]
    assert count(live, messages=failed) > count(live, messages=messages)
    listed = [*messages[:2], {"role": "user", "content": [{**results[0], "content": "rain"}, *results[1:]]}]
    assert count(live, messages=listed) == count(live, messages=messages)


def test_tools_are_counted_as_the_prompt_has_them(either):
    for fields in (
        {},
        {"tools": TOOLS},
        {"tools": TOOLS[:1], "tool_choice": NAMED},
        {"tools": TOOLS, "tool_choice": {"type": "none"}},
    ):
        usage = ask(either, max_tokens=1, **{"tools": [], **fields}).usage
        assert count(either, **fields) == usage.input_tokens + usage.cache_read_input_tokens
    assert count(either, tools=TOOLS, tool_choice={"type": "none"}) == count(either)
    assert count(either) < count(either, tools=TOOLS[:1]) < count(either, tools=TOOLS)
    examples = [{**TOOLS[0], "input_examples": [{"city": "Bern", "days": 1}]}]
    assert count(either, tools=examples) > count(either, tools=TOOLS[:1])
    assert ask(either, tools=[{**examples[0], "strict": True}], tool_choice=NAMED).stop_reason == "tool_use"


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


CALL = {"type": "tool_use", "id": "toolu_1", "name": "stop", "input": {}}
BROKEN = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "bm8="}}


def history(call: Any, *answer: Any) -> list[Any]:
    return [*ASK, {"role": "assistant", "content": [call]}, {"role": "user", "content": list(answer)}]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"thread": {"type": "create"}}, "thread is not supported here"),
        ({"tools": [], "tool_choice": ANY}, "tool_choice requires a call, but there are no tools"),
        ({"tool_choice": {"type": "tool", "name": "fly"}}, "tool_choice names 'fly'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"tool_choice": {"type": "required"}}, "tool_choice must be an object of type 'auto'"),
        ({"tool_choice": "auto"}, "tool_choice must be an object of type 'auto'"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools[1].name: two tools have the name stop"),
        ({"tools": [TOOLS[0], {"type": "web_search_20250305", "name": "web_search"}],
          "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice names 'web_search'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": ANY}, "there are no tools"),
        ({"tools": [{"type": "function", "name": "f", "input_schema": {}}]}, "tools[0].type must be 'custom'"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name must match"),
        ({"tools": [TOOLS[1], {"name": "f", "input_schema": {"properties": {"a": {"type": "foo"}}}}]},
         "tools[1].input_schema: "),
        ({"tools": [{"name": "f", "input_schema": nested(200)}]}, "tools[0].input_schema is nested too deeply"),
        ({"guided_regex": "a"}, "guided_regex cannot be combined with tools"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "messages[0]: content[0] is a tool_use"),
        ({"messages": [{"role": "assistant", "content": [result("toolu_1")]}, *ASK]},
         "messages[0]: content[0] is a tool_result"),
        ({"messages": history({**CALL, "input": "{}"}, result("toolu_1"))}, "messages[1].content[0].input must be"),
        ({"messages": history({**CALL, "input": nested(200)}, result("toolu_1"))},
         "messages[1].content[0].input is nested too deeply"),
        ({"messages": history(CALL, {"type": "tool_result"})}, "messages[2].content[0].tool_use_id is missing"),
        ({"messages": history(CALL, result("toolu_1", {"type": "audio"}))},
         "messages[2].content[0].content[0] must be an object of type 'text', 'image', 'document'"),
        ({"system": "Be brief.", "messages": history(CALL, result("toolu_1"), result("toolu_2", "x", BROKEN))},
         "messages[2].content[1].content[1].source: "),
        ({"system": "Be brief.", "messages": history(CALL, result("toolu_1"), BROKEN)},
         "messages[2].content[1].source: "),
        ({"messages": history(CALL, result("toolu_1", *[image("red")] * 4))}, "at most 3 are allowed"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(live, fields, message):
    body = {"model": "tiny", "max_tokens": 5, "messages": ASK, "tools": TOOLS, **fields}
    response = httpx.post(f"{live.url}/v1/messages", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert message in response.json()["error"]["message"]
    assert ask(live, tool_choice=NAMED).stop_reason == "tool_use"


def test_counting_refuses_with_the_same_words(live):
    from anthropic import BadRequestError

    for fields, message in (
        ({"messages": history(CALL, BROKEN)}, "messages[2].content[0].source: "),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools[1].name: two tools"),
    ):
        with pytest.raises(BadRequestError) as refusal:
            count(live, **fields)
        assert refusal.value.body["error"]["message"].startswith(message)
