"""Unknown fields: ignored and logged once, unless they are misspelt or would change the answer."""

from __future__ import annotations

import importlib
import logging

import pytest

from vlmserve.errors import InvalidRequestError
from vlmserve.server.schema import base
from vlmserve.server.schema.base import RequestModel, validate
from vlmserve.server.schema.chat import ChatRequest
from vlmserve.server.schema.completions import CompletionRequest
from vlmserve.server.schema.messages import CountRequest, MessagesRequest
from vlmserve.server.schema.responses import ResponsesRequest

HINTS = {
    "betas": ["x"],
    "client_metadata": {"a": "b"},
    "context_management": None,
    "inference_geo": "us",
    "made_up": {"deeply": ["nested"]},
    "speed": "fast",
    "verbosity": "low",
}
CALL = {
    "id": "1",
    "type": "function",
    "extra_content": {"google": {"thought_signature": "x"}},
    "provider_specific_fields": {"a": 1},
    "function": {"name": "look", "arguments": "{}", "provider_specific_fields": {"a": 1}},
}
CHAT = {
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "mood": 1}],
        },
        {"role": "assistant", "content": None, "tool_calls": [CALL], "audio_tokens": 0, "mood": "good"},
        {"role": "tool", "tool_call_id": "1", "content": "x", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [
        {
            "type": "function",
            "cache_control": {"type": "ephemeral"},
            "function": {"name": "look", "defer_loading": True, "cache_control": None},
        }
    ],
    "stream_options": {"chunk_size": 5},
}
MESSAGES = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "mood": 1}], "id": "x"}],
    "system": [{"type": "text", "text": "x", "scope": "global"}],
    "tools": [{"name": "look", "input_schema": {"type": "object"}, "caller": "x", "hidden": False}],
}
RESPONSES = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi", "mood": 1}], "internal": {}},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}", "namespace": "x", "caller": {}},
    ],
    "tools": [{"type": "function", "name": "look", "defer_loading": True, "output_schema": {}}],
    "reasoning": {"context": "auto"},
    "text": {"verbosity": "low"},
}


@pytest.fixture(autouse=True)
def nothing_is_logged_yet(monkeypatch):
    monkeypatch.setattr(base, "logged_fields", set())


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, CHAT),
        (CompletionRequest, {"prompt": "hi"}),
        (MessagesRequest, MESSAGES),
        (CountRequest, MESSAGES),
        (ResponsesRequest, RESPONSES),
    ],
)
def test_unknown_fields_are_ignored_everywhere(kind, body):
    assert validate(kind, {**body, **HINTS}) == validate(kind, body)


def test_unknown_field_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, "vlmserve"):
        for _ in range(3):
            validate(ChatRequest, {"messages": [{"role": "user", "content": "hi", "mood": "good"}], "colour": 1})
    lines = [record.getMessage() for record in caplog.records if record.name == base.__name__]
    assert len(lines) == 2
    assert any("'ChatRequest.colour'" in line for line in lines)
    assert any("'Message.mood'" in line for line in lines)


def test_logged_names_are_bounded(caplog):
    with caplog.at_level(logging.INFO, "vlmserve"):
        for start in range(0, 4000, 500):
            fields = {f"{number}{'x' * 1000}": 1 for number in range(start, start + 500)}
            validate(ChatRequest, {"messages": [{"role": "user", "content": "hi"}], **fields})
    lines = [record.getMessage() for record in caplog.records if record.name == base.__name__]
    assert len(base.logged_fields) == len(lines) == base.MAX_LOGGED
    assert max(map(len, lines)) < 250


def test_null_is_accepted_for_any_field():
    fields = dict.fromkeys([*ChatRequest.neutral_values, "temprature", "made_up"])
    assert validate(ChatRequest, {"messages": [{"role": "user", "content": "hi"}], **fields})


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("temprature", "temperature"),
        ("temperatur", "temperature"),
        ("tempreature", "temperature"),
        ("Temperature", "temperature"),
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("top-p", "top_p"),
        ("top_pp", "top_p"),
        ("stops", "stop"),
        ("tempature", "temperature"),
        ("tepmerature", "temperature"),
        ("presence_penality", "presence_penalty"),
        ("frequencyPenality", "frequency_penalty"),
        ("n_predict", "max_tokens"),
        ("max_new_token", "max_tokens"),
        ("stop_sequence", "stop"),
        ("stop_sequences", "stop"),
        ("random_seed", "seed"),
    ],
)
def test_misspelt_field_names_the_right_one(wrong, meant):
    with pytest.raises(InvalidRequestError, match=rf"^{wrong} does not exist; did you mean {meant}\?") as caught:
        validate(ChatRequest, {"messages": [{"role": "user", "content": "hi"}], wrong: 1})
    assert caught.value.param == wrong


def test_misspelt_field_beside_the_right_one_is_rejected():
    with pytest.raises(InvalidRequestError, match="did you mean temperature"):
        validate(ChatRequest, {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "temprature": 1})


