"""Beam search against transformers' own, over the API, with a tiny model."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import make_text_model
from tests.server.live import LiveServer
from tests.waiting import wait_until
from vlmserve.scheduler.beams import Beam, Beams
from vlmserve.types import BeamSearch, SamplingParams

NEW_TOKENS = 10
PROMPTS = [[5, 9, 33, 70, 12], [44, 8], list(range(20, 60))]
SEARCHES = [(4, 1.0, False), (3, 0.0, False), (4, 2.5, False), (4, -1.0, True), (5, 1.0, True)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("beams"), seed=3)


@pytest.fixture(scope="module")
def oracle(model):
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def live(model):
    engine = {"engine": "real", "device": "cpu", "dtype": "float32", "kv_cache_memory": "4MiB"}
    with LiveServer(model, engine=engine) as server:
        yield server


def search(live, prompt, **fields):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": NEW_TOKENS, "use_beam_search": True, **fields}
    return httpx.post(f"{live.url}/v1/completions", json=body, timeout=60)


def text(live, tokens) -> str:
    answer = live.service.preparer.answers.text(SamplingParams())
    return answer.push(tokens).text + answer.finish().text


@torch.inference_mode()
def expected(oracle, prompt, width, length_penalty, early_stopping, ends, **settings) -> list[list[int]]:
    generated = oracle.generate(
        input_ids=torch.tensor([prompt]), num_beams=width, num_return_sequences=width, do_sample=False,
        max_new_tokens=NEW_TOKENS, length_penalty=length_penalty, early_stopping=early_stopping,
        eos_token_id=ends, pad_token_id=0, **settings,
    )  # fmt: skip
    answers = []
    for row in generated[:, len(prompt) :].tolist():
        end = next((place for place, token in enumerate(row) if token in ends), len(row))
        answers.append(row[:end])
    return answers


@pytest.mark.parametrize(("width", "length_penalty", "early_stopping"), SEARCHES)
def test_beams_are_those_of_transformers(live, oracle, width, length_penalty, early_stopping) -> None:
    # Tokens that come up often in these answers end some of them early.
    own = live.client.info.end_token_ids
    often = {row[2] for prompt in PROMPTS for row in expected(oracle, prompt, 2, 1.0, False, own)[:1]}
    ends = sorted({*own, *often})[: 2 if width > 3 else 3]
    lengths = set()
    for prompt in PROMPTS:
        theirs = expected(oracle, prompt, width, length_penalty, early_stopping, ends)
        ours = search(
            live, prompt, n=width, length_penalty=length_penalty, early_stopping=early_stopping,
            stop_token_ids=[end for end in ends if end not in own],
        ).json()  # fmt: skip
        assert [choice["text"] for choice in ours["choices"]] == [text(live, answer) for answer in theirs]
        ended = [len(answer) < NEW_TOKENS for answer in theirs]
        assert [choice["finish_reason"] == "stop" for choice in ours["choices"]] == ended
        lengths |= {len(answer) for answer in theirs}
    assert len(lengths) > 1 or length_penalty > 2


def test_the_least_length_holds(live, oracle) -> None:
    end = expected(oracle, PROMPTS[0], 3, 1.0, False, live.client.info.end_token_ids)[0][1]
    ends = [*live.client.info.end_token_ids, end]
    theirs = expected(oracle, PROMPTS[0], 3, 1.0, False, ends, min_new_tokens=6)
    ours = search(live, PROMPTS[0], n=3, stop_token_ids=[end], min_tokens=6).json()["choices"]
    assert [choice["text"] for choice in ours] == [text(live, answer) for answer in theirs]
    assert min(map(len, theirs)) >= 6


def test_best_of_a_wider_search_is_streamed(live, oracle) -> None:
    [best, *_] = expected(oracle, PROMPTS[2], 4, 1.0, False, live.client.info.end_token_ids)
    fields = {"model": "tiny", "prompt": PROMPTS[2], "max_tokens": NEW_TOKENS, "stream": True}
    chunks = list(
        live.openai.completions.create(
            **fields, stream_options={"include_usage": True}, extra_body={"use_beam_search": True, "best_of": 4}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == text(live, best)
    assert chunks[-1].usage.prompt_tokens == len(PROMPTS[2])
    assert chunks[-1].usage.completion_tokens in (len(best), len(best) + 1)


def test_a_search_computes_what_beams_share_once(live) -> None:
    prompt = list(range(30, 90))
    before = live.client.stats.prompt_tokens
    assert search(live, prompt, best_of=4).status_code == 200
    # The prompt, and then little more than a token for each beam and step.
    assert live.client.stats.prompt_tokens - before < len(prompt) + 4 * NEW_TOKENS * 18


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 16}, "best_of"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"logprobs": 1}, "logprobs"),
        ({"stop": "a"}, "stop"),
        ({"use_beam_search": False, "best_of": 1, "n": 2}, "best_of"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
    ],
)
def test_what_a_search_cannot_do_is_refused(live, fields, param) -> None:
    response = search(live, PROMPTS[0], **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert search(live, PROMPTS[0], max_tokens=1).status_code == 200
    wait_until(lambda: live.client.num_unfinished == 0)


def test_a_client_that_leaves_ends_the_search(live) -> None:
    fields = {"max_tokens": 400, "use_beam_search": True, "best_of": 8, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{live.url}/v1/completions", json={"model": "tiny", "prompt": PROMPTS[2], **fields}, timeout=0.3)
    wait_until(lambda: live.client.num_unfinished == 0 and live.service.num_answers == 0)


def test_a_search_that_cannot_get_better_is_over() -> None:
    beams = Beams(BeamSearch(width=2), frozenset({9}), max_tokens=10)
    assert beams.running == [Beam((), 0.0)]
    assert beams.num_choices == 4
    beams.advance([[(9, -0.1), (1, -3.0), (2, -3.5), (3, -4.0)]])
    assert not beams.done
    assert [beam.token_ids for beam in beams.running] == [(1,), (2,)]
    beams.advance([[(9, -0.1), (1, -5.0)], [(4, -0.1), (5, -6.0)]])
    assert [ended.token_ids for ended in beams.ended] == [(9,), (1, 9)]
    assert beams.done, "what runs is at -3.6 for two tokens, and what has ended at -1.55"
