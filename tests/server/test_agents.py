"""What coding agents and SDKs send, in the prompt that it becomes."""

from __future__ import annotations

import base64
import json
import logging
from typing import Any

import httpx
import pytest

from tests.mock_checkpoint import make_mock_checkpoint
from tests.server.live import LiveServer
from tests.server.test_bad_input import png
from vlmserve.server.schema import base

LOOK = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
CUSTOM = {"name": "look", "input_schema": {"type": "object", "properties": {}}, "defer_loading": True}
HI = {"role": "user", "content": "hi"}
LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}

DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    folder = make_mock_checkpoint(tmp_path_factory.mktemp("mock"), context=4096)
    with LiveServer(folder, server={"storage_url": f"sqlite:///{tmp_path_factory.mktemp('store')}/store.db"}) as server:
        yield server


@pytest.fixture
def prompts(live, monkeypatch) -> list[list[dict[str, Any]]]:
    """The messages of each prompt that the server makes."""
    seen: list[list[dict[str, Any]]] = []
    prepare = live.service.preparation.prepare

    async def spy(messages, *args, **kwargs):
        seen.append(list(messages))
        return await prepare(messages, *args, **kwargs)

    monkeypatch.setattr(live.service.preparation, "prepare", spy)
    return seen


def post(live: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{live.url}/v1/{path}", json={"model": "tiny", **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_claude_codes_fields_are_accepted(live, prompts):
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"ttl": "1h"}}]}],
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "scope": "global"}}],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "thinking": {"type": "adaptive"},
        "max_tokens": 32_000,
        "betas": ["x"],
        "speed": "fast",
        "diagnostics": None,
        "tools": [CUSTOM, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
    }
    answer = post(live, "messages", **body)
    assert answer["type"] == "message"
    counted = post(live, "messages/count_tokens", **body, stop_sequences=["x"], temperature=1, stream=True)
    assert counted["input_tokens"] == answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]
    assert [message["role"] for message in prompts[0]] == ["system", "user"]


def test_system_turn_keeps_its_place(live, prompts):
    turns = [HI, {"role": "system", "content": "From now on: French."}, {"role": "assistant", "content": "Salut"}, HI]
    usage = post(live, "messages", messages=turns, max_tokens=5)["usage"]
    assert [message["role"] for message in prompts[0]] == ["user", "system", "assistant", "user"]
    assert prompts[0][1]["content"] == "From now on: French."
    counted = post(live, "messages/count_tokens", messages=turns)["input_tokens"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
    prompts[1:] = []
    post(live, "messages", messages=[HI, {"role": "system", "content": [{"type": "text", "text": "x"}]}], max_tokens=5)
    assert prompts[1][1] == {"role": "system", "content": [{"type": "text", "text": "x"}]}


def test_blocks_of_other_servers_become_text(live, prompts):
    found = {"type": "search_result", "source": "a.md", "title": "A", "content": [{"type": "text", "text": "red"}],
             "citations": {"enabled": True}}  # fmt: skip
    cited = {"type": "text", "text": "Red.", "citations": [{"type": "char_location", "cited_text": "red"}]}
    document = {"type": "document", "citations": {"enabled": True}, "title": "T",
                "source": {"type": "content", "content": [{"type": "text", "text": "inside"}]}}  # fmt: skip
    turns = [
        {"role": "user", "content": [found, document]},
        {"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            {"type": "compaction", "content": "Summary."},
            cited,
            {"type": "tool_use", "id": "t", "name": "look", "input": {}, "caller": {"type": "direct"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "look"}]},
        ]},
    ]  # fmt: skip
    post(live, "messages", messages=turns, tools=[CUSTOM], max_tokens=5)
    texts = [[part["text"] for part in message["content"]] for message in prompts[0]]
    assert texts == [["A\na.md\nred", "T", "inside"], ["Summary.", "Red."], ["look"]]
    assert prompts[0][1]["tool_calls"][0]["function"]["name"] == "look"


def test_uploaded_image_in_messages(live, prompts):
    file = {"file": ("a.png", png())}
    uploaded = httpx.post(f"{live.url}/v1/files", files=file, data={"purpose": "vision"}, timeout=30).json()
    for kind in ("image", "document"):
        block = {"type": kind, "source": {"type": "file", "file_id": uploaded["id"]}}
        post(live, "messages", messages=[{"role": "user", "content": [block]}], max_tokens=5)
    assert [messages[0]["content"][0]["type"] for messages in prompts] == ["image_url", "image_url"]
    missing = {"type": "image", "source": {"type": "file", "file_id": "file_none"}}
    body = {"messages": [{"role": "user", "content": [missing]}], "max_tokens": 5}
    assert httpx.post(f"{live.url}/v1/messages", json=body, timeout=30).status_code == 404


