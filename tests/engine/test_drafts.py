"""Answers are the same with drafts as without, whichever of them are right."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

from tests.checkpoints import make_llama
from tests.engine.kinds import by_kernels, with_kernels
from tests.engine.test_parity import Oracle, engine_for, generate, text_oracle, tight_cache
from tests.engine.test_structured import PERSON, engine_of, mixed, request_of, run, tokens
from tests.models.test_families import make
from vlmserve.engine.engine import Engine
from vlmserve.scheduler.request import Request
from vlmserve.types import EngineOutput, EngineRequest, Grammar, Prompt, SamplingParams

LENGTHS = [40, 1, 23, 9, 62, 16, 57, 33]
"""Some answers to these pass the 64 tokens after which longrope rotates otherwise."""


def proposing(answers: Iterable[Sequence[int]], *, right: float, most: int = 5) -> Callable[[Request], list[int]]:
    """Drafts from known prompts with their answers, each right with that probability, and some of them too long."""
    known = [tuple(answer) for answer in answers]
    draw = random.Random(5)

    def propose(request: Request) -> list[int]:
        length = len(request.token_ids)
        whole = next((one for one in known if one[:length] == tuple(request.token_ids)), ())
        drafts = [token if draw.random() < right else abs(token - 1) for token in whole[length:]]
        return (drafts + [7] * most)[: draw.randint(0, most)]

    return propose


@pytest.fixture(scope="module", params=["qwen2", "phi3 with longrope, short", "mistral"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return text_oracle(make(tmp_path_factory.mktemp("family"), request.param))


@pytest.fixture(scope="module")
def prompts(oracle: Oracle) -> list[Prompt]:
    return [oracle.prompt(seed, length) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected(oracle: Oracle, prompts: list[Prompt]) -> list[list[int]]:
    guesses = generate(engine_for(oracle), prompts)
    return [oracle.greedy(prompt, guess=guess) for prompt, guess in zip(prompts, guesses, strict=True)]


@by_kernels(
    "schedule, right",
    native=[("batched", 0.6), ("chunked", 0.0), ("chunked", 1.0), ("preempted", 0.6)],
    torch=[("preempted", 0.6)],
    static=[("preempted", 0.6)],
)
def test_greedy_tokens_are_those_of_transformers(
    oracle: Oracle, prompts: list[Prompt], expected: list[list[int]], schedule: str, right: float
) -> None:
    if schedule == "preempted":
        engine = tight_cache(oracle, prompts, max_num_batched_tokens=100)
    else:
        engine = engine_for(oracle, block_size=4, max_num_batched_tokens=9 if schedule == "chunked" else 2048)
    known = [prompt.token_ids + answer for prompt, answer in zip(prompts, expected, strict=True)]
    engine.scheduler.propose_drafts = proposing(known, right=right)
    assert generate(engine, prompts) == expected
    assert generate(engine, prompts[::-1]) == expected[::-1], "what was cached on the way is right"


def whole(outputs: list[EngineOutput]) -> tuple[Any, ...]:
    """All of an answer but its times; logprobs apart, which the shape of a batch moves a little."""
    last = outputs[-1]
    return tokens(outputs), last.finish_reason, last.stop_token_id, last.error, last.error_param


def logprobs(outputs: list[EngineOutput]) -> list[tuple[int, int, float]]:
    """Each token's id, rank and logprob."""
    assert all(len(output.logprobs or ()) == len(output.token_ids) for output in outputs if output.logprobs is not None)
    return [(one.token_id, one.rank, one.logprob) for output in outputs for one in output.logprobs or ()]


def check_same(requests: list[EngineRequest], plain: Engine, drafting: Engine, *, right: float, most: int = 5) -> None:
    """Both engines give the same answers, and the drafts save steps."""
    expected = run(plain, requests)
    drafting.scheduler.propose_drafts = proposing(
        [one.prompt.token_ids + tokens(expected[one.request_id]) for one in requests], right=right, most=most
    )
    actual = run(drafting, requests)
    for name, outputs in expected.items():
        assert whole(actual[name]) == whole(outputs)
        told, wanted = logprobs(actual[name]), logprobs(outputs)
        assert [one[:2] for one in told] == [one[:2] for one in wanted]
        assert [one[2] for one in told] == pytest.approx([one[2] for one in wanted], abs=1e-4)
    assert drafting.stats().steps < plain.stats().steps
    assert drafting.stats().kv_blocks_used == 0