def test_stop_sequence_is_misspelt_in_messages():
    with pytest.raises(InvalidRequestError, match=r"^stop_sequence does not exist; did you mean stop_sequences"):
        validate(MessagesRequest, {**MESSAGES, "stop_sequence": ["x"]})


OF_OTHER_SERVERS = """
add_bos_token agent_id auto_max_new_tokens banned_strings banned_tokens bootstrap_host cache_prompt chat_id
citation_options context_length_exceeded_behavior conversation_id custom_params data_parallel_rank debug deferred
details disable_search do_sample dry_base dry_penalty_last_n dynatemp_exponent ebnf enable_search enable_thinking
extra_body fallbacks features files format generation_prompt grammar_lazy grammar_triggers id_slot image_data images
incremental_output input_ids instruction_template keep_alive litellm_metadata lora lora_path max_context_length
max_image_size message_id min_k min_keep min_new_tokens mirostat_lr mirostat_tau mode n_ctx n_indent n_keep n_probs
num_ctx num_gpu options params parse_tool_calls penalize_nl plugins post_sampling_probs prefix preserved_tokens preset
priority prompt_mode prompt_truncate_len provider raw raw_output reasoning reasoning_format regex rep_pen request_id
response_fields return_full_text return_hidden_states return_images return_progress return_related_questions rid route
run_id safe_prompt samplers search_mode search_parameters separate_reasoning session_id session_params stop_regex
stream_mode stream_reasoning suffix system tags task temperature_last template think thinking thinking_budget thread_id
timings_per_token top_n_tokens trace transforms translation_options truncate usage user_id vllm_xargs watermark
workspace_id xtc_threshold
""".split()


def misspelt(kind, body):
    """Whether a body is rejected for a misspelt field."""
    try:
        validate(kind, body)
    except InvalidRequestError as error:
        return "did you mean" in str(error)
    return False


@pytest.mark.parametrize(
    ("kind", "body", "sdk"),
    [
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": "hi"}]},
            "openai.types.chat.completion_create_params:CompletionCreateParamsBase",
        ),
        (CompletionRequest, {"prompt": "hi"}, "openai.types.completion_create_params:CompletionCreateParamsBase"),
        (MessagesRequest, MESSAGES, "anthropic.types.beta.message_create_params:MessageCreateParamsBase"),
        (ResponsesRequest, RESPONSES, "openai.types.responses.response_create_params:ResponseCreateParamsBase"),
    ],
)
def test_fields_of_clients_are_not_misspelt(kind, body, sdk):
    module, _, name = sdk.partition(":")
    fields = getattr(importlib.import_module(module), name).__annotations__
    for name in {*OF_OTHER_SERVERS, *fields} - body.keys():
        assert not misspelt(kind, {**body, name: {"x": 1}}), name


def test_context_of_azure_answers_is_ignored():
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi"}]
    plain = validate(ChatRequest, {"messages": turns})
    assert validate(ChatRequest, {"messages": [turns[0], {**turns[1], "context": {"citations": []}}]}) == plain


def test_many_unknown_fields_are_not_all_compared(monkeypatch):
    compared = []
    monkeypatch.setattr(base.Spellings, "meant", lambda self, name: compared.append(name))
    validate(ChatRequest, {"messages": [{"role": "user", "content": "hi"}], **{f"made_up_{n}": 1 for n in range(900)}})
    assert len(compared) == base.MAX_MISSPELT


def test_misspelt_nested_field_is_named_with_its_place():
    with pytest.raises(
        InvalidRequestError, match=r"^messages\[0\]\.tool_calls_id does not exist; did you mean tool_call_id\?"
    ):
        validate(ChatRequest, {"messages": [{"role": "user", "content": "hi", "tool_calls_id": "x"}]})


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (ChatRequest, "audio", {"voice": "alloy"}),
        (ChatRequest, "modalities", ["text", "audio"]),
        (ChatRequest, "web_search_options", {"search_context_size": "low"}),
        (ChatRequest, "mirostat", 2),
        (ChatRequest, "documents", [{"text": "x"}]),
        (CompletionRequest, "suffix", "x"),
        (CompletionRequest, "tools", [{"type": "function"}]),
        (MessagesRequest, "mcp_servers", [{"name": "x"}]),
        (MessagesRequest, "container", "x"),
        (MessagesRequest, "logprobs", True),
        (ResponsesRequest, "background", True),
        (ResponsesRequest, "prompt", {"id": "x"}),
    ],
)
def test_unsupported_field_that_matters_is_rejected(kind, field, value):
    body = {
        ChatRequest: CHAT,
        CompletionRequest: {"prompt": "x"},
        MessagesRequest: MESSAGES,
        ResponsesRequest: RESPONSES,
    }
    with pytest.raises(InvalidRequestError, match=f"^{field} is not supported here") as caught:
        validate(kind, {**body[kind], field: value})
    assert caught.value.param == field
    assert isinstance(validate(kind, {**body[kind], field: []}), RequestModel)
