"""Steps that are submitted before the step before them has ended give the answers of steps that wait for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_llama
from tests.engine.test_drafts import proposing
from tests.engine.test_structured import engine_of, run, tokens
from tests.static_device import StaticDevice, static_devices  # noqa: F401
from vlmserve.engine.engine import Engine
from vlmserve.runner.runner import ModelRunner, RunningStep
from vlmserve.steps import SchedulerOutput
from vlmserve.types import EngineOutput, EngineRequest, Grammar, Prompt, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


def request(name: str, length: int = 20, **params: Any) -> EngineRequest:
    sampling = {"temperature": 1.5, "max_tokens": 12, "seed": len(name), "ignore_eos": True, **params}
    return EngineRequest(
        name, Prompt([5 + (len(name) + 3 * i) % 200 for i in range(length)]), SamplingParams(**sampling)
    )


PLAIN = [request("a"), request("bb", 7, temperature=0), request("ccc", 30, max_tokens=5), request("dddd", max_tokens=1)]
SPECIAL: dict[str, list[EngineRequest]] = {
    "plain": [],
    "penalties": [request("eeeee", repetition_penalty=1.5, frequency_penalty=0.5)],
    "n-grams": [request("eeeee", no_repeat_ngram_size=2)],
    "biases": [request("eeeee", logit_bias={7: 5.0, 9: -100.0}), request("ffffff", min_tokens=4, ignore_eos=False)],
    "logprobs": [request("eeeee", logprobs=2)],
    "grammars": [request("eeeee", grammar=Grammar.regex("[a-z]{3,9}!"))],
    "filters": [request("eeeee", top_k=5), request("ffffff", top_p=0.6), request("ggggggg", min_p=0.1)],
}


def waiting(engine: Engine) -> Engine:
    """The same, each of its steps after the one before."""
    engine.overlaps = False
    return engine


def answers(outputs: dict[str, list[EngineOutput]]) -> dict[str, tuple[Any, ...]]:
    return {
        name: (tokens(parts), parts[-1].finish_reason, parts[-1].stop_token_id, parts[-1].error)
        for name, parts in outputs.items()
    }


TIGHT = {"max_num_batched_tokens": 8, "max_num_seqs": 2, "block_size": 4}


@pytest.mark.parametrize(("kind", "settings"), [("grammars", {}), *((kind, TIGHT) for kind in SPECIAL)])
def test_all_kinds_of_requests_get_the_same_answers(folder: Path, kind: str, settings: dict[str, int]) -> None:
    requests = PLAIN + SPECIAL[kind]
    expected = answers(run(waiting(engine_of(folder, **settings)), requests))
    assert answers(run(engine_of(folder, **settings), requests)) == expected


def test_plain_decodes_run_one_step_ahead(folder: Path, static_devices: list[StaticDevice]) -> None:  # noqa: F811
    engine = engine_of(folder)
    run(engine, [request("a", max_tokens=20)])
    # The prompt's step, and each decode's but the first one's, which the last token of an answer needs no more.
    assert static_devices[-1].num_ahead == 19
    assert static_devices[-1].num_running == 0
    assert engine.stats().steps == 20


def test_end_tokens_and_drafts(folder: Path) -> None:
    first = answers(run(waiting(engine_of(folder)), [request("a"), request("bb")]))
    stops = [request("a", stop_token_ids=[first["a"][0][4]]), request("bb", stop_token_ids=[first["bb"][0][0]])]
    expected = answers(run(waiting(engine_of(folder)), stops))
    assert [answer[1] for answer in expected.values()] == ["stop", "stop"]
    engine = engine_of(folder)
    assert answers(run(engine, stops)) == expected
    assert engine.stats().kv_blocks_used == 0
    engine.scheduler.propose_drafts = proposing(
        [one.prompt.token_ids + first[one.request_id][0] for one in stops], right=0.7
    )
    assert answers(run(engine, stops)) == expected


def test_a_cache_that_is_too_small_preempts(folder: Path) -> None:
    requests = [request("x" * (1 + number), 18, max_tokens=30) for number in range(5)]
    expected = answers(run(waiting(engine_of(folder)), requests))
    probe = engine_of(folder, block_size=4)
    block_bytes = probe.info.kv_cache_bytes // probe.stats().kv_blocks_total
    engine = engine_of(folder, block_size=4, kv_cache_memory=26 * block_bytes)
    assert answers(run(engine, requests)) == expected
    assert engine.stats().preemptions > 0


def test_a_reused_id_gets_no_old_token(folder: Path, static_devices: list[StaticDevice]) -> None:  # noqa: F811
    second = request("a", 9, seed=77, temperature=1.0)
    expected = answers(run(waiting(engine_of(folder)), [second]))
    engine = engine_of(folder)
    engine.add(request("a", max_tokens=50))
    engine.add(request("bb", max_tokens=50))
    for _ in range(5):
        engine.step()
    assert static_devices[-1].num_running == 1
    engine.abort(["a"])
    assert answers_of(engine, second)["a"] == expected["a"]
    engine.abort(["bb"])
    while engine.has_work():
        assert engine.step() == []
    assert engine.stats().kv_blocks_used == 0


def answers_of(engine: Engine, one: EngineRequest) -> dict[str, tuple[Any, ...]]:
    """The answer to a request beside others that go on."""
    engine.add(one)
    outputs: list[EngineOutput] = []
    while not outputs or outputs[-1].finish_reason is None:
        outputs += [output for output in engine.step() if output.request_id == one.request_id]
    return answers({one.request_id: outputs})


def test_a_nan_row_fails_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request("a", max_tokens=9), request("bb", max_tokens=9)]
    expected = answers(run(waiting(engine_of(folder)), requests))
    engine = engine_of(folder)
    logits, calls = ModelRunner.logits_of, []

    def broken(self: ModelRunner, hidden: torch.Tensor) -> torch.Tensor:
        result = logits(self, hidden)
        calls.append(len(result))
        if len(calls) == 4:
            result[0] = torch.nan
        return result

    monkeypatch.setattr(ModelRunner, "logits_of", broken)
    submitted: list[SchedulerOutput] = []
    submit = ModelRunner.submit

    def noted(self: ModelRunner, step: SchedulerOutput) -> RunningStep:
        submitted.append(step)
        return submit(self, step)

    monkeypatch.setattr(ModelRunner, "submit", noted)
    found = answers(run(engine, requests))
    assert "not a number" in found["a"][3]
    assert found["a"][0] == expected["a"][0][:3]
    assert found["bb"] == expected["bb"]
    assert any(step.blocks_to_zero for step in submitted)
