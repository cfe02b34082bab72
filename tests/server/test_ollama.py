"""Ollama's API with Ollama's Python client."""

from __future__ import annotations

import base64
import json

import httpx
import msgspec
import ollama
import pytest

from tests.media.images_for_tests import encoded, noise
from tests.mock_checkpoint import make_mock_checkpoint
from tests.server.live import LiveServer
from vlmserve.server.schema.ollama import OllamaChatRequest

HI = [{"role": "user", "content": "Hi"}]
LONG = {"num_predict": 12, "temperature": 0, "num_ctx": 4096}
IMAGE = encoded(noise(60, 40))


@pytest.fixture(scope="module")
def live(folder):
    with LiveServer(folder) as running:
        yield running


@pytest.fixture
def client(live):
    return ollama.Client(live.url)


def openais(live, content, **fields):
    """The answer of OpenAI's API."""
    messages = [{"role": "user", "content": content}]
    return live.openai.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, temperature=0, **fields
    ).choices[0]


def image_part():
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(IMAGE).decode()}"}}


def text_part(text):
    return {"type": "text", "text": text}


def test_answers_equal_those_of_openais_api(live, client):
    answer = client.chat("tiny", HI, options=LONG)
    assert answer.message.content == openais(live, "Hi").message.content
    assert (answer.done, answer.done_reason, answer.eval_count) == (True, "length", 12)
    assert answer.total_duration > answer.eval_duration > 0 < answer.prompt_eval_count


def test_streams_equal_whole_answers(client):
    lines = list(client.chat("tiny", HI, options=LONG, stream=True))
    assert len(lines) >= 2
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    text = "".join(line.message.content for line in lines)
    assert text == client.chat("tiny:latest", HI, options=LONG).message.content
    generated = client.generate("tiny", "Hi", options=LONG, stream=True)
    assert "".join(line.response for line in generated) == text


def test_images_are_seen(live, client):
    message = {"role": "user", "content": "What is it?", "images": [IMAGE]}
    expected = openais(live, [image_part(), {"type": "text", "text": "What is it?"}]).message.content
    assert client.chat("tiny", [message], options=LONG).message.content == expected
    assert client.generate("tiny", "What is it?", images=[IMAGE], options=LONG).response == expected


def test_vectors_equal_those_of_openais_api(live, client):
    texts = ["a", "b c"]
    expected = live.openai.embeddings.create(model="tiny", input=texts, dimensions=6).data
    found = client.embed("tiny:latest", texts, dimensions=6, options=LONG, keep_alive="5m")
    assert [list(one) for one in found.embeddings] == [one.embedding for one in expected]
    assert found.prompt_eval_count > 0 < found.total_duration
    assert len(client.embed("tiny", "a").embeddings) == 1
    assert client.embeddings("tiny", "a").embedding == client.embed("tiny", "a").embeddings[0]


def test_long_inputs_are_truncated_by_default(client):
    long = "one two three " * 9000
    assert len(client.embed("tiny", long).embeddings[0]) == 64
    with pytest.raises(ollama.ResponseError, match="maximum context length"):
        client.embed("tiny", long, truncate=False)


def test_format_is_followed(client):
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"]}
    assert json.loads(client.chat("tiny", HI, format=schema).message.content) == {"a": 7}
    assert client.generate("tiny", "Hi", format={"enum": ["x"]}).response.strip() == '"x"'


@pytest.fixture(scope="module")
def with_calls(tmp_path_factory):
    """A server whose tokenizer has tokens around calls, and whose context holds the descriptions of tools."""
    folder = tmp_path_factory.mktemp("mock")
    with LiveServer(make_mock_checkpoint(folder, context=2048, special=("<tool_call>", "</tool_call>"))) as running:
        yield running


@pytest.fixture
def calling(with_calls, monkeypatch):
    """The same, and each answer calls a tool."""
    as_chat = OllamaChatRequest.as_chat
    required = {"tool_choice": "required"}
    monkeypatch.setattr(OllamaChatRequest, "as_chat", lambda body: as_chat(body).model_copy(update=required))
    return with_calls


