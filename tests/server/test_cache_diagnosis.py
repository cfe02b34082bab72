"""Why a prompt was not found in the caches, as both APIs say it."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from tests.server.live import LiveServer
from tests.server.test_chat import data_url
from vlmserve.server.cache_diagnosis import AskedPrompt, CacheLog, Changed, Diagnosis, Miss
from vlmserve.server.schema.usage import CompletionTokensDetails, PromptTokensDetails, Usage
from vlmserve.types import ImageInput, ImageSpan, Missed, Prompt

TOKENS = list(range(100))
SYSTEM = {"role": "system", "content": "Be brief."}


def user(*parts: Any) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "text", "text": one} if isinstance(one, str) else one for one in parts],
    }


IMAGE, OTHER_IMAGE = ({"type": "image_url", "image_url": {"url": url}} for url in ("data:one", "data:other"))


def span(start: int, key: int) -> ImageSpan:
    return ImageSpan(ImageInput(bytes([key]) * 32, np.zeros((1, 3, 2, 2), np.uint8), 4), start)


def asked(*messages: dict[str, Any], tokens: list[int] = TOKENS, images: tuple[ImageSpan, ...] = (), **fields: Any):
    prompt = Prompt(tokens, images)
    owner, salt = fields.get("owner", ""), fields.get("salt", "")
    tools, budget, cut = fields.get("tools"), fields.get("budget"), fields.get("cut", 0)
    return AskedPrompt(owner, salt, messages, tools, prompt, budget, cut)


def changed_at(place: int) -> list[int]:
    return [*TOKENS[:place], 1000, *TOKENS[place + 1 :]]


@pytest.mark.parametrize(
    ("after", "reason", "reusable", "changed"),
    [
        (asked(SYSTEM, user("a", IMAGE), tokens=[*TOKENS, 5]), None, 0, None),
        (asked(SYSTEM, user("b", IMAGE), tokens=changed_at(30)), "messages", 30, Changed(0, 0, "text")),
        (asked(SYSTEM, user("a", OTHER_IMAGE), images=(span(20, 7),)), "messages", 20, Changed(0, 1, "image")),
        (asked(SYSTEM, tokens=changed_at(10)), "messages", 10, Changed(0, 0, "removed")),
        (asked(user("a", IMAGE), tokens=changed_at(3)), "system", 3, None),
        (asked(SYSTEM, user("a", IMAGE), tokens=changed_at(4), tools=["f"]), "tools", 4, None),
        (asked(SYSTEM, user("a", IMAGE), tokens=changed_at(50)), "settings", 50, None),
        (asked(SYSTEM, user("a", IMAGE), tokens=changed_at(98)), None, 0, None),
        (asked(SYSTEM, user("a", IMAGE), salt="tenant"), "salt", 0, None),
        (asked(SYSTEM, user("a", IMAGE), user("b"), tokens=[*TOKENS[5:], *range(5)], cut=5), "truncated", 0, None),
        (asked(SYSTEM, user("a", IMAGE), tokens=[*TOKENS, 5], cut=5), None, 0, None),
    ],
)  # fmt: skip
def test_first_change_is_the_reason(after: AskedPrompt, reason: Any, reusable: int, changed: Changed | None) -> None:
    images = () if changed is None or changed.kind != "image" else (span(20, 6),)
    miss = after.miss_after(asked(SYSTEM, user("a", IMAGE), images=images))
    if reason is None:
        assert miss is None
    else:
        assert miss == Miss(reason, reusable, 100 - reusable, 100 - reusable, changed)


def test_changes_within_long_texts_are_found() -> None:
    before, after = (user("a" * 50_000 + letter + "a" * 50_000) for letter in "bc")
    miss = asked(after, tokens=changed_at(30)).miss_after(asked(before))
    assert miss is not None
    assert miss.changed == Changed(0, 0, "text")


def test_unchanged_prompts_may_be_missing() -> None:
    log = CacheLog(block_size=16)
    assert Diagnosis(log, asked(user("a")), None).begin("first", "model") is None
    later = Diagnosis(log, asked(user("a")), "first")
    assert later.begin("second", "model") is None
    assert later.end(usage(96, None)) is None
    assert later.end(usage(80, None)) == Miss("never_seen", 99, 20, 19)
    assert later.end(usage(80, Missed(never_seen=19, not_cacheable=1))) == Miss("never_seen", 99, 20, 19)
    assert later.end(usage(80, Missed(3, 16, seconds_since_eviction=7.5))) == Miss(
        "evicted", 99, 20, 19, seconds_since_eviction=7.5
    )
    assert later.end(usage(80, Missed(no_checkpoint=19))) == Miss("no_checkpoint", 99, 20, 19)
    assert later.end(usage(0, Missed(not_cacheable=100))) == Miss("not_cacheable", 99, 100, 99)
    assert later.begin("third", "adapter") == Miss("model", 0, 100, 100)


def usage(cached: int, missed: Missed | None) -> Usage:
    details = PromptTokensDetails(cached, 0, 0, 0, msgspec.UNSET if missed is None else missed)
    return Usage(100, 1, 101, details, CompletionTokensDetails())


def test_image_budgets_are_told_apart() -> None:
    images, others = (span(20, 6),), (span(20, 7),)
    before = asked(user("a", IMAGE), images=images)
    limited = asked(user("a", {**IMAGE, "max_pixels": 100}), images=others)
    assert limited.miss_after(before) == Miss("messages", 20, 80, 80, Changed(0, 1, "image_budget"))
    all_limited = asked(user("a", IMAGE), images=others, budget={"max_pixels": 100})
    assert all_limited.miss_after(before) == Miss("budget", 20, 80, 80)


def test_owners_compare_with_their_own_responses() -> None:
    log = CacheLog(block_size=16)
    Diagnosis(log, asked(user("a"), owner="me"), None).begin("first", "model")
    assert Diagnosis(log, asked(user("a"), owner="you"), "first").is_unknown
    assert not Diagnosis(log, asked(user("a"), owner="me"), "first").is_unknown


def test_oldest_prompts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmserve.server.cache_diagnosis.MAX_BYTES", 5000)
    log = CacheLog(block_size=16)
    for number in range(10):
        log.keep(str(number), "model", asked(user("a")))
    assert log.find("0", "") is None
    assert log.find("9", "") is not None


def responses(server: LiveServer, **body: Any) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def shown(color: str, text: str) -> list[dict[str, Any]]:
    image = {"type": "input_image", "image_url": data_url(color), "prompt_cache_breakpoint": {"mode": "explicit"}}
    return [{"role": "user", "content": [image, {"type": "input_text", "text": text}]}]


def test_responses_say_what_changed(live: LiveServer) -> None:
    first = responses(live, input=shown("red", "What is it?"))
    assert "prompt_cache_diagnostics" not in first
    wanted = {"mode": "implicit", "ttl": "30m", "comparison_response_id": first["id"]}
    found = responses(live, input=shown("blue", "What is it?"), prompt_cache_options=wanted)["prompt_cache_diagnostics"]
    assert (found["type"], found["reason"]) == ("cache_miss", "input_changed")
    assert found["changed"] == {"message": 0, "part": 0, "kind": "image"}
    assert found["cache_missed_tokens"] > 0
    again = responses(live, input=shown("red", "What is it?"), prompt_cache_options=wanted)["prompt_cache_diagnostics"]
    assert again["type"] in ("cache_hit", "unavailable")
    unknown = responses(live, input="Hello", prompt_cache_options={"comparison_response_id": "resp_0"})
    assert unknown["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}


@pytest.mark.parametrize("stream", [False, True])
def test_prewarming_generates_nothing(real: LiveServer, stream: bool) -> None:
    question = f"Does streaming make a difference to the caches? {stream}"
    options = {"prompt_cache_options": {"prewarm": True}}
    if stream:
        events = [*real.openai.responses.create(model="tiny", input=question, stream=True, extra_body=options)]
        assert [event.type for event in events] == [
            "response.created", "response.in_progress", "response.completed"
        ]  # fmt: skip
        warm = events[-1].response.model_dump()
    else:
        warm = responses(real, input=question, **options)
    assert warm["output"] == []
    assert warm["status"] == "completed"
    assert warm["usage"]["output_tokens"] == 0
    answer = responses(
        real, input=question, max_output_tokens=2, prompt_cache_options={"comparison_response_id": warm["id"]}
    )
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == answer["usage"]["input_tokens"] - 1
    assert answer["prompt_cache_diagnostics"] == {"type": "cache_hit"}


def test_messages_say_what_changed(live: LiveServer) -> None:
    def ask(text: str, previous: str | None, **fields: Any) -> Any:
        return live.anthropic.messages.create(
            model="tiny",
            max_tokens=5,
            messages=[{"role": "user", "content": text}],
            extra_body={"diagnostics": {"previous_message_id": previous}},
            **fields,
        )

    first = ask("What is it? Say it in words that a child knows.", None)
    assert first.diagnostics is None
    other = ask("Where is it? Say it in words that a child knows.", first.id)
    assert other.diagnostics.cache_miss_reason.type == "messages_changed"
    assert other.diagnostics.cache_miss_reason.cache_missed_input_tokens > 0
    system = ask("What is it? Say it in words that a child knows.", first.id, system="Be brief.")
    assert system.diagnostics.cache_miss_reason.type == "system_changed"
    unknown = ask("What is it?", "msg_0")
    assert unknown.diagnostics.cache_miss_reason.type == "previous_message_not_found"


def test_prewarming_ignores_a_minimum_length(real: LiveServer) -> None:
    question = {"role": "user", "content": "Is a long answer computed ahead?"}
    prompts: dict[str, dict[str, Any]] = {
        "responses": {"input": [question]},
        "chat/completions": {"messages": [question]},
        "messages": {"messages": [question], "max_tokens": 3},
    }
    for path, prompt in prompts.items():
        body = {**prompt, "min_tokens": 5, "prompt_cache_options": {"prewarm": True}}
        response = httpx.post(f"{real.url}/v1/{path}", json=body, timeout=60)
        assert response.status_code == 200, response.text


def chat(server: LiveServer, text: str, kept: int | None = None, **options: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "prompt_cache_options": options}
    body |= {} if kept is None else {"truncate_prompt_tokens": kept}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_chat_completions_say_what_changed(real: LiveServer) -> None:
    first = chat(real, "What do chat completions say of their caches?")
    assert "prompt_cache_diagnostics" not in first
    assert first["usage"]["prompt_tokens_details"]["missed_tokens"]["never_seen"] > 0
    again = chat(real, "What do chat completions say of their caches?", comparison_response_id=first["id"])
    assert again["prompt_cache_diagnostics"] == {"type": "cache_hit"}
    assert again["usage"]["prompt_tokens_details"]["missed_tokens"] == {
        "never_seen": 0, "evicted": 0, "no_checkpoint": 0, "not_cacheable": 1, "seconds_since_eviction": None
    }  # fmt: skip
    other = chat(real, "Who says it of chat completions?", comparison_response_id=first["id"])
    found = other["prompt_cache_diagnostics"]
    assert (found["type"], found["reason"]) == ("cache_miss", "input_changed")
    unknown = chat(real, "Hello", comparison_response_id="chatcmpl-0")
    assert unknown["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}


def test_other_truncation_is_the_reason(real: LiveServer) -> None:
    text = "Which tokens at the beginning of a prompt does a truncated request lack?"
    first = chat(real, text, 12)
    again = chat(real, text, 12, comparison_response_id=first["id"])
    assert again["prompt_cache_diagnostics"] == {"type": "cache_hit"}
    other = chat(real, text, 11, comparison_response_id=first["id"])
    assert other["usage"]["prompt_tokens"] == 11
    assert other["prompt_cache_diagnostics"] == {"type": "unavailable", "detail": "prompt_truncated"}


def test_streamed_chat_completions_diagnose_last(real: LiveServer) -> None:
    first = chat(real, "Do streams of chat completions say it as well?")
    chunks = [
        *real.openai.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Do streams of chat completions say it as well?"}],
            max_tokens=2,
            stream=True,
            extra_body={"prompt_cache_options": {"comparison_response_id": first["id"]}},
        )
    ]
    assert chunks[-1].model_extra is not None
    assert chunks[-1].model_extra["prompt_cache_diagnostics"] == {"type": "cache_hit"}
    assert not any("prompt_cache_diagnostics" in (chunk.model_extra or {}) for chunk in chunks[:-1])


def test_prewarmed_chats_are_found(real: LiveServer) -> None:
    warm = chat(real, "Is a prompt of chat completions computed ahead?", prewarm=True)
    assert warm["choices"][0]["message"]["content"] == ""
    assert warm["usage"]["completion_tokens"] == 0
    answer = chat(real, "Is a prompt of chat completions computed ahead?")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == answer["usage"]["prompt_tokens"] - 1


@pytest.mark.parametrize("stream", [False, True])
def test_prewarmed_messages_are_found(real: LiveServer, stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 3,
        "messages": [{"role": "user", "content": f"Is a prompt of messages computed ahead? {stream}"}],
    }
    options = {"prompt_cache_options": {"prewarm": True}}
    if stream:
        with real.anthropic.messages.stream(**asked, extra_body=options) as events:
            warm = events.get_final_message()
    else:
        warm = real.anthropic.messages.create(**asked, extra_body=options)
    assert warm.content == []
    assert warm.usage.output_tokens == 0
    answer = real.anthropic.messages.create(**asked)
    assert answer.usage.input_tokens == 1
    assert answer.usage.cache_read_input_tokens > 0
