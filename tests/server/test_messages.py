"""/v1/messages through Anthropic's own client."""

from __future__ import annotations

import base64
import functools
from typing import Literal

import httpx
import pytest
from pydantic import BaseModel

from tests.server.test_chat import data_url

ASK = [{"role": "user", "content": "What is in the picture?"}]


@pytest.fixture
def client(live):
    return live.anthropic


def shown(url: str) -> list:
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": "What is in the picture?"}]
    return [{"role": "user", "content": parts}]


def test_answer_equals_the_openai_answer(live, client):
    url = data_url("red")
    answer = client.messages.create(model="tiny", max_tokens=100, messages=shown(url), system="Be brief.")
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is in the picture?"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    same = live.openai.chat.completions.create(model="tiny", messages=messages)
    assert answer.content[0].text == same.choices[0].message.content
    assert answer.stop_reason == "end_turn"
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == same.usage.prompt_tokens
    assert answer.usage.output_tokens == same.usage.completion_tokens
    count = client.messages.count_tokens(
        model="tiny", messages=shown(url), system=[{"type": "text", "text": "Be brief."}]
    )
    assert count.input_tokens == same.usage.prompt_tokens
    other = client.messages.create(model="tiny", max_tokens=100, messages=shown(data_url("blue")), system="Be brief.")
    assert other.content[0].text != answer.content[0].text


def test_stream_equals_the_whole_answer(client):
    whole = client.messages.create(model="tiny", max_tokens=5, messages=ASK)
    assert whole.stop_reason == "max_tokens"
    with client.messages.stream(model="tiny", max_tokens=5, messages=ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 5
    kinds = [event.type for event in client.messages.create(model="tiny", max_tokens=5, messages=ASK, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) <= {"content_block_delta", "ping"}


def test_a_stop_sequence_is_named(client):
    whole = client.messages.create(model="tiny", max_tokens=50, messages=ASK)
    stop = whole.content[0].text.split()[2]
    cut = client.messages.create(model="tiny", max_tokens=50, messages=ASK, stop_sequences=["never", stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == whole.content[0].text.partition(stop)[0]


def test_answer_fits_the_requested_format(real):
    class Shape(BaseModel):
        color: Literal["red", "blue"]
        round: bool

    fields = {"model": "tiny", "max_tokens": 200, "messages": ASK, "output_format": Shape, "extra_body": {"seed": 1}}
    whole = real.anthropic.messages.parse(**fields)
    assert whole.stop_reason == "end_turn"
    assert isinstance(whole.parsed_output, Shape)
    with real.anthropic.messages.stream(**fields) as stream:
        assert stream.get_final_message().parsed_output == whole.parsed_output
    config = {"format": {"type": "json_schema", "schema": Shape.model_json_schema()}}
    count = functools.partial(real.anthropic.messages.count_tokens, model="tiny", messages=ASK)
    assert count(output_config=config) == count()


@pytest.mark.parametrize(
    ("fields", "status", "kind", "message"),
    [
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"temperature": -1}, 400, "invalid_request_error", "temperature"),
        ({"n": 2}, 400, "invalid_request_error", "n is not supported"),
        ({"use_beam_search": True}, 400, "invalid_request_error", "use_beam_search is not supported"),
        ({"output_config": {"format": {"type": "json_schema"}}}, 400, "invalid_request_error", "format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}}}}, 400,
         "invalid_request_error", "uniqueItems"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}, "guided_regex": "a"}, 400,
         "invalid_request_error", "both output_config.format.schema and guided_regex"),
        ({"model": "other"}, 404, "not_found_error", "other"),
        ({"messages": shown("data:image/png;base64," + base64.b64encode(b"no").decode())}, 400,
         "invalid_request_error", "image"),
    ],
)  # fmt: skip
def test_errors_have_anthropics_form(live, client, fields, status, kind, message):
    body = {"model": "tiny", "max_tokens": 5, "messages": ASK, **fields}
    response = httpx.post(f"{live.url}/v1/messages", json=body)
    assert response.status_code == status
    error = response.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == kind
    assert message in error["error"]["message"]
    assert httpx.get(f"{live.url}/v1/messages").json()["error"]["type"] == "invalid_request_error"
    assert client.messages.create(model="tiny", max_tokens=5, messages=ASK).content