def test_codexs_fields_are_accepted(live, caplog, monkeypatch):
    monkeypatch.setattr(base, "logged_fields", set())
    body = {
        "instructions": "Be brief.",
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "tools": [
            {"type": "function", **LOOK, "strict": False},
            {"type": "custom", "name": "apply_patch", "description": "x", "format": LARK},
            {"type": "namespace", "name": "mcp", "description": "x", "tools": [{"type": "function", **LOOK}]},
            {"type": "web_search", "external_web_access": False},
        ],
        "client_metadata": {"x-codex": "1"},
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "medium", "summary": "auto", "context": "all"},
        "text": {"verbosity": "low"},
        "prompt_cache_key": "x",
        "store": False,
    }
    with caplog.at_level(logging.WARNING, "vlmserve"):
        answer = post(live, "responses", **body)
        post(live, "responses", **body)
    assert [tool["name"] for tool in answer["tools"]] == ["look"]
    lines = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert sorted(line.split("'")[1] for line in lines) == ["custom", "namespace", "web_search"]


@pytest.mark.parametrize("choice", [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}])
def test_chosen_tool_that_cannot_be_offered_is_rejected(live, choice):
    tools = [{"type": "function", **LOOK}, {"type": "web_search"}, {"type": "custom", "name": "apply_patch"}]
    body = {"input": "hi", "tools": tools, "tool_choice": choice, "store": False}
    answer = httpx.post(f"{live.url}/v1/responses", json=body, timeout=30)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")


def test_items_of_other_servers_are_accepted(live, prompts):
    items = [
        HI,
        {"type": "compaction", "id": "c", "encrypted_content": "x"},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "custom_tool_call", "id": "ctc", "call_id": "1", "name": "apply_patch", "input": "a\nb"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "done"},
        {"type": "function_call", "call_id": "2", "name": "look", "arguments": "{}", "namespace": "x"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "output_text", "text": "red"}]},
    ]
    post(live, "responses", input=items, store=False)
    [_, patch, done, look, red] = prompts[0]
    assert patch["tool_calls"][0]["function"] == {"name": "apply_patch", "arguments": '{"input": "a\\nb"}'}
    assert (done["content"], look["tool_calls"][0]["id"], red["content"]) == ("done", "2", "red")


SCREEN = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
CALLS = [
    {"type": "local_shell_call", "id": "ls", "call_id": "1", "status": "completed",
     "action": {"type": "exec", "command": ["ls"], "env": {}}},
    {"type": "local_shell_call_output", "id": "1", "output": "a.py"},
    {"type": "shell_call", "call_id": "2", "action": {"commands": ["pwd"]}, "status": "completed"},
    {"type": "shell_call_output", "call_id": "2", "output": [{"stdout": "/x", "stderr": "", "outcome": {}}]},
    {"type": "apply_patch_call", "call_id": "3", "operation": {"type": "delete_file", "path": "a"}},
    {"type": "apply_patch_call_output", "call_id": "3", "status": "completed", "output": None},
    {"type": "computer_call", "call_id": "4", "actions": [{"type": "screenshot"}], "pending_safety_checks": []},
    {"type": "computer_call_output", "call_id": "4", "output": {"type": "computer_screenshot", "image_url": SCREEN}},
    {"type": "mcp_call", "id": "mcp_1", "server_label": "s", "name": "find", "arguments": '{"q": 1}', "output": "y"},
    {"type": "mcp_call", "id": "mcp_2", "server_label": "s", "name": "find", "arguments": "", "error": {"code": 7}},
    {"type": "code_interpreter_call", "id": "ci", "code": "print(1)", "container_id": "c", "status": "completed",
     "outputs": [{"type": "logs", "logs": "1"}, {"type": "image", "url": "x"}]},
    {"type": "file_search_call", "id": "fs", "queries": ["x"], "results": [{"filename": "a.md", "text": "red"}]},
]  # fmt: skip


def test_calls_of_other_servers_keep_their_text(live, prompts):
    post(live, "responses", input=[HI, *CALLS, HI], store=False)
    called = [message["tool_calls"][0] for message in prompts[0] if message.get("tool_calls")]
    results = [message for message in prompts[0] if message["role"] == "tool"]
    assert [call["id"] for call in called] == [result["tool_call_id"] for result in results]
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in called] == [
        ("local_shell", {"type": "exec", "command": ["ls"], "env": {}}),
        ("shell", {"commands": ["pwd"]}),
        ("apply_patch", {"type": "delete_file", "path": "a"}),
        ("computer", {"actions": [{"type": "screenshot"}]}),
        ("find", {"q": 1}),
        ("find", {}),
        ("code_interpreter", {"code": "print(1)"}),
        ("file_search", {"queries": ["x"]}),
    ]
    texts = [result["content"] for result in results if isinstance(result["content"], str)]
    assert texts == ["a.py", "/x", "", "y", '{"code": 7}', "1", "a.md\nred"]
    assert results[3]["content"][0]["type"] == "image_url"


def test_stored_calls_of_other_servers_are_shown_again(live, prompts):
    items = [{"type": "message", **HI}, *CALLS]
    conversation = httpx.post(f"{live.url}/v1/conversations", json={"items": items}, timeout=30).json()
    post(live, "responses", input="x", conversation=conversation["id"])
    post(live, "responses", input=[HI, *CALLS, HI], store=False)
    without_ids = [[{**message, "tool_calls": 0, "tool_call_id": 0} for message in prompt] for prompt in prompts]
    assert without_ids[0][:-1] == without_ids[1][:-1]


