"""``/v1/models``, ``/ping`` and ``/tokenizer_info``."""

from __future__ import annotations

import datetime

import httpx
import pytest

from tests.server.live import LiveServer


@pytest.fixture
def card(live):
    return httpx.get(f"{live.url}/v1/models/tiny").json()


def test_cards_have_the_context_under_all_names(live, card):
    length = live.client.info.max_model_len
    assert card["max_model_len"] == card["context_length"] == card["top_provider"]["context_length"] == length
    assert card["max_tokens"] == card["top_provider"]["max_completion_tokens"] == length
    assert card["max_input_tokens"] == live.client.info.max_prompt_len


def test_cards_name_kinds_of_input_and_abilities(card):
    assert card["architecture"]["input_modalities"] == ["text", "image", "file", "video"]
    assert card["architecture"]["output_modalities"] == ["text"]
    assert card["architecture"]["modality"] == "text+image+file+video->text"
    assert card["capabilities"] == ["completion", "vision", "tools"]
    assert {"tools", "temperature", "max_tokens", "response_format"} <= set(card["supported_parameters"])
    assert "reasoning_effort" not in card["supported_parameters"]


def test_supported_parameters_are_accepted(live, card):
    values = {
        "stop": ["x"],
        "logit_bias": {},
        "response_format": {"type": "text"},
        "structured_outputs": {"choice": ["a"]},
    }
    values |= {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto", "logprobs": True}
    values |= {"parallel_tool_calls": True, "top_logprobs": None}
    for name in card["supported_parameters"]:
        own = {"tools": values["tools"]} if name in ("tool_choice", "parallel_tool_calls") else {}
        response = live.ask(**{"max_tokens": 1, **own, name: values.get(name, 1)})
        assert response.status_code == 200, (name, response.text)


def test_the_list_has_the_same_cards(live, card):
    page = httpx.get(f"{live.url}/v1/models").json()
    assert page["data"] == [card]
    assert (page["object"], page["first_id"], page["last_id"], page["has_more"]) == ("list", "tiny", "tiny", False)


def test_openai_clients_read_cards(live):
    [model] = live.openai.models.list().data
    assert model.id == live.openai.models.retrieve("tiny").id == "tiny"
    assert model.max_model_len > 0


def test_anthropic_clients_read_cards(live):
    [listed] = list(live.anthropic.models.list())
    shown = live.anthropic.models.retrieve("tiny")
    assert listed == shown
    assert (shown.type, shown.display_name, shown.lifecycle) == ("model", "tiny", "active")
    assert shown.created_at.tzinfo is not None
    assert shown.created_at <= datetime.datetime.now(datetime.UTC)
    assert shown.capabilities.image_input.supported
    assert shown.capabilities.pdf_input.supported
    assert not shown.capabilities.thinking.types.adaptive.supported
    assert not shown.capabilities.effort.high.supported


def test_cards_respect_the_limit_of_answers(folder):
    with LiveServer(folder, server={"max_output_tokens": 20}) as server:
        card = httpx.get(f"{server.url}/v1/models/tiny").json()
        assert card["max_tokens"] == card["top_provider"]["max_completion_tokens"] == 20


def test_ping_is_health(live):
    assert httpx.get(f"{live.url}/ping").json() == httpx.get(f"{live.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{live.url}/ping", headers={"host": "balancer.example"}).status_code == 200


def test_tokenizer_info_has_the_template(live):
    info = httpx.get(f"{live.url}/tokenizer_info").json()
    assert info["chat_template"]
    assert info["tokenizer_class"]
