"""Token ids, logprobs and limits of tokens in requests and responses, with a tiny real model."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.checkpoints import make_llama
from tests.server.live import LiveServer
from vlmserve.prompt.tokenizer import Tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}assistant: {% endif %}"
)
MESSAGES = [{"role": "user", "content": "Hello there"}]
PROMPT = "one two three"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_llama(tmp_path_factory.mktemp("llama"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def tiny(folder):
    engine = {"engine": "real", "dtype": "float32", "device": "cpu", "kv_cache_memory": "16MiB", "num_threads": 1}
    with LiveServer(folder, engine=engine) as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def post(server: LiveServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=30)


def chat(server: LiveServer, **fields: Any) -> dict[str, Any]:
    body = {"messages": MESSAGES, "max_tokens": 8, "temperature": 1.0, "seed": 3, "ignore_eos": True, **fields}
    answer = post(server, "/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(server: LiveServer, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 1.0, "seed": 3, "ignore_eos": True, **fields}
    answer = post(server, "/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(server: LiveServer, path: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"max_tokens": 8, "temperature": 1.0, "seed": 3, "ignore_eos": True, "stream": True, **fields}
    lines = post(server, path, body).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_chat_returns_token_ids_of_prompt_and_answer(tiny):
    answer = chat(tiny, return_token_ids=True, logprobs=True, return_tokens_as_token_ids=True)
    [choice] = answer["choices"]
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    assert len(choice["token_ids"]) == 8
    names = [token["token"] for token in choice["logprobs"]["content"]]
    assert names == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    streamed = chunks(tiny, "/v1/chat/completions", messages=MESSAGES, return_token_ids=True)
    assert streamed[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert not any("prompt_token_ids" in one for one in streamed[1:])
    ids = [id_ for one in streamed for choice in one["choices"] for id_ in choice.get("token_ids", [])]
    assert ids == choice["token_ids"]
    plain = chat(tiny)
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]


def test_returned_token_ids_have_the_end_token(tiny):
    [free] = complete(tiny, return_token_ids=True)["choices"]
    end = next(id_ for place, id_ in enumerate(free["token_ids"]) if place and id_ not in free["token_ids"][:place])
    [choice] = complete(tiny, return_token_ids=True, stop_token_ids=[end], logprobs=0)["choices"]
    assert choice["token_ids"] == free["token_ids"][: free["token_ids"].index(end) + 1]
    assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])


def test_completions_return_token_ids_and_prompt_logprobs(tiny, tokenizer):
    answer = complete(tiny, return_token_ids=True, prompt_logprobs=2, n=2)
    ids = tokenizer.encode(PROMPT)
    for choice in answer["choices"]:
        assert choice["prompt_token_ids"] == ids
        assert choice["prompt_logprobs"][0] is None
        for id_, entry in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True):
            assert entry[str(id_)]["rank"] >= 1
            assert 2 <= len(entry) <= 3
    streamed = chunks(tiny, "/v1/completions", prompt=PROMPT, return_token_ids=True)
    assert streamed[0]["choices"][0]["prompt_token_ids"] == ids
    sent = [id_ for one in streamed for choice in one["choices"] for id_ in choice["token_ids"]]
    assert sent == answer["choices"][0]["token_ids"]
    refusal = post(tiny, "/v1/completions", {"prompt": PROMPT, "prompt_logprobs": 1, "stream": True})
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_chat_returns_prompt_logprobs(tiny):
    answer = chat(tiny, prompt_logprobs=0)
    assert answer["prompt_logprobs"][0] is None
    assert [len(entry) for entry in answer["prompt_logprobs"][1:]] == [1] * (answer["usage"]["prompt_tokens"] - 1)


def test_nothing_is_generated_with_max_tokens_0(tiny):
    echoed = complete(tiny, echo=True, logprobs=1, max_tokens=0)
    longer = complete(tiny, echo=True, logprobs=1, max_tokens=1)
    [choice] = echoed["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert echoed["usage"]["completion_tokens"] == 0
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert choice["logprobs"][name] == longer["choices"][0]["logprobs"][name][:-1]
    [event] = chunks(tiny, "/v1/completions", prompt=PROMPT, echo=True, max_tokens=0)
    assert event["choices"][0]["text"] == PROMPT


def test_logprobs_of_named_tokens(tiny):
    answer = chat(tiny, logprobs=True, logprob_token_ids=[30, 40, 50])
    for token in answer["choices"][0]["logprobs"]["content"]:
        assert len(token["top_logprobs"]) == 3
    refusal = post(tiny, "/v1/chat/completions", {"messages": MESSAGES, "logprob_token_ids": [1]})
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "logprob_token_ids")


def test_answers_have_allowed_tokens_and_no_bad_words(tiny, tokenizer):
    allowed = list(range(40, 60))
    [choice] = chat(tiny, return_token_ids=True, allowed_token_ids=allowed)["choices"]
    assert set(choice["token_ids"]) <= set(allowed)
    text = complete(tiny, max_tokens=40)["choices"][0]["text"]
    word = next(word for word in text.split() if len(word) > 2 and word.isascii())
    assert word not in complete(tiny, max_tokens=40, bad_words=[word])["choices"][0]["text"]
    refusal = post(tiny, "/v1/completions", {"prompt": PROMPT, "allowed_token_ids": [10**6]})
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "allowed_token_ids")


def test_stop_strings_join_the_text_on_request(tiny):
    text = complete(tiny, max_tokens=20)["choices"][0]["text"]
    stop = text[4:7]
    end = text.index(stop)
    assert complete(tiny, max_tokens=20, stop=stop)["choices"][0]["text"] == text[:end]
    kept = complete(tiny, max_tokens=20, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert (kept["text"], kept["finish_reason"]) == (text[: end + 3], "stop")


def test_special_tokens_are_text_where_asked_for(tiny, tokenizer):
    special = min(tokenizer.special_ids)
    fields = {"allowed_token_ids": [special, 50], "logit_bias": {special: 100}, "max_tokens": 3}
    assert complete(tiny, **fields)["choices"][0]["text"] == ""
    shown = complete(tiny, **fields, skip_special_tokens=False)["choices"][0]["text"]
    assert shown == tokenizer.token(special) * 3
    streamed = chunks(tiny, "/v1/chat/completions", messages=MESSAGES, **fields, skip_special_tokens=False)
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in streamed) == shown


def test_prompts_are_truncated_at_their_beginning(tiny, tokenizer):
    ids = tokenizer.encode(PROMPT)
    answer = complete(tiny, truncate_prompt_tokens=3, return_token_ids=True, echo=True, logprobs=0)
    [choice] = answer["choices"]
    assert choice["prompt_token_ids"] == ids[-3:]
    assert answer["usage"]["prompt_tokens"] == 3
    assert len(choice["logprobs"]["tokens"]) == 11
    many = complete(tiny, prompt=[7] * 5000, truncate_prompt_tokens=-1, max_tokens=1)
    assert many["usage"]["prompt_tokens"] < 5000
    assert chat(tiny, truncate_prompt_tokens=4)["usage"]["prompt_tokens"] == 4


def test_seed_of_minus_1_is_no_seed(tiny):
    texts = {chat(tiny, seed=-1)["choices"][0]["message"]["content"] for _ in range(4)}
    assert len(texts) > 1


def test_tokenize_takes_tools_and_content(tiny):
    def count(**body: Any) -> int:
        answer = post(tiny, "/tokenize", body)
        assert answer.status_code == 200, answer.text
        return answer.json()["count"]

    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    assert count(content=PROMPT) == count(prompt=PROMPT)
    assert count(messages=MESSAGES, tools=[tool]) > count(messages=MESSAGES) + 5
    assert post(tiny, "/tokenize", {"content": "a", "prompt": "b"}).status_code == 400


BEGUN = [*MESSAGES, {"role": "assistant", "content": "The answer is"}]


def num_prompt_tokens(server: LiveServer, **fields: Any) -> int:
    return chat(server, max_tokens=1, **fields)["usage"]["prompt_tokens"]


def test_an_answer_that_has_begun_is_continued(tiny, tokenizer):
    prompt = "user: Hello there\nassistant: The answer is"
    continued = chat(tiny, messages=BEGUN, return_token_ids=True)
    assert tokenizer.decode(continued["prompt_token_ids"]).strip() == prompt
    for fields in (
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"tools": [], "tool_choice": "none"},
    ):
        same = chat(tiny, messages=BEGUN, **fields)
        assert same["choices"][0]["message"]["content"] == continued["choices"][0]["message"]["content"]
    parts = [{"type": "text", "text": "The answer is"}]
    assert num_prompt_tokens(tiny, messages=[*MESSAGES, {"role": "assistant", "content": parts}]) == len(
        continued["prompt_token_ids"]
    )
    streamed = chunks(tiny, "/v1/chat/completions", messages=BEGUN)
    text = "".join(one["choices"][0]["delta"].get("content", "") for one in streamed)
    assert text == continued["choices"][0]["message"]["content"]


def test_neutral_values_begin_a_new_answer(tiny, tokenizer):
    def prompt(**fields: Any) -> str:
        return tokenizer.decode(chat(tiny, messages=BEGUN, return_token_ids=True, **fields)["prompt_token_ids"])

    whole = "user: Hello there\nassistant: The answer is\nassistant:"
    assert prompt(continue_final_message=False).strip() == whole
    assert prompt(add_generation_prompt=True).strip() == whole
    assert prompt(add_generation_prompt=False).strip() == whole.removesuffix("\nassistant:")
    assert prompt(response_format={"type": "json_object"}).strip() == whole
    assert num_prompt_tokens(tiny, continue_final_message=False) == num_prompt_tokens(tiny)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": MESSAGES}, "messages[0]"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": ""}]}, "messages[1]"),
        ({"add_generation_prompt": True}, "continue_final_message"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_cannot_be_continued_is_an_error(tiny, fields, param):
    refusal = post(tiny, "/v1/chat/completions", {"messages": BEGUN, "continue_final_message": True, **fields})
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, param)


def test_messages_continue_the_assistants_last_turn(tiny, tokenizer):
    body = {"model": "tiny", "messages": BEGUN, "max_tokens": 8, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    answer = post(tiny, "/v1/messages", body)
    assert answer.status_code == 200, answer.text
    said = chat(tiny, messages=BEGUN)["choices"][0]["message"]["content"]
    assert answer.json()["content"] == [{"type": "text", "text": said}]
    count = post(tiny, "/v1/messages/count_tokens", {"model": "tiny", "messages": BEGUN}).json()["input_tokens"]
    assert count == answer.json()["usage"]["input_tokens"] + answer.json()["usage"]["cache_read_input_tokens"]
    tokens = post(tiny, "/tokenize", {"messages": BEGUN, "continue_final_message": True}).json()
    assert tokens["count"] == count
