"""Penalties, biases and log probabilities against transformers, end to end: alone, batched, chunked and preempted."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlavaForConditionalGeneration

from tests.checkpoints import make_llama, make_llava
from tests.engine.kinds import by_kernels, with_kernels
from tests.engine.test_parity import bytes_of_4
from vlmserve.engine.engine import Engine
from vlmserve.settings.config import EngineConfig
from vlmserve.types import EngineOutput, EngineRequest, ImageInput, ImageSpan, Prompt, SamplingParams, TokenLogprobs

NEW_TOKENS = 16
SCHEDULES = [
    pytest.param({}, id="one batch"),
    pytest.param({"max_num_batched_tokens": 7}, id="chunks of 7 tokens"),
    pytest.param({"max_num_seqs": 2, "block_size": 5}, id="two at a time"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompts(model) -> list[list[int]]:
    random = np.random.default_rng(0)
    lengths = (3, 17, 1, 40, 16, 33, 9)
    return [random.integers(3, model.config.vocab_size - 8, length).tolist() for length in lengths]


def engine_for(folder: Path, **settings) -> Engine:
    settings = {"kv_cache_memory": "16MiB", "dtype": "float32", "device": "cpu", "num_threads": 1, **settings}
    settings = {"speculation": "off", **settings}  # so that each step adds one token to an answer
    return Engine(EngineConfig(model=str(folder), **settings), folder)


def tight(folder: Path, **settings) -> Engine:
    """An engine whose cache holds the longest request and little more, so that requests are preempted."""
    memory = ((40 + NEW_TOKENS) // 4 + 8) * bytes_of_4(folder)
    return engine_for(folder, block_size=4, kv_cache_memory=memory, **settings)


def run(engine: Engine, texts: list[Prompt] | list[list[int]], *params: dict) -> list[EngineOutput]:
    """All that came for each request, as one output. params: for all, or one for each."""
    whole: dict[str, EngineOutput] = {}
    for number, text in enumerate(texts):
        own = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, **params[number % len(params)]}
        prompt = text if isinstance(text, Prompt) else Prompt(text)
        engine.add(EngineRequest(str(number), prompt, SamplingParams(**own)))
        whole[str(number)] = EngineOutput(str(number), [], logprobs=[])
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            before = whole[output.request_id]
            assert output.logprobs is None or len(output.logprobs) == len(output.token_ids)
            assert output.prompt_logprobs is None or not before.token_ids, "they come with the first output, once"
            whole[output.request_id] = EngineOutput(
                output.request_id,
                before.token_ids + output.token_ids,
                logprobs=before.logprobs + (output.logprobs or []),
                prompt_logprobs=before.prompt_logprobs or output.prompt_logprobs,
                cached_tokens=output.cached_tokens,
            )
    return list(whole.values())


@pytest.fixture(scope="module")
def theirs(model) -> Callable[..., list[list[int]]]:
    """What transformers answers to all prompts, found once for each setting: every schedule asks for the same."""
    found: dict[str, list[list[int]]] = {}

    def answers(**settings) -> list[list[int]]:
        if str(settings) not in found:
            own = {"do_sample": False, "max_new_tokens": NEW_TOKENS, **settings}
            found[str(settings)] = [
                model.generate(torch.tensor([prompt]), **own)[0, len(prompt) :].tolist() for prompt in prompts(model)
            ]
        return found[str(settings)]

    return answers


PENALTIES = [
    ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    ({"repetition_penalty": 0.6}, {"repetition_penalty": 0.6}),
    ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
    (
        {"logit_bias": {7: 3.0, 9: -100.0, 11: 2.5}, "repetition_penalty": 1.2},
        {"sequence_bias": {(7,): 3.0, (9,): -100.0, (11,): 2.5}, "repetition_penalty": 1.2},
    ),
]
"""As requests have them, and as transformers has."""


# Penalties are applied to one request's logits in any schedule: each schedule has a penalty of its own, and a preempted
# request, which must count its answer again, has all.
CASES = [
    *((*penalty, schedule.values[0]) for penalty, schedule in zip(PENALTIES, SCHEDULES, strict=False)),
    *((*penalty, None) for penalty in PENALTIES),
]


@by_kernels("params, settings, schedule", native=CASES, static=[CASES[-4], *CASES[-2:]])
def test_greedy_answers_with_penalties_are_transformers(folder, model, theirs, params, settings, schedule):
    engine = tight(folder) if schedule is None else engine_for(folder, **schedule)
    expected = theirs(**settings)
    assert [output.token_ids for output in run(engine, prompts(model), params)] == expected
    assert expected != theirs(), "or this would prove nothing"
    assert schedule is not None or engine.stats().preemptions > 0


@torch.inference_mode()
def greedy_by_hand(model, prompt: list[int], last_n: int, frequency: float, presence: float) -> list[int]:
    answer: list[int] = []
    for _ in range(NEW_TOKENS):
        logits = model(torch.tensor([prompt + answer])).logits[0, -1].double()
        for token in set(answer[-last_n:]):
            logits[token] -= answer[-last_n:].count(token) * frequency + presence
        answer.append(int(logits.argmax()))
    return answer


@by_kernels("last_n", native=[5, 1000], static=[5])
def test_frequency_penalties_count_the_answer_alone(folder, model, last_n):
    params = {"frequency_penalty": 0.7, "presence_penalty": 1.1, "repeat_last_n": last_n}
    expected = [greedy_by_hand(model, prompt, last_n, 0.7, 1.1) for prompt in prompts(model)]
    for engine in (engine_for(folder), tight(folder)):
        assert [output.token_ids for output in run(engine, prompts(model), params)] == expected
    assert engine.stats().preemptions > 0


def assert_told(told: list[TokenLogprobs], tokens: list[int], expected: torch.Tensor, count: int) -> None:
    """expected: ``[tokens, vocabulary]`` log probabilities."""
    assert [one.token_id for one in told] == tokens
    for one, row in zip(told, expected, strict=True):
        assert abs(one.logprob - float(row[one.token_id])) < 1e-4
        best = row.topk(count)
        np.testing.assert_allclose([score for _, score in one.top], best.values, atol=1e-4)
        np.testing.assert_allclose([float(row[token]) for token, _ in one.top], best.values, atol=1e-4)
        own = row[one.token_id]
        # Others may be as likely, but for rounding.
        assert 1 + int((row > own + 1e-4).sum()) <= one.rank <= int((row > own - 1e-4).sum())


@torch.inference_mode()
def log_probabilities(model, tokens: list[int], **inputs) -> torch.Tensor:
    return model(torch.tensor([tokens]), **inputs).logits[0].log_softmax(-1)


MIXED = [
    {"logprobs": 3},
    {"logprobs": 0, "repetition_penalty": 1.4, "temperature": 0.9, "seed": 3},
    {},
    {"logprobs": 5, "prompt_logprobs": 2},
    {"prompt_logprobs": 0, "logit_bias": {7: 4.0}},
    {"logprobs": 2, "prompt_logprobs": 1, "temperature": 2.0, "top_k": 50, "seed": 4},
    {"frequency_penalty": 1.0, "logprobs": 1},
]


PREEMPTED_IN_CHUNKS = pytest.param({"tight": True, "max_num_batched_tokens": 6}, id="preempted in chunks")


@by_kernels("schedule", native=[*SCHEDULES, PREEMPTED_IN_CHUNKS], static=[PREEMPTED_IN_CHUNKS])
def test_logprobs_are_those_before_all_edits(folder, model, schedule):
    schedule = dict(schedule)
    preempts = schedule.pop("tight", False)
    engine = (tight if preempts else engine_for)(folder, **schedule)
    texts = prompts(model)
    alone = [run(engine, [text], params)[0] for text, params in zip(texts, MIXED, strict=True)]
    together = run(engine, texts, *MIXED)
    assert (engine.stats().preemptions > 0) == preempts
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    whole = [log_probabilities(model, text + output.token_ids) for text, output in zip(texts, alone, strict=True)]
    for text, params, output, expected in zip(texts * 2, MIXED * 2, alone + together, whole * 2, strict=True):
        if "logprobs" in params:
            answer = expected[len(text) - 1 : -1]
            assert_told(output.logprobs, output.token_ids, answer, params["logprobs"])
        else:
            assert output.logprobs == []
        if "prompt_logprobs" in params:
            assert output.prompt_logprobs[0] is None
            assert_told(output.prompt_logprobs[1:], text[1:], expected[: len(text) - 1], params["prompt_logprobs"])
        else:
            assert output.prompt_logprobs is None


@with_kernels("native", "static")
def test_prompt_logprobs_compute_cached_prompts_again(folder, model):
    engine = engine_for(folder, block_size=4)
    prompt = prompts(model)[3]
    run(engine, [prompt], {})
    assert run(engine, [prompt], {})[0].cached_tokens > 0
    [told] = run(engine, [prompt], {"prompt_logprobs": 1})
    assert told.cached_tokens == 0
    assert_told(told.prompt_logprobs[1:], prompt[1:], log_probabilities(model, prompt)[:-1], 1)
    assert run(engine, [prompt], {})[0].cached_tokens > 0


def test_long_prompts_are_scored_in_pieces(folder, model, monkeypatch):
    monkeypatch.setattr("vlmserve.runner.prompt_logprobs.MAX_LOGITS", 3 * model.config.vocab_size)
    prompt = prompts(model)[3]
    engine = engine_for(folder)
    rows = []
    logits = engine.runner.model.language_model.logits
    monkeypatch.setattr(
        engine.runner.model.language_model,
        "logits",
        lambda hidden, *out: rows.append(len(hidden)) or logits(hidden, *out),
    )
    [told] = run(engine, [prompt], {"prompt_logprobs": 2, "max_tokens": 1})
    assert max(rows) == 3
    assert_told(told.prompt_logprobs[1:], prompt[1:], log_probabilities(model, prompt)[:-1], 2)


def test_images_have_no_logprobs(tmp_path):
    folder = make_llava(tmp_path)
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    vision, image_token = model.config.vision_config, model.config.image_token_id
    pixels = np.random.default_rng(1).standard_normal((1, 3, vision.image_size, vision.image_size), np.float32)
    count = (vision.image_size // vision.patch_size) ** 2
    spans = (ImageSpan(ImageInput(b"p" * 32, pixels, count), 2),)
    prompt = Prompt([5, 6, *[image_token] * count, 7, 8, 9], spans)
    params = {"prompt_logprobs": 1, "logprobs": 1, "repetition_penalty": 1.5, "max_tokens": 6}
    [output] = run(engine_for(folder, max_num_batched_tokens=count + 2), [prompt], params)
    tokens = prompt.token_ids + output.token_ids
    expected = log_probabilities(model, tokens, pixel_values=torch.from_numpy(pixels))
    assert [one is None for one in output.prompt_logprobs] == [
        place in (0, *range(2, 2 + count)) for place in range(count + 5)
    ]
    text = [place for place, one in enumerate(output.prompt_logprobs) if one is not None]
    told = [output.prompt_logprobs[place] for place in text]
    assert_told(told, [tokens[place] for place in text], expected[[place - 1 for place in text]], 1)
    assert_told(output.logprobs, output.token_ids, expected[len(prompt.token_ids) - 1 : -1], 1)
    said = [5, 6, 7, 8, 9]
    with torch.no_grad():
        rows = model(torch.tensor([tokens]), pixel_values=torch.from_numpy(pixels)).logits[0].double()
    for token, row in zip(output.token_ids, rows[len(prompt.token_ids) - 1 :], strict=False):
        for one in set(said):
            row[one] = row[one] / 1.5 if row[one] > 0 else row[one] * 1.5
        assert token == int(row.argmax())
        said.append(token)


@with_kernels("native", "static")
def test_logprobs_do_not_change_sampling(folder, model):
    texts = prompts(model)
    plain = {"temperature": 1.5, "seed": 5, "top_k": 40, "min_p": 0.01}
    engine = engine_for(folder)
    without = [output.token_ids for output in run(engine, texts, plain)]
    assert [
        output.token_ids for output in run(engine, texts, {**plain, "logprobs": 2, "prompt_logprobs": 0})
    ] == without
    assert all(
        math.isfinite(one.logprob) for output in run(engine, texts, {**plain, "logprobs": 2}) for one in output.logprobs
    )


def restricted_by_hand(model, prompt: list[int], allowed: list[int], bad: list[list[int]]) -> list[int]:
    answer: list[int] = []
    for _ in range(NEW_TOKENS):
        logits = model(torch.tensor([prompt + answer])).logits[0, -1]
        kept = [
            token
            for token in allowed
            if not any(token == word[-1] and [*answer, token][-len(word) :] == word for word in bad)
        ]
        answer.append(kept[int(logits[kept].argmax())])
    return answer


@torch.inference_mode()
@by_kernels("schedule", native=SCHEDULES, static=SCHEDULES[:1])
def test_allowed_tokens_change_no_other_request(folder, model, theirs, schedule):
    texts, plain = prompts(model), theirs()
    every = list(range(model.config.vocab_size))
    half = every[::2]
    bad = [plain[1][:1], plain[1][1:3], plain[2][1:3], plain[3][:3]]
    params = [
        {},
        {"bad_token_ids": bad},
        {"allowed_token_ids": half},
        {"allowed_token_ids": half, "bad_token_ids": bad},
    ]
    outputs = [output.token_ids for output in run(engine_for(folder, **schedule), texts, *params)]
    for number, (prompt, output) in enumerate(zip(texts, outputs, strict=True)):
        own = params[number % 4]
        expected = restricted_by_hand(model, prompt, own.get("allowed_token_ids", every), own.get("bad_token_ids", []))
        assert output == expected
    assert outputs[0] == plain[0]
    assert outputs[1] != plain[1]


@with_kernels("static")
def test_end_of_restricted_answer_changes_no_other(folder, model, theirs):
    texts, plain = prompts(model)[:2], theirs()
    first = {"allowed_token_ids": list(range(model.config.vocab_size)), "stop_token_ids": [plain[0][2]]}
    ended, other = run(engine_for(folder), texts, first, {})
    assert len(ended.token_ids) <= 3
    assert other.token_ids == plain[1]


def test_logprobs_of_named_tokens_are_returned(folder, model):
    [plain] = run(engine_for(folder), prompts(model)[:1], {"logprobs": 20})
    wanted = [*(token for token, _ in plain.logprobs[0].top[5:8]), 3]
    [output] = run(engine_for(folder), prompts(model)[:1], {"logprobs": 0, "logprob_token_ids": wanted})
    assert output.token_ids == plain.token_ids
    for one in output.logprobs:
        assert sorted(token for token, _ in one.top) == sorted(wanted)
    known, found = dict(plain.logprobs[0].top), dict(output.logprobs[0].top)
    assert [found[token] for token in wanted[:3]] == pytest.approx([known[token] for token in wanted[:3]], abs=1e-5)


def test_no_allowed_token_fails_one_request(folder, model):
    engine = engine_for(folder)
    own = {"allowed_token_ids": [7], "min_tokens": 2, "stop_token_ids": [7], "max_tokens": 4}
    for number, params in enumerate(({"max_tokens": 4}, own)):
        engine.add(EngineRequest(str(number), Prompt([5, 6]), SamplingParams(temperature=0, ignore_eos=True, **params)))
    ended = {}
    while engine.has_work():
        ended |= {output.request_id: output for output in engine.step() if output.finish_reason is not None}
    assert (ended["1"].finish_reason, ended["1"].error_param) == ("error", "allowed_token_ids")
    assert ended["0"].finish_reason == "length"
