"""Requests whose grammars compile without end."""

from __future__ import annotations

import json
import threading

import httpx
import pytest

from tests.server.live import QUESTION, LiveServer
from tests.server.test_batches import content, finished, line, start
from vlmserve.errors import InvalidRequestError
from vlmserve.offline.llm import LLM
from vlmserve.types import Grammar, SamplingParams

ENDLESS = {"allOf": [{"type": "string", "pattern": f"^.*a{number}.*$"} for number in range(24)]}
_FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": ENDLESS}, "required": ["a"]}}
BODIES = {
    "/v1/chat/completions": [
        {"messages": QUESTION, "response_format": {"type": "json_schema", "json_schema": {"schema": ENDLESS}}},
        {"messages": QUESTION, "tools": [{"type": "function", "function": _FUNCTION}], "tool_choice": "required"},
    ],
    "/v1/completions": [{"prompt": "a", "guided_json": ENDLESS}],
    "/v1/responses": [
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": ENDLESS}}},
    ],
    "/v1/messages": [
        {
            "messages": QUESTION,
            "max_tokens": 5,
            "tools": [{"name": "f", "input_schema": _FUNCTION["parameters"]}],
            "tool_choice": {"type": "any"},
        },
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    history = {"storage_url": f"sqlite:///{tmp_path_factory.mktemp('history') / 'history.db'}"}
    with LiveServer(folder, engine={"max_grammar_seconds": 0.5}, server=history) as running:
        yield running


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), engine="mock", max_grammar_seconds=0.5) as loaded:
        yield loaded


def test_endless_grammars_hold_up_no_other_request(server):
    server.ask(guided_choice=["warm"])
    refusals: list[httpx.Response] = []

    def attack(path: str, body: dict) -> None:
        refusals.append(httpx.post(f"{server.url}{path}", json={"model": "tiny", **body}, timeout=120))

    attacks = [threading.Thread(target=attack, args=(path, body)) for path, bodies in BODIES.items() for body in bodies]
    for thread in attacks:
        thread.start()
    for number in range(3):
        # Every honest grammar is new, so none of them is answered from what is kept.
        body = {"model": "tiny", "messages": QUESTION, "guided_choice": [f"fine {number}"]}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
        assert answer.json()["choices"][0]["message"]["content"] == f"fine {number}"
        assert httpx.get(f"{server.url}/health", timeout=120).status_code == 200
    assert any(thread.is_alive() for thread in attacks)
    for thread in attacks:
        thread.join(120)
    assert len(refusals) == len(attacks)
    for refusal in refusals:
        assert refusal.status_code == 400, refusal.text
        assert "make it simpler" in json.dumps(refusal.json())


def test_endless_grammars_of_batches_fail_alone(server):
    lines = [line("endless", guided_json=ENDLESS), line("fine", guided_choice=["fine"])]
    batch = finished(server.openai, start(server.openai, lines).id)
    [answer] = content(server.openai, batch.output_file_id)
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == "fine"
    [refusal] = content(server.openai, batch.error_file_id)
    assert refusal["custom_id"] == "endless"
    assert "make it simpler" in json.dumps(refusal)


def test_endless_grammars_block_no_thread_of_llm(llm):
    errors: list[str] = []

    def attack() -> None:
        with pytest.raises(InvalidRequestError) as refusal:
            llm.chat(QUESTION, SamplingParams(grammar=Grammar.json(ENDLESS)), use_tqdm=False)
        errors.append(str(refusal.value))

    llm.chat(QUESTION, SamplingParams(grammar=Grammar.choice(["warm"])), use_tqdm=False)
    attacks = [threading.Thread(target=attack) for _ in range(3)]
    for thread in attacks:
        thread.start()
    [result] = llm.chat(QUESTION, SamplingParams(grammar=Grammar.choice(["fine"])), use_tqdm=False)
    assert result.text == "fine"
    assert any(thread.is_alive() for thread in attacks)
    for thread in attacks:
        thread.join(120)
    assert ["make it simpler" in error for error in errors] == [True] * 3
