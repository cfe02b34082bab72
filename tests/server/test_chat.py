"""Good requests, mostly through the real openai client."""

from __future__ import annotations

import asyncio
import base64
import io
import json

import openai
import pytest
from PIL import Image

from tests.mock_checkpoint import IMAGE_TOKENS
from tests.server.live import QUESTION, stream_lines
from tests.waiting import wait_until
from vlmserve.engine.messages import Add, encode


def data_url(color: str, size: tuple[int, int] = (40, 30)) -> str:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def about(*urls: str, text: str = "What is in the picture?") -> list:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def test_an_answer_has_everything_that_openai_promises(live):
    answer = live.openai.chat.completions.create(model="tiny", messages=QUESTION)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_equals_the_whole_answer(live):
    whole = live.openai.chat.completions.create(model="tiny", messages=QUESTION)
    chunks = list(live.openai.chat.completions.create(model="tiny", messages=QUESTION, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert len({c.id for c in chunks}) == 1
    assert all(c.object == "chat.completion.chunk" and c.usage is None for c in chunks)


def test_requested_usage_comes_last_in_a_stream(live):
    chunks = list(
        live.openai.chat.completions.create(
            model="tiny", messages=QUESTION, stream=True, stream_options={"include_usage": True}, max_tokens=5
        )
    )
    whole = live.openai.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=5)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 5
    assert all(c.usage is None for c in chunks[:-1])


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_requested_usage_comes_with_each_event(live, api):
    ask = {"chat": live.openai.chat.completions, "completions": live.openai.completions}[api]
    prompt = {"chat": {"messages": QUESTION}, "completions": {"prompt": "What"}}[api]
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(ask.create(model="tiny", **prompt, stream=True, stream_options=options, max_tokens=5))
    told = [chunk.usage.completion_tokens for chunk in chunks]
    assert told == sorted(told)
    assert told[-1] == told[-2] == 5
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {chunks[-1].usage.prompt_tokens}
    silent = list(ask.create(model="tiny", **prompt, stream=True, stream_options={"continuous_usage_stats": True}))
    assert all(chunk.usage is None for chunk in silent)


def test_server_sent_events_end_with_done(live):
    response = live.ask(stream=True, max_tokens=3)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events)


async def test_the_async_client_gets_whole_answers_and_streams(live):
    async with live.async_openai as client:
        whole = await client.chat.completions.create(model="tiny", messages=QUESTION)
        stream = await client.chat.completions.create(model="tiny", messages=QUESTION, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content


async def test_hundred_concurrent_streams_get_their_own_answers(live):
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        messages = [{"role": "user", "content": f"question {number}"}]
        stream = await client.chat.completions.create(model="tiny", messages=messages, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async with live.async_openai as client:
        together = await asyncio.gather(*(ask(client, number) for number in range(100)))
        assert len(set(together)) == 100
        assert await ask(client, 42) == together[42]


def test_another_image_changes_the_answer(live):
    def ask(*colors: str) -> tuple[str, int]:
        answer = live.openai.chat.completions.create(model="tiny", messages=about(*map(data_url, colors)))
        return answer.choices[0].message.content, answer.usage.prompt_tokens

    red, length = ask("red")
    assert ask("red") == (red, length)
    assert ask("blue")[0] != red
    assert ask("red", "blue")[1] == length + IMAGE_TOKENS


def test_images_pass_as_strings_and_with_detail(live):
    url = data_url("red")
    objects = live.post({"messages": about(url)}).json()
    plain = live.post({"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": url}, {"type": "text", "text": "What is in the picture?"}
    ]}]}).json()  # fmt: skip
    detailed = live.post({"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "text", "text": "What is in the picture?"},
    ]}]}).json()  # fmt: skip
    assert objects["choices"] == plain["choices"] == detailed["choices"]


def test_a_conversation_with_an_answer_fed_back_works(live):
    first = live.openai.chat.completions.create(model="tiny", messages=QUESTION).choices[0].message
    again = [*QUESTION, first, {"role": "user", "content": "And why?"}]
    answer = live.openai.chat.completions.create(model="tiny", messages=again)
    assert answer.choices[0].message.content != first.content


