"""Engines that draft give the same answers in fewer steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_llama
from tests.engine.test_structured import engine_of, run, tokens
from vlmserve.engine import drafting
from vlmserve.engine.engine import Engine
from vlmserve.types import EngineRequest, Prompt, SamplingParams


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine]:
    folder: Path = make_llama(tmp_path_factory.mktemp("llama"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting, "known_costs", lambda *_: [(1, 1.0), (32, 1.3)])
        return engine_of(folder, speculation="off"), engine_of(folder, speculation="auto")


def request_of(name: str, prompt: list[int], salt: str = "", **params: Any) -> EngineRequest:
    params = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True, **params}
    return EngineRequest(name, Prompt(prompt), SamplingParams(**params), cache_salt=salt)


def steps_of(engine: Engine, request: EngineRequest) -> int:
    before = engine.stats().steps
    run(engine, [request])
    return engine.stats().steps - before


def prompt_of(seed: int, length: int = 20) -> list[int]:
    return random.Random(seed).choices(range(5, 250), k=length)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_repeats_take_few_steps(engines: tuple[Engine, Engine], temperature: float) -> None:
    plain, drafter = engines
    request = request_of("a", prompt_of(1), temperature=temperature, seed=3)
    [expected], [first], [again] = (run(engine, [request]).values() for engine in (plain, drafter, drafter))
    assert tokens(first) == tokens(again) == tokens(expected)
    assert len(again) < len(expected) / 8
    assert again[-1].accepted_drafts > 50
    assert again[-1].accepted_drafts + len(again) == 60
    stats = drafter.stats()
    assert stats.drafted_tokens >= stats.accepted_drafts >= again[-1].accepted_drafts


@pytest.mark.parametrize("changed", [{"salt": "other"}, {"seed": 4}])
def test_answers_stay_with_their_tenant(engines: tuple[Engine, Engine], changed: dict[str, Any]) -> None:
    _, drafter = engines
    params = {"temperature": 1.0, "seed": 3}
    steps_of(drafter, request_of("a", prompt_of(2), **params))
    assert steps_of(drafter, request_of("a", prompt_of(2), **params)) < 12
    assert steps_of(drafter, request_of("a", prompt_of(2), **{**params, **changed})) > 30


def test_predictions_are_drafts(engines: tuple[Engine, Engine]) -> None:
    plain, drafter = engines
    request = request_of("a", prompt_of(4))
    answer = tokens(run(plain, [request])["a"])
    changed = [*answer[:20], 7, 7, 7, *answer[22:]]
    predicting = EngineRequest("a", Prompt(request.prompt.token_ids, prediction=changed), request.params)
    outputs = run(drafter, [predicting])["a"]
    assert tokens(outputs) == answer
    assert outputs[-1].accepted_drafts > 30


def test_aborted_answers_are_kept(engines: tuple[Engine, Engine]) -> None:
    _, drafter = engines
    request = request_of("a", prompt_of(3))
    drafter.add(request)
    for _ in range(40):
        drafter.step()
    drafter.abort(["a", "unknown"])
    assert steps_of(drafter, request) < 40


def test_requests_beside_others_have_drafts(engines: tuple[Engine, Engine]) -> None:
    plain, drafter = engines
    requests = [request_of(name, prompt_of(number)) for name, number in (("a", 5), ("b", 6))]
    run(drafter, requests)
    before = drafter.stats().drafted_tokens
    found, expected = run(drafter, requests), run(plain, requests)
    assert [tokens(found[name]) for name in "ab"] == [tokens(expected[name]) for name in "ab"]
    assert drafter.stats().drafted_tokens > before
    assert steps_of(drafter, requests[0]) < 12, "answers beside others are kept"
