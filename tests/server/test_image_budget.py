"""Budgets of images in every way to show one, and what responses say of their sizes."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import openai
import pytest

from tests.checkpoints import make_qwen_vl
from tests.server.live import LiveServer
from tests.server.test_batches import content, finished, line, start
from tests.server.test_chat import data_url
from vlmserve import LLM, SamplingParams, original_box, original_point
from vlmserve.errors import InvalidRequestError

URL = data_url("red", (90, 40))
DATA = base64.b64decode(URL.partition(",")[2])
WHOLE = {"width": 90, "height": 40, "box": [0, 0, 90, 40]}
OWN = {**WHOLE, "model_width": 72, "model_height": 32, "tokens": 36}
SMALL = {**WHOLE, "model_width": 32, "model_height": 16, "tokens": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_qwen_vl(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def server(folder):
    with LiveServer(folder, server={"storage_url": "memory"}) as server:
        yield server


def sizes(found: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in one.items() if name != "frames"} for one in found]


def messages(*budgets: dict[str, Any]) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": URL}, **budget} for budget in budgets]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]


def length(server: LiveServer, messages: list[dict[str, Any]]) -> int:
    """Of a prompt."""
    return server.post({"messages": messages, "max_tokens": 1}).json()["usage"]["prompt_tokens"]


def test_chat_completions_say_what_the_model_saw(server):
    body = {"messages": messages({}, {"max_tokens": 10}, {"max_pixels": 600}), "max_tokens": 1}
    whole = server.post(body).json()
    assert sizes(whole["image_sizes"]) == [OWN, SMALL, SMALL]
    assert whole["usage"]["prompt_tokens_details"]["image_tokens"] == 36 + 8 + 8
    request = {"messages": messages({}, {}, {"max_tokens": 40}), "mm_processor_kwargs": {"max_tokens": 10}}
    assert sizes(server.post({**request, "max_tokens": 1}).json()["image_sizes"]) == [SMALL, SMALL, OWN]
    assert length(server, messages({})) - length(server, messages({"max_tokens": 10})) == 36 - 8
    text = [{"role": "user", "content": "Hello"}]
    assert "image_sizes" not in server.post({"messages": text, "max_tokens": 1}).json()


def test_a_stream_says_it_at_the_end(server):
    stream = server.openai.chat.completions.create(
        model="tiny",
        messages=messages({"max_tokens": 10}),
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"mm_processor_kwargs": {"max_pixels": 2000}},
    )
    *chunks, last = list(stream)
    assert all("image_sizes" not in (chunk.model_extra or {}) for chunk in chunks)
    assert sizes(last.image_sizes) == [SMALL]
    assert last.usage.prompt_tokens_details.image_tokens == 8


def test_responses_keep_what_an_image_says_of_itself(server):
    file = server.openai.files.create(file=("a.png", DATA), purpose="vision")
    image = {"type": "input_image", "file_id": file.id, "max_tokens": 10}
    asked = [{"role": "user", "content": [image, {"type": "input_text", "text": "What?"}]}]
    first = server.openai.responses.create(model="tiny", input=asked, max_output_tokens=2)
    assert sizes(first.image_sizes) == [SMALL]
    assert first.usage.input_tokens_details.image_tokens == 8
    more = [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]
    later = server.openai.responses.create(
        model="tiny",
        input=more,
        previous_response_id=first.id,
        max_output_tokens=2,
        extra_body={"mm_processor_kwargs": {"max_tokens": 40}},
    )
    assert sizes(later.image_sizes) == [SMALL, OWN]
    *_, last = server.openai.responses.create(model="tiny", input=more, max_output_tokens=2, stream=True)
    assert sizes(last.response.image_sizes) == [OWN]


def test_messages_take_budgets_and_count_them(server):
    client = server.anthropic
    source = {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}

    def asked(**budget: int) -> list[Any]:
        image = {"type": "image", "source": source, **budget}
        return [{"role": "user", "content": [image, {"type": "text", "text": "What?"}]}]

    def counted(messages: list[Any], **fields: Any) -> int:
        return client.messages.count_tokens(model="tiny", messages=messages, **fields).input_tokens

    answer = client.messages.create(model="tiny", max_tokens=2, messages=asked(max_tokens=10))
    assert sizes(answer.image_sizes) == [SMALL]
    assert answer.usage.image_tokens == 8
    body = {"mm_processor_kwargs": {"max_tokens": 10}}
    own = counted(asked())
    assert counted(asked(max_tokens=10)) == counted(asked(), extra_body=body) == own - 28
    with client.messages.stream(model="tiny", max_tokens=2, messages=asked(), extra_body=body) as stream:
        assert sizes(stream.get_final_message().image_sizes) == [SMALL]
    tokenized = httpx.post(f"{server.url}/tokenize", json={"messages": messages({}), **body}).json()
    assert tokenized["count"] == length(server, messages({"max_tokens": 10}))


def test_batches_keep_budgets(server):
    lines = [
        line("part", messages=messages({"max_tokens": 10})),
        line("request", messages=messages({}), mm_processor_kwargs={"max_tokens": 10}),
        line("none", messages=messages({})),
    ]
    batch = finished(server.openai, start(server.openai, lines).id)
    answers = content(server.openai, batch.output_file_id)
    found = {one["custom_id"]: sizes(one["response"]["body"]["image_sizes"]) for one in answers}
    assert found == {"part": [SMALL], "request": [SMALL], "none": [OWN]}


IMAGE = "messages[0].content[0].image_url.url"


@pytest.mark.parametrize(
    ("budget", "param", "message"),
    [
        ({"max_tokens": 0}, "messages[0].content[0].max_tokens", "must be at least 1"),
        ({"max_pixels": 9999}, IMAGE, "this server's max_pixels, 2,304"),
        ({"min_pixels": 900, "max_tokens": 10}, IMAGE, "min_pixels is 900"),
    ],
)
def test_budgets_that_mean_nothing_are_refused_by_name(server, budget, param, message):
    refused = server.post({"messages": messages(budget), "max_tokens": 1})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("kwargs", "field", "message"),
    [
        ({"max_pixels": "x"}, "max_pixels", "must be a whole number"),
        ({"size": {"height": 5}}, "size", "not supported here"),
        ({"fps": 0}, "fps", "greater than 0"),
    ],
)
def test_meaningless_processor_kwargs_are_rejected_by_name(server, kwargs, field, message):
    refused = server.post({"messages": messages({}), "mm_processor_kwargs": kwargs, "max_tokens": 1})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, f"mm_processor_kwargs.{field}")
    assert message in error["message"]


def test_offline_calls_take_the_same_budgets(folder):
    llm = LLM(str(folder), engine="mock")
    local = [{"role": "user", "content": [{"type": "image", "image": DATA}, {"type": "text", "text": "What?"}]}]
    params = SamplingParams(max_tokens=1)
    [own] = llm.chat(local, params, use_tqdm=False)
    [small] = llm.chat(local, params, use_tqdm=False, mm_processor_kwargs={"max_tokens": 10})
    assert [(one.image_sizes[0].model_width, one.image_sizes[0].tokens) for one in (own, small)] == [(72, 36), (32, 8)]
    assert len(own.prompt_token_ids) - len(small.prompt_token_ids) == 28
    text = "<|vision_start|><|image_pad|><|vision_end|>"
    prompt = {"prompt": text, "multi_modal_data": {"image": DATA}, "mm_processor_kwargs": {"max_pixels": 600}}
    [plain] = llm.generate(prompt, params, use_tqdm=False)
    assert plain.image_sizes == small.image_sizes
    for wrong in ({"pixels": 9}, {"max_tokens": 0}, [9]):
        with pytest.raises(InvalidRequestError, match="mm_processor_kwargs"):
            llm.chat(local, params, use_tqdm=False, mm_processor_kwargs=wrong)


def test_answer_boxes_and_points_map_to_the_image(server):
    [size] = server.post({"messages": messages({"max_tokens": 10}), "max_tokens": 1}).json()["image_sizes"]
    assert original_box((8, 4, 24, 16), size) == (22.5, 10, 67.5, 40)
    assert original_box((250, 250, 750, 1000), size, 1000) == (22.5, 10, 67.5, 40)
    assert original_point((0.5, 0.25), size, 1) == (45, 10)
    assert original_point((16, 250), size, (32, 1000)) == (45, 10)
    cropped = {**size, "box": [25, 0, 65, 40], "model_width": 16, "model_height": 16}
    assert original_box((0, 0, 16, 8), cropped) == (25, 0, 65, 20)
    padded = {**size, "box": [0, -25, 90, 65], "model_width": 9, "model_height": 9}
    assert original_box((1, 0, 9, 5), padded) == (10, 0, 90, 25), "padding is not a part of the image"
    with pytest.raises(ValueError, match="which part"):
        original_point((1, 1), {**size, "box": None})


def test_the_openai_client_reads_the_sizes(server):
    assert isinstance(server.openai, openai.OpenAI)
    answer = server.openai.chat.completions.create(model="tiny", messages=messages({}), max_tokens=1)
    assert original_point((36, 16), answer.image_sizes[0]) == (45, 20)