def test_extra_fields_of_returned_answers_change_nothing(live):
    spoken = {"role": "assistant", "content": "A red square."}
    beside = {
        "reasoning": "It is red.",
        "reasoning_content": "It is red.",
        "reasoning_details": [{"type": "reasoning.text", "text": "It is red."}],
        "thinking_blocks": [{"type": "thinking", "thinking": "It is red.", "signature": ""}],
        "provider_specific_fields": {"refusal": None},
        "cache_control": {"type": "ephemeral"},
    }
    following = {"role": "user", "content": "And why?"}
    plain, other, more = (
        live.ask(messages=[*QUESTION, answer, following]).json()
        for answer in (spoken, spoken | {"content": "A blue square."}, spoken | beside)
    )
    assert more["choices"] == plain["choices"] != other["choices"]
    assert more["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def test_part_asking_to_be_cached_is_unchanged(live):
    [plain] = about(data_url("red"))
    hinted = plain | {"content": [part | {"cache_control": {"type": "ephemeral"}} for part in plain["content"]]}
    assert live.ask(messages=[hinted]).json()["choices"] == live.ask(messages=[plain]).json()["choices"]


def test_n_seeded_answers_equal_single_seeded_requests(live):
    def texts(**fields) -> list[str]:
        answer = live.ask(temperature=1.0, **fields).json()
        return [choice["message"]["content"] for choice in sorted(answer["choices"], key=lambda c: c["index"])]

    three = texts(n=3, seed=7)
    assert len(set(three)) == 3
    assert three == [*texts(seed=7), *texts(seed=8), *texts(seed=9)]


def test_n_streamed_answers_arrive_complete(live):
    whole = live.ask(n=3, seed=7, temperature=1.0).json()
    chunks = live.openai.chat.completions.create(
        model="tiny", messages=QUESTION, n=3, seed=7, temperature=1.0, stream=True
    )
    texts, ends = ["", "", ""], []
    for chunk in chunks:
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        ends += [choice.index] if choice.finish_reason else []
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert sorted(ends) == [0, 1, 2]


def test_n_answers_send_an_image_once(live, monkeypatch):
    sent = []
    send = live.client.outbox.send
    monkeypatch.setattr(live.client.outbox, "send", lambda message: sent.append(message) or send(message))
    usage = live.ask(messages=about(data_url("red"), data_url("blue")), n=5, max_tokens=2).json()["usage"]
    [add] = [message for message in sent if isinstance(message, Add)]
    assert len(add.requests) == 5
    assert len(encode(add)) == 1 + 2
    assert usage["prompt_tokens_details"] == {
        "cached_tokens": 0,
        "images": 2,
        "images_encoded": 10,
        "image_tokens": 8,
    }


def test_salts_reach_the_engine_and_separate_images(live, monkeypatch):
    sent = []
    send = live.client.outbox.send
    monkeypatch.setattr(live.client.outbox, "send", lambda message: sent.append(message) or send(message))
    for salt in (None, "a", "b", "a"):
        live.openai.chat.completions.create(
            model="tiny", messages=about(data_url("red")), n=2, max_tokens=2, extra_body={"cache_salt": salt}
        )
    requests = [request for message in sent if isinstance(message, Add) for request in message.requests]
    assert [request.cache_salt for request in requests] == ["", "", "a", "a", "b", "b", "a", "a"]
    keys = [request.prompt.images[0].image.key for request in requests]
    assert keys[2] == keys[6]
    assert len(set(keys)) == 3


def test_predicted_text_changes_no_answer(live):
    body = {"messages": about(data_url("red")), "max_tokens": 12, "ignore_eos": True}
    text = live.ask(**body).json()["choices"][0]["message"]["content"]
    for content in (text, [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]):
        answer = live.ask(**body, prediction={"type": "content", "content": content}).json()
        assert answer["choices"][0]["message"]["content"] == text
        details = answer["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] <= answer["usage"]["completion_tokens"]
    assert live.ask(**body, prediction={"type": "content"}).status_code == 400


def test_stop_string_ends_and_leaves_the_answer(live):
    whole = live.ask().json()["choices"][0]["message"]["content"]
    stop = whole[5:9]
    expected = whole[: whole.index(stop)]
    for fields in ({"stop": stop}, {"stop": ["never said", stop]}):
        [choice] = live.ask(**fields).json()["choices"]
        assert choice["message"]["content"] == expected
        assert choice["finish_reason"] == "stop"
    stream = live.openai.chat.completions.create(model="tiny", messages=QUESTION, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected


def test_newer_max_tokens_spelling_wins(live):
    for fields in ({"max_tokens": 4}, {"max_completion_tokens": 4}, {"max_tokens": 9, "max_completion_tokens": 4}):
        answer = live.ask(**fields).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 4


def test_ignore_eos_and_min_tokens_delay_the_end(live):
    assert live.ask(ignore_eos=True, max_tokens=300).json()["usage"]["completion_tokens"] == 300
    assert live.ask(min_tokens=200, max_tokens=400).json()["usage"]["completion_tokens"] > 200


def test_null_fields_are_absent_and_harmless_ones_accepted(live):
    plain = live.ask().json()["choices"]
    null = dict.fromkeys(
        ("temperature", "stop", "n", "stream", "max_tokens", "tools", "logprobs", "logit_bias", "seed")
    )
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": False, "logprobs": False, "presence_penalty": 0}
    harmless |= {"response_format": {"type": "text"}, "tool_choice": "none", "parallel_tool_calls": True}
    assert live.ask(**null).json()["choices"] == plain
    assert live.ask(**harmless).json()["choices"] == plain


def test_default_sampling_follows_the_checkpoints_greedy(live):
    assert live.ask(seed=1).json()["choices"] == live.ask(seed=2).json()["choices"]
    assert live.ask(seed=1, temperature=1).json()["choices"] != live.ask(seed=2, temperature=1).json()["choices"]


def test_model_may_be_omitted_or_named_as_started(live, folder):
    assert live.post({"messages": QUESTION}).json()["model"] == "tiny"
    assert live.ask(model=str(folder)).json()["model"] == "tiny"


def test_slow_reader_blocks_nobody_and_gets_everything(live):
    before = live.client.stats.generation_tokens
    body = {"messages": QUESTION, "n": 16, "ignore_eos": True, "max_tokens": 450}
    with stream_lines(live.url, {**body, "stream_options": {"include_usage": True}}) as lines:
        wait_until(lambda: live.client.stats.generation_tokens == before + 16 * 450)
        assert live.ask().status_code == 200
        assert any(f'"completion_tokens":{16 * 450}' in line for line in lines)