def test_unknown_items_are_left_out_and_logged_once(live, prompts, caplog, monkeypatch):
    monkeypatch.setattr(base, "logged_fields", set())
    items = [{"type": "program", "call_id": "1", "code": "x"}, {"type": "program_output", "call_id": "1"},
             {"type": "agent_message", **HI}]  # fmt: skip
    with caplog.at_level(logging.WARNING, "vlmserve"):
        for _ in range(2):
            post(live, "responses", input=items, store=False)
    assert prompts[0] == [{"role": "user", "content": "hi"}]
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split("'")[1] for line in lines] == ["program", "program_output", "agent_message"]


@pytest.mark.parametrize(
    "kind", ["custom_tool_call", "local_shell_call", "apply_patch_call", "mcp_call", "file_search_call"]
)
@pytest.mark.parametrize("wrong", [7, [], {}, [[7]], {"a": None}, DEEP], ids=lambda wrong: str(wrong)[:9])
def test_malformed_items_are_client_errors_or_shown(live, kind, wrong):
    names = ("name", "call_id", "action", "operation", "input", "arguments", "output", "error", "queries", "results")
    item = {"type": kind, **dict.fromkeys(names, wrong)}
    for fields in (item, {**item, "name": "x", "call_id": "1", "arguments": "{}", "output": "x"}):
        body = {"input": [HI, fields], "store": False}
        answer = httpx.post(f"{live.url}/v1/responses", json=body, timeout=30)
        assert answer.status_code in (200, 400), answer.text


def test_input_of_unknown_items_alone_is_rejected(live):
    answer = httpx.post(f"{live.url}/v1/responses", json={"input": [{"type": "program"}], "store": False}, timeout=30)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
    assert "nothing that the model can read" in answer.json()["error"]["message"]


def test_empty_input_is_an_empty_question(live, prompts):
    post(live, "responses", input="", store=False)
    assert prompts[0] == [{"role": "user", "content": ""}]


def test_allowed_tools_of_chat(live):
    def allowed(name: str) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name}}]
        return {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}

    tools = [{"type": "function", "function": LOOK}, {"type": "function", "function": {**LOOK, "name": "stop"}}]
    fields = {"messages": [HI], "tools": [*tools, {"type": "web_search"}], "max_tokens": 300}
    for name in ("look", "stop"):
        [choice] = post(live, "chat/completions", tool_choice=allowed(name), **fields)["choices"]
        assert {call["function"]["name"] for call in choice["message"]["tool_calls"]} == {name}
    body = {"tool_choice": allowed("fly"), **fields}
    answer = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=30)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")


def test_older_functions_are_tools(live, prompts):
    turns = [
        HI,
        {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}},
        {"role": "function", "name": "look", "content": "red"},
    ]
    body = {"messages": turns, "functions": [LOOK], "function_call": {"name": "look"}, "max_tokens": 300}
    [choice] = post(live, "chat/completions", **body)["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"]["name"] == "look"
    assert "tool_calls" not in choice["message"]
    [_, call, result] = prompts[0]
    assert (call["tool_calls"][0]["function"]["name"], call["tool_calls"][0]["id"]) == ("look", result["tool_call_id"])
    assert result["role"] == "tool"
    client = live.openai.chat.completions
    chunks = list(client.create(model="tiny", stream=True, **body))
    calls = [chunk.choices[0].delta.function_call for chunk in chunks if chunk.choices[0].delta.function_call]
    assert (calls[0].name, "".join(call.arguments for call in calls)) == (
        "look",
        choice["message"]["function_call"]["arguments"],
    )
    assert chunks[-1].choices[0].finish_reason == "function_call"
    [choice] = post(live, "chat/completions", **{**body, "function_call": "none"})["choices"]
    assert choice["finish_reason"] != "function_call"


def test_refusal_part_is_text(live, prompts):
    said = [{"type": "refusal", "refusal": "No."}]
    post(live, "chat/completions", messages=[HI, {"role": "assistant", "content": said}, HI], max_tokens=5)
    assert prompts[0][1]["content"] == [{"type": "text", "text": "No."}]


def test_ollamas_fields(live, caplog, monkeypatch):
    monkeypatch.setattr(base, "logged_fields", set())
    seen: list[float] = []
    submit = live.client.submit_together

    async def spy(requests):
        seen.append(requests[0].params.repetition_penalty)
        return await submit(requests)

    monkeypatch.setattr(live.client, "submit_together", spy)
    fields = {"num_ctx": 8192, "keep_alive": "5m", "options": {"num_gpu": 1}}
    with caplog.at_level(logging.INFO, "vlmserve"):
        post(live, "chat/completions", messages=[HI], max_tokens=3, repeat_penalty=1.5, grammar="", **fields)
    assert seen == [1.5]
    lines = "\n".join(record.getMessage() for record in caplog.records)
    assert all(lines.count(f"'ChatRequest.{name}'") == 1 for name in fields)
