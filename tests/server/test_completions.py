"""/v1/completions, /tokenize and /detokenize, mostly through the real openai client."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from tests.server.live import QUESTION

PROMPT = "A red circle is"


def post(live, path, **fields):
    return httpx.post(f"{live.url}{path}", json=fields, timeout=30)


def test_a_text_is_continued_without_a_template(live):
    answer = live.openai.completions.create(model="tiny", prompt=PROMPT, max_tokens=8)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    [choice] = answer.choices
    assert choice.text
    tokens = post(live, "/tokenize", prompt=PROMPT).json()
    assert answer.usage.prompt_tokens == tokens["count"] == len(tokens["tokens"])
    assert answer.usage.completion_tokens == 8
    assert choice.finish_reason == "length"
    same = live.openai.completions.create(model="tiny", prompt=tokens["tokens"], max_tokens=8)
    assert same.choices[0].text == choice.text


def test_stream_equals_the_whole_answer(live):
    whole = live.openai.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, echo=True)
    assert whole.choices[0].text.startswith(PROMPT)
    chunks = list(
        live.openai.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=8, echo=True, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["length"]


def test_prompts_and_answers_are_numbered_by_prompt(live):
    one, other = "A red circle", "Two blue squares"
    fields = {"model": "tiny", "max_tokens": 6, "seed": 4, "temperature": 1}
    together = live.openai.completions.create(prompt=[one, other], n=2, echo=True, **fields)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert [choice.text.startswith((one, other)[choice.index // 2]) for choice in together.choices] == [True] * 4
    alone = live.openai.completions.create(prompt=other, n=2, echo=True, **fields)
    assert [c.text for c in alone.choices] == [c.text for c in together.choices[2:]]
    assert together.usage.completion_tokens == 24
    tokens = [post(live, "/tokenize", prompt=text).json()["tokens"] for text in (one, other)]
    lists = live.openai.completions.create(prompt=tokens, **fields)
    assert [choice.text for choice in lists.choices] == [
        choice.text.removeprefix((one, other)[choice.index // 2]) for choice in together.choices[::2]
    ]
    assert lists.usage.prompt_tokens == sum(map(len, tokens))


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": ""}, "prompt", "must not be empty"),
        ({"prompt": []}, "prompt", "must be a text"),
        ({"prompt": ["a", 3]}, "prompt[1]", "must be a string"),
        ({"prompt": [3, "a"]}, "prompt[1]", "must be a whole number"),
        ({"prompt": [-1]}, "prompt[0]", "must be at least 0"),
        ({"prompt": [10**6]}, "prompt", "not in the vocabulary"),
        ({"prompt": "a" * 100_000}, "prompt", "maximum context length"),
        ({"prompt": "<image>"}, "prompt", "image"),
        ({"prompt": PROMPT, "suffix": "and so on"}, "suffix", "not supported"),
        ({"prompt": PROMPT, "messages": QUESTION}, "messages", "not supported"),
        ({"prompt": PROMPT, "max_tokens": -1}, "max_tokens", "must be at least 0"),
    ],
)
def test_bad_prompts_are_refused_by_name(live, fields, param, message):
    response = post(live, "/v1/completions", **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert live.openai.completions.create(model="tiny", prompt=PROMPT, max_tokens=1).choices[0].text


def test_unlimited_answer_ends_at_a_fifth_of_context(live):
    context = live.client.info.max_model_len
    answer = post(live, "/v1/completions", prompt=PROMPT, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == context // 5
    assert answer["choices"][0]["finish_reason"] == "length"
    asked = live.ask(ignore_eos=True).json()
    assert asked["usage"]["completion_tokens"] == context // 5


def test_tokens_become_text_again(live):
    tokens = post(live, "/tokenize", prompt=PROMPT, return_token_strs=True).json()
    assert len(tokens["token_strs"]) == tokens["count"]
    assert tokens["max_model_len"] == live.client.info.max_model_len
    plain = post(live, "/tokenize", prompt=PROMPT, add_special_tokens=False).json()["tokens"]
    assert post(live, "/detokenize", tokens=plain).json() == {"prompt": PROMPT}
    asked = live.openai.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=1)
    assert post(live, "/tokenize", messages=QUESTION).json()["count"] == asked.usage.prompt_tokens


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/tokenize", {}, "one of prompt, content and messages"),
        ("/tokenize", {"prompt": "a", "messages": QUESTION}, "one of prompt, content and messages"),
        ("/detokenize", {"tokens": [10**6]}, "tokens[0] is 1000000, which is not in the vocabulary of"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1], "model": "other"}, "no model 'other'"),
    ],
)
def test_what_are_no_tokens_is_refused(live, path, fields, message):
    body = json.dumps(fields)
    response = httpx.post(f"{live.url}{path}", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 404)
    assert message in response.json()["error"]["message"]


async def test_the_async_client_streams_completions(live):
    async with live.async_openai as client:
        stream = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream])
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt=PROMPT)
