"""Choosing tokens and telling how likely they were, through the real openai client and a real, tiny model."""

from __future__ import annotations

import asyncio
import codecs
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import make_llama
from tests.server.live import QUESTION, LiveServer
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.types import SamplingParams

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
PROMPT = "A résumé of the picture: "


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    folder = make_llama(tmp_path_factory.mktemp("llama"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    engine = {"engine": "real", "dtype": "float32", "device": "cpu", "kv_cache_memory": "16MiB", "num_threads": 1}
    engine["speculation"] = "off"  # drafts move the last digits of logprobs
    with LiveServer(tiny_folder, engine=engine) as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer(tiny_folder) -> Tokenizer:
    return Tokenizer.from_folder(tiny_folder)


def chat(server: LiveServer, **fields):
    own = ("repetition_penalty", "repeat_last_n", "no_repeat_ngram_size", "ignore_eos")
    extra = {name: fields.pop(name) for name in own if name in fields}
    fields = {"temperature": 1.0, "seed": 1, "max_tokens": 24, **fields}
    return server.openai.chat.completions.create(model="tiny", messages=QUESTION, extra_body=extra, **fields)


def text_of(content) -> str:
    """What tokens say together; control tokens say nothing, and an unfinished character is not shown."""
    said = b"".join(bytes(token.bytes) for token in content if token.token not in ("<s>", "</s>", "<unk>"))
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(said)


def test_token_logprobs_have_text_bytes_and_ordered_alternatives(tiny):
    [choice] = chat(tiny, logprobs=True, top_logprobs=4, ignore_eos=True).choices
    assert len(choice.logprobs.content) == 24
    for token in choice.logprobs.content:
        assert token.token == bytes(token.bytes).decode(errors="replace")
        scores = [rival.logprob for rival in token.top_logprobs]
        assert scores == sorted(scores, reverse=True)
        assert len(scores) == 4
        assert token.logprob <= scores[0] + 1e-6
        same = [rival for rival in token.top_logprobs if rival.bytes == token.bytes]
        assert not same or any(math.isclose(rival.logprob, token.logprob, abs_tol=1e-6) for rival in same)


def test_only_chosen_tokens_are_reported_by_default(tiny):
    assert [token.top_logprobs for token in chat(tiny, logprobs=True).choices[0].logprobs.content] == [[]] * 24
    assert chat(tiny).choices[0].logprobs is None
    assert chat(tiny, logprobs=False, top_logprobs=0).choices[0].logprobs is None
    assert all(chunk.choices[0].logprobs is None for chunk in chat(tiny, stream=True))


@pytest.mark.parametrize("seed", range(6))
def test_stream_reports_each_token_once_with_its_text(tiny, seed):
    fields = {"logprobs": True, "top_logprobs": 2, "seed": seed, "temperature": 2.0, "ignore_eos": True}
    [whole] = chat(tiny, **fields).choices
    text, content = "", []
    for chunk in chat(tiny, **fields, stream=True):
        [choice] = chunk.choices
        text += choice.delta.content or ""
        content += choice.logprobs.content if choice.logprobs else []
        assert text_of(content).startswith(text)
    assert text == whole.message.content == text_of(content)
    assert content == whole.logprobs.content


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_and_rest_are_not_reported(tiny, stream):
    fields = {"logprobs": True, "seed": 3, "temperature": 2.0, "ignore_eos": True, "max_tokens": 40}
    [whole] = chat(tiny, **fields).choices
    middle = len(whole.message.content) // 2
    stop = whole.message.content[middle : middle + 5]
    shown = whole.message.content[: whole.message.content.index(stop)]
    if stream:
        chunks = list(chat(tiny, **fields, stop=stop, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        content = [
            token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content
        ]
    else:
        [choice] = chat(tiny, **fields, stop=stop).choices
        text, content = choice.message.content, choice.logprobs.content
    assert text == shown
    assert content == whole.logprobs.content[: len(content)]
    last_before = text_of(content[:-1])
    assert len(last_before) < len(shown) <= len(text_of(content))


def test_several_answers_keep_their_logprobs_apart(tiny):
    fields = {"logprobs": True, "seed": 5, "ignore_eos": True, "max_tokens": 12}
    whole = chat(tiny, n=3, **fields).choices
    streamed = [[], [], []]
    for chunk in chat(tiny, n=3, **fields, stream=True):
        [choice] = chunk.choices
        streamed[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert streamed == [choice.logprobs.content for choice in whole]


def test_completion_logprobs_equal_transformers_with_prompt(tiny, tiny_folder, tokenizer):
    fields = {"model": "tiny", "prompt": PROMPT, "max_tokens": 10, "temperature": 0, "logprobs": 3}
    [choice] = tiny.openai.completions.create(**fields, echo=True, extra_body={"ignore_eos": True}).choices
    told = choice.logprobs
    prompt = tokenizer.encode(PROMPT)
    assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == len(prompt) + 10
    assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        answer = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=10,
            min_new_tokens=10,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected = model(answer).logits[0].log_softmax(-1)
    scores = [float(expected[place - 1, token]) for place, token in enumerate(answer[0].tolist())][1:]
    assert told.token_logprobs[1:] == pytest.approx(scores, abs=1e-4)
    best = expected[:-1].max(-1).values.tolist()
    assert [max(top.values()) for top in told.top_logprobs[1:]] == pytest.approx(best, abs=1e-4)
    for token, offset in zip(told.tokens, told.text_offset, strict=True):
        if not token.startswith("bytes:") and offset >= len(PROMPT):
            # What is said of bytes that are no character comes with the token behind them.
            assert token in choice.text[offset : offset + len(token) + 1]
    assert told.text_offset[len(prompt)] == len(PROMPT)
    assert told.text_offset == sorted(told.text_offset)
    [without] = tiny.openai.completions.create(**fields, extra_body={"ignore_eos": True}).choices
    assert without.logprobs.tokens == told.tokens[len(prompt) :]
    assert without.logprobs.text_offset == [offset - len(PROMPT) for offset in told.text_offset[len(prompt) :]]


def test_streamed_completion_equals_a_whole_one(tiny):
    fields = {
        "model": "tiny",
        "prompt": [PROMPT, "Two"],
        "n": 2,
        "max_tokens": 9,
        "seed": 2,
        "logprobs": 1,
        "echo": True,
    }
    whole = tiny.openai.completions.create(**fields).choices
    texts, tokens, offsets, scores = (["", "", "", ""], [[], [], [], []], [[], [], [], []], [[], [], [], []])
    for chunk in tiny.openai.completions.create(**fields, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        tokens[choice.index] += choice.logprobs.tokens
        offsets[choice.index] += choice.logprobs.text_offset
        scores[choice.index] += choice.logprobs.token_logprobs
    assert texts == [choice.text for choice in whole]
    assert tokens == [choice.logprobs.tokens for choice in whole]
    assert offsets == [choice.logprobs.text_offset for choice in whole]
    for streamed, choice in zip(scores, whole, strict=True):
        assert streamed[0] is None
        assert streamed[1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-4)


async def test_same_seed_gives_same_text_at_any_load(tiny):
    async def ask(seed: int) -> str:
        answer = await client.chat.completions.create(
            model="tiny", messages=QUESTION, seed=seed, temperature=1.5, max_tokens=16, presence_penalty=0.5
        )
        return answer.choices[0].message.content

    async with tiny.async_openai as client:
        alone = [await ask(seed) for seed in range(4)]
        crowd = await asyncio.gather(*(ask(number % 8) for number in range(48)))
    assert len(set(alone)) == 4
    assert [crowd[seed::8] for seed in range(4)] == [[text] * 6 for text in alone]


def test_n_answers_equal_requests_with_successive_seeds(tiny):
    three = [choice.message.content for choice in chat(tiny, n=3, seed=7, frequency_penalty=0.5).choices]
    assert len(set(three)) == 3
    assert three == [chat(tiny, seed=7 + index, frequency_penalty=0.5).choices[0].message.content for index in range(3)]


def completions(server: LiveServer, **fields):
    extra = {name: fields.pop(name) for name in ("stop_token_ids",) if name in fields}
    fields = {"temperature": 1.5, "seed": 5, "max_tokens": 16, **fields}
    return server.openai.completions.create(model="tiny", **fields, extra_body=extra)


def mean(choice) -> float:
    """The mean log probability of a completion's tokens."""
    told = choice.logprobs.token_logprobs
    return sum(told) / len(told) if told else -math.inf


def test_best_samples_have_the_likeliest_tokens(tiny):
    prompts = [PROMPT, "Two blue"]
    ends = {"stop_token_ids": list(range(3, 200, 12))}
    alone = [
        [completions(tiny, prompt=prompt, seed=5 + index, logprobs=1, **ends) for index in range(6)]
        for prompt in prompts
    ]
    ranked = [sorted((one.choices[0] for one in own), key=mean, reverse=True) for own in alone]
    assert len({len(choice.logprobs.tokens) for choice in ranked[0]}) > 2, "lengths have to differ to mean anything"
    by_sum = sorted(ranked[0], key=lambda choice: sum(choice.logprobs.token_logprobs), reverse=True)
    assert ranked[0][:2] != by_sum[:2]
    wanted = [choice for own in ranked for choice in own[:2]]
    best = completions(tiny, prompt=prompts, n=2, best_of=6, **ends)
    assert [choice.text for choice in best.choices] == [choice.text for choice in wanted]
    assert [choice.finish_reason for choice in best.choices] == [choice.finish_reason for choice in wanted]
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert [choice.logprobs for choice in best.choices] == [None] * 4, "nobody asked for them"
    generated = sum(one.usage.completion_tokens for own in alone for one in own)
    assert best.usage.completion_tokens == generated
    assert best.usage.prompt_tokens == sum(own[0].usage.prompt_tokens for own in alone)
    told = completions(tiny, prompt=prompts, n=2, best_of=6, logprobs=1, echo=True, **ends)
    for number, (choice, expected) in enumerate(zip(told.choices, wanted, strict=True)):
        prompt = prompts[number // 2]
        assert choice.text == prompt + expected.text
        count = len(expected.logprobs.tokens)
        assert choice.logprobs.tokens[-count:] == expected.logprobs.tokens
        assert choice.logprobs.token_logprobs[-count:] == pytest.approx(expected.logprobs.token_logprobs, abs=1e-4)
        assert "".join(choice.logprobs.tokens[1:-count]).replace(" ", "") in prompt.replace(" ", "")


def test_chats_have_their_best_answers_as_well(tiny):
    fields = {"stop": ["e", "n"], "temperature": 1.5}
    alone = [chat(tiny, **fields, seed=1 + index, logprobs=True).choices[0] for index in range(4)]
    likelihoods = [[token.logprob for token in choice.logprobs.content] for choice in alone]
    order = sorted(range(4), key=lambda index: -sum(likelihoods[index]) / len(likelihoods[index]))
    best = tiny.ask(**fields, seed=1, max_tokens=24, best_of=4).json()["choices"]
    assert [choice["message"]["content"] for choice in best] == [alone[order[0]].message.content]
    assert order[0] != 0, "the first sample would have come anyhow"


def test_of_equal_samples_any_is_the_best(tiny):
    [choice] = completions(tiny, prompt=PROMPT, temperature=0).choices
    best = completions(tiny, prompt=PROMPT, temperature=0, n=2, best_of=3)
    assert [one.text for one in best.choices] == [choice.text] * 2


def test_an_answer_without_tokens_is_the_least_likely(tiny):
    fields = {"prompt": PROMPT, "temperature": 2.0, "max_tokens": 4, "n": 8, "seed": 3}
    first = {choice.text[:1] for choice in completions(tiny, **fields).choices}
    stop = sorted(first - {""})[:3]
    texts = [choice.text for choice in completions(tiny, **{**fields, "stop": stop}).choices]
    assert 0 < texts.count("") < 8
    ranked = [choice.text for choice in completions(tiny, **{**fields, "stop": stop, "best_of": 9}).choices]
    assert "" not in ranked[: 8 - texts.count("")]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"best_of": 2, "n": 3}, "best_of must be at least n, which is 3"),
        ({"best_of": 3, "n": 2, "stream": True}, "cannot be streamed; leave out best_of or stream"),
        ({"best_of": 17}, "must be at most 16"),
        ({"best_of": 0}, "must be at least 1"),
    ],
)
def test_samples_that_cannot_be_chosen_from_are_refused(tiny, fields, message):
    response = tiny.ask(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "best_of")
    assert message in error["message"]
    assert tiny.ask(best_of=2, n=2, stream=True, max_tokens=2).status_code == 200


def test_a_bias_forces_a_token_or_forbids_it(tiny, tokenizer):
    [letter] = tokenizer.encode("q", add_special_tokens=False)[-1:]
    assert chat(tiny, logit_bias={letter: 100}, max_tokens=5).choices[0].message.content.replace(" ", "") == "qqqqq"
    content = chat(tiny, temperature=0, logprobs=True, ignore_eos=True).choices[0].logprobs.content
    forbidden = tokenizer.encode(content[0].token, add_special_tokens=False)[-1]
    again = chat(tiny, temperature=0, logit_bias={forbidden: -100}, logprobs=True, ignore_eos=True)
    assert content[0].bytes not in [token.bytes for token in again.choices[0].logprobs.content]
    assert again.choices[0].logprobs.content[0].logprob < content[0].logprob


def test_penalties_keep_an_answer_from_repeating_itself(tiny):
    def distinct(**fields) -> int:
        content = (
            chat(tiny, temperature=0, logprobs=True, ignore_eos=True, max_tokens=60, **fields)
            .choices[0]
            .logprobs.content
        )
        return len({tuple(token.bytes) for token in content})

    plain = distinct()
    assert distinct(frequency_penalty=2) > plain
    assert distinct(presence_penalty=2) > plain
    assert distinct(repetition_penalty=1.5) > plain
    assert distinct(repetition_penalty=1.5, repeat_last_n=0) == plain
    assert distinct(no_repeat_ngram_size=2) > plain


def test_default_penalty_is_the_checkpoints(tiny, monkeypatch):
    plain = tiny.ask(temperature=0, max_tokens=30, ignore_eos=True).json()["choices"]
    monkeypatch.setattr(tiny.service, "defaults", SamplingParams(temperature=0, repetition_penalty=1.5))
    fields = {"max_tokens": 30, "ignore_eos": True}
    default = tiny.ask(**fields).json()["choices"]
    assert default == tiny.ask(**fields, repetition_penalty=1.5).json()["choices"]
    assert default != plain == tiny.ask(**fields, repetition_penalty=1).json()["choices"]