def call_of(server, value, most, *, stream):
    """The last line and the calls of an answer. value: of the call's only argument."""
    schema = {"type": "object", "properties": {"a": {"enum": [value]}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    body = {"model": "tiny", "messages": HI, "tools": [tool], "stream": stream, "options": {"num_predict": most}}
    response = httpx.post(f"{server.url}/api/chat", json=body, timeout=60)
    lines = [json.loads(line) for line in response.text.splitlines()]
    return lines[-1], [call for line in lines for call in line["message"].get("tool_calls", [])]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_have_objects(calling, stream):
    _, calls = call_of(calling, 7, 300, stream=stream)
    assert calls[0] == {"function": {"name": "look", "arguments": {"a": 7}}}


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_are_cut_are_left_out(calling, stream):
    last, calls = call_of(calling, "long" * 100, 80, stream=stream)
    assert (last["done_reason"], calls) == ("length", [])


def test_num_predict_of_zero_is_no_limit(client):
    [answer, unlimited] = [client.chat("tiny", HI, options={**LONG, "num_predict": most}) for most in (0, -1)]
    assert answer.message.content == unlimited.message.content


def test_results_of_tools_are_read(live, client, monkeypatch):
    prompts = []
    prepare = live.service.preparation.prepare

    async def spy(messages, **settings):
        prompts.append(messages)
        return await prepare(messages, **settings)

    monkeypatch.setattr(live.service.preparation, "prepare", spy)
    call = {"function": {"name": "look", "arguments": {"a": 1}}}
    result = {"role": "tool", "tool_name": "look", "content": "a cat"}
    client.chat("tiny", [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}, result], options=LONG)
    [messages] = prompts
    [called] = messages[1]["tool_calls"]
    assert (called["function"]["name"], messages[2]["content"]) == ("look", "a cat")
    assert messages[2]["tool_call_id"] == called["id"]


def test_model_is_listed_and_shown(client):
    [listed] = client.list().models
    assert (listed.model, len(listed.digest)) == ("tiny:latest", 64)
    assert [model.model for model in client.ps().models] == ["tiny:latest"]
    shown = client.show("tiny")
    assert "vision" in shown.capabilities
    assert shown.modelinfo["vlmserve.context_length"] > 0


@pytest.mark.parametrize(
    ("parameters", "written"),
    [(4_270_000_000, "4.3B"), (135_000_000, "135M"), (6_290_000, "6.29M"), (50_000, "50K"), (0, "")],
    ids=["large", "whole", "small", "tiny", "unknown"],
)
def test_sizes_are_those_of_the_weights(live, client, monkeypatch, parameters, written):
    info = msgspec.structs.replace(live.service.info, num_parameters=parameters, weight_bytes=2 * parameters)
    monkeypatch.setattr(type(live.service), "info", info)
    [listed] = client.list().models
    assert (listed.size, listed.details.parameter_size) == (2 * parameters, written)


def test_open_webui_connects_lists_and_chats(live):
    """Open WebUI asks for these paths. It adds a tag to a name without one, and looks for it among the listed names."""
    with httpx.Client(base_url=live.url, timeout=60) as webui:
        assert webui.get("/api/version").json()["version"].count(".") == 2
        [listed] = webui.get("/api/tags").json()["models"]
        [loaded] = webui.get("/api/ps").json()["models"]
        assert {"name", "model", "digest", "details", "size", "modified_at"} <= listed.keys() & loaded.keys()
        assert ("tiny:latest", listed["name"]) == (listed["model"], loaded["name"])
        model = {"model": listed["model"]}
        assert "vision" in webui.post("/api/show", json=model).json()["capabilities"]
        message = {**HI[0], "images": [base64.b64encode(IMAGE).decode()]}
        body = {**model, "messages": [message], "options": LONG, "stream": True, "keep_alive": "5m"}
        lines = [json.loads(line) for line in webui.post("/api/chat", json=body).text.splitlines()]
        text = "".join(line["message"]["content"] for line in lines)
        assert (text, lines[-1]["done"]) == (openais(live, [image_part(), text_part("Hi")]).message.content, True)
        same = {**model, "messages": HI, "max_tokens": 12, "temperature": 0}
        answer = webui.post("/v1/chat/completions", json=same).json()
        assert answer["choices"][0]["message"]["content"] == openais(live, "Hi").message.content
        unload = {**model, "prompt": "", "keep_alive": 0}
        assert webui.post("/api/generate", json=unload).json()["done_reason"] == "load"


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"model": "other"}, 404, "other"),
        ({"options": {"temperature": -1}}, 400, "temperature"),
        ({"messages": [{"role": "user", "content": "Hi", "images": ["!"]}]}, 400, "image"),
        ({"messages": 3}, 400, "messages"),
    ],
)
def test_errors_have_ollamas_form(live, fields, status, message):
    body = {"model": "tiny", "messages": HI, "stream": False, **fields}
    response = httpx.post(f"{live.url}/api/chat", json=body, timeout=60)
    assert (response.status_code, list(response.json())) == (status, ["error"])
    assert message in response.json()["error"]


def test_empty_request_reports_a_loaded_model(client):
    assert client.generate("tiny").done_reason == "load"
    assert client.chat("tiny").done_reason == "load"


def test_raw_prompt_names_the_other_path(client):
    with pytest.raises(ollama.ResponseError, match="/v1/completions"):
        client.generate("tiny", "Hi", raw=True)