PARAMS: dict[str, dict[str, Any]] = {
    "seeded": {"top_p": 0.9},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3, "repeat_last_n": 9},
    "biases": {"temperature": 0.0, "logit_bias": {7: 3.0, 9: -100.0}, "presence_penalty": 0.5},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 1},
    "n-grams": {"no_repeat_ngram_size": 2, "no_repeat_ngram_window": 20},
    "allowed tokens": {"allowed_token_ids": tuple(range(20, 90)), "logprobs": 2, "logprob_token_ids": (5, 30)},
    "bad words": {"bad_token_ids": ((31,), *((first, 40) for first in range(20, 90)))},
    "end tokens": {"temperature": 3.0, "stop_token_ids": tuple(range(100, 140)), "min_tokens": 6},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_llama(tmp_path_factory.mktemp("llama"))


@by_kernels(
    "kind, right",
    native=[*((kind, 0.7) for kind in PARAMS), ("seeded", 1.0), ("logprobs", 1.0)],
    static=[(kind, 0.7) for kind in ("seeded", "penalties", "logprobs", "allowed tokens", "end tokens")],
)
def test_sampled_answers_are_the_same(folder: Any, kind: str, right: float) -> None:
    params = {"max_tokens": 40, "ignore_eos": True, **PARAMS[kind]}
    requests = [request_of(f"{kind} {seed}", None, seed, **params) for seed in range(6)]
    check_same(requests, engine_of(folder), engine_of(folder), right=right)


@by_kernels("right", native=[0.7, 1.0], static=[0.7])
def test_answers_that_obey_grammars_are_the_same(folder: Any, right: float) -> None:
    cut = request_of("cut", Grammar.json(PERSON), 3, max_tokens=25)
    check_same([*mixed(), cut], engine_of(folder), engine_of(folder), right=right)


@with_kernels("native", "static")
def test_right_drafts_save_a_step_each(folder: Any) -> None:
    plain, drafting = engine_of(folder), engine_of(folder)
    request = request_of("a", None, temperature=0.0, max_tokens=31, ignore_eos=True)
    answer = tokens(run(plain, [request])["a"])
    drafting.scheduler.propose_drafts = lambda asked: answer[len(asked.token_ids) - 20 :][:4]
    outputs = run(drafting, [request])["a"]
    assert [len(output.token_ids) for output in outputs] == [1, *[5] * 6]
    assert drafting.stats().generation_tokens == 31


@with_kernels("native", "static")
def test_an_answer_ends_in_spite_of_drafts(folder: Any) -> None:
    engine = engine_of(folder)
    request = request_of("a", None, temperature=0.0, max_tokens=12, ignore_eos=True)
    answer = tokens(run(engine, [request])["a"])
    end = next(index for index, token in enumerate(answer) if index > 2 and token not in answer[:index])
    engine.scheduler.propose_drafts = lambda asked: [*answer[len(asked.token_ids) - 20 :], 5, 6, 7]
    stopping = request_of("b", None, temperature=0.0, max_tokens=40, stop_token_ids=(answer[end],), ignore_eos=True)
    [*_, last] = outputs = run(engine, [EngineRequest("b", request.prompt, stopping.params)])["b"]
    assert tokens(outputs) == answer[:end]
    assert (last.finish_reason, last.stop_token_id) == ("stop", answer[end])


@with_kernels("native", "static")
def test_a_failure_after_a_right_draft_ends_requests(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(folder)
    request = EngineRequest("a", Prompt([5] * 20), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    answer = tokens(run(engine, [request])["a"])
    engine.scheduler.propose_drafts = lambda asked: answer[len(asked.token_ids) - 20 :][:3]
    original = engine.runner.logits_of

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        logits = original(hidden)
        logits[2:] = torch.nan
        return logits

    monkeypatch.setattr(engine.runner, "logits_of", poisoned)
    outputs = run(engine, [request])["a"]
    assert tokens(outputs) == answer[:3]
    assert outputs[-1].finish_reason == "error"
    monkeypatch.setattr(engine.runner, "logits_of", original)
    assert tokens(run(engine, [request])["a"]) == answer, "nothing of what failed is found again"
