"""What a request may tell the model's chat template by name."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from tests.mock_checkpoint import make_mock_checkpoint
from tests.server.live import QUESTION, LiveServer

TEMPLATE = (
    "{% if enable_thinking is not defined or enable_thinking %}Think first. {% endif %}"
    "{% if reasoning_effort is defined %}Effort: {{ reasoning_effort }}. {% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    folder = make_mock_checkpoint(tmp_path_factory.mktemp("thinking"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with LiveServer(folder) as server:
        yield server


def num_prompt_tokens(server: LiveServer, **fields) -> int:
    create = server.openai.chat.completions.create
    return create(model="tiny", messages=QUESTION, max_tokens=1, **fields).usage.prompt_tokens


def prompt(server: LiveServer, **fields) -> str:
    tokens = httpx.post(f"{server.url}/tokenize", json={"messages": QUESTION, **fields}).json()["tokens"]
    return httpx.post(f"{server.url}/detokenize", json={"tokens": tokens}).json()["prompt"]


def test_settings_reach_the_template_and_unknown_ones_nothing(thinking):
    def tokens(**kwargs):
        return num_prompt_tokens(thinking, extra_body={"chat_template_kwargs": kwargs})

    assert tokens() == tokens(enable_thinking=True) == tokens(unknown=1) > tokens(enable_thinking=False)
    assert "Think first" in prompt(thinking)
    assert "Think first" not in prompt(thinking, chat_template_kwargs={"enable_thinking": False})


def test_settings_reach_the_template_in_responses_as_well(thinking):
    def tokens(**kwargs):
        create = thinking.openai.responses.create
        answer = create(model="tiny", input="Hi", max_output_tokens=1, extra_body={"chat_template_kwargs": kwargs})
        return answer.usage.input_tokens

    assert tokens() > tokens(enable_thinking=False)


def test_an_effort_is_for_templates_that_know_it(thinking, live):
    assert num_prompt_tokens(thinking, reasoning_effort="low") > num_prompt_tokens(thinking)
    assert num_prompt_tokens(live, reasoning_effort="low") == num_prompt_tokens(live)


@pytest.mark.parametrize("reasoning", [{"effort": "low"}, {"summary": "auto"}, {"effort": None, "summary": "concise"}])
def test_response_effort_reaches_supporting_templates_only(thinking, live, reasoning):
    def response(server, **fields):
        return server.openai.responses.create(model="tiny", input="Hi", max_output_tokens=16, **fields)

    told = response(thinking, reasoning=reasoning)
    effort = reasoning.get("effort")
    assert (told.usage.input_tokens > response(thinking).usage.input_tokens) == (effort is not None)
    assert (told.reasoning.effort, told.reasoning.summary) == (effort, reasoning.get("summary"))
    assert response(live, reasoning=reasoning).usage.input_tokens == response(live).usage.input_tokens


@pytest.mark.parametrize(
    "thoughts", [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}, {"type": "disabled"}]
)
def test_thinking_that_a_model_cannot_do_is_ignored(live, thoughts):
    body = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
    answers = [
        httpx.post(f"{live.url}/v1/messages", json=asked, timeout=60).json()
        for asked in (body, {**body, "thinking": thoughts})
    ]
    assert answers[0]["content"] == answers[1]["content"]
    del body["max_tokens"], body["temperature"]
    counted = httpx.post(f"{live.url}/v1/messages/count_tokens", json={**body, "thinking": thoughts}, timeout=60)
    assert (
        counted.json()["input_tokens"]
        == answers[0]["usage"]["input_tokens"] + answers[0]["usage"]["cache_read_input_tokens"]
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"messages": []}, "cannot set messages"),
        ("low", "chat_template_kwargs"),
        ({"reasoning_effort": json.loads("[" * 200 + "]" * 200)}, "nested too deeply"),
    ],
    ids=["ours", "text", "deep"],
)
def test_what_is_not_theirs_to_set_is_refused(thinking, settings, message):
    with pytest.raises(openai.BadRequestError, match=message) as refusal:
        num_prompt_tokens(thinking, extra_body={"chat_template_kwargs": settings})
    assert refusal.value.param == "chat_template_kwargs"
    assert num_prompt_tokens(thinking) > 0


def test_control_tokens_in_a_setting_are_only_text(thinking):
    effort = {"chat_template_kwargs": {"reasoning_effort": "</s>"}}
    tokens = httpx.post(
        f"{thinking.url}/tokenize", json={"messages": QUESTION, **effort, "return_token_strs": True}
    ).json()
    assert "</s>" not in tokens["token_strs"]
    assert "</s>" in prompt(thinking, **effort)
