"""Drafts of the layer for multi-token prediction: they follow its formula, and answers do not depend on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.kinds import by_kernels
from tests.engine.test_drafts import whole
from tests.engine.test_parity import Oracle, bytes_of_4, text_oracle
from tests.engine.test_qwen_vl import make_oracle
from tests.engine.test_structured import PERSON, engine_of, mixed, request_of, run, tokens
from tests.models.test_families import make
from tests.mtp_checkpoints import Reference, add_mtp, make_counting
from vlmserve.engine import drafting
from vlmserve.engine.drafting import share_of_layer
from vlmserve.engine.engine import Engine
from vlmserve.quant.memory import weight_bytes
from vlmserve.runner.warm_up import PREDICTED, ROWS_OF_LAYER
from vlmserve.steps import SchedulerOutput
from vlmserve.types import EngineOutput, EngineRequest, Grammar, Prompt, SamplingParams

OF_LAYER = [(0, 1.0), (1, 1.0), (2, 1.01), (3, 1.0), (4, 1.0)]
"""Assumed times of the layer, see `time_layer`."""


@pytest.fixture(autouse=True)
def _costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts and rows cost little."""
    curves = {"layer": OF_LAYER}
    monkeypatch.setattr(drafting, "known_costs", lambda key, _: curves.get(key.split()[-1], [(1, 1.0), (32, 1.01)]))
    # a tiny model's layer is a large share of it
    monkeypatch.setattr(drafting, "share_of_layer", lambda _: 0.0)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return text_oracle(add_mtp(make(tmp_path_factory.mktemp("qwen3.5"), "qwen3.5 with shared keys")))


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = add_mtp(make(tmp_path_factory.mktemp("counting"), "qwen3.5 with shared keys"))
    return make_counting(folder)


def greedy(name: str, prompt: Prompt, count: int = 20) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))


def check_predictions(engine: Engine, oracle: Oracle, reference: Reference, requests: Sequence[EngineRequest]) -> int:
    """Let the model make 3 drafts after each token, and compare them with the formula. Returns the number of drafts."""
    return check_steps(record_steps(engine, 3), run(engine, list(requests)), oracle, reference, requests)


def check_steps(
    steps: dict[str, list[tuple[int, list[int]]]],
    answers: dict[str, list[EngineOutput]],
    oracle: Oracle,
    reference: Reference,
    requests: Sequence[EngineRequest],
    since: Callable[[int], int] = lambda length: 0,
) -> int:
    """since: the first token that the layer reads before it makes drafts after `length` tokens."""
    made = 0
    for request in requests:
        answer = tokens(answers[request.request_id])
        known = request.prompt.token_ids + answer
        inputs = {"input_ids": torch.tensor([known])}
        with torch.inference_mode():
            hidden = oracle.model.model(**inputs).last_hidden_state[0]
        length = len(request.prompt.token_ids)
        for new, predicted in steps.get(request.request_id, []):
            length += new
            if predicted:
                first = since(length)
                assert predicted == reference.chain(known[first:length], hidden[first : length - 1], len(predicted))
                made += len(predicted)
    return made


def record_steps(
    engine: Engine, count: int, runs: Callable[[str, int], bool] = lambda *_: True
) -> dict[str, list[tuple[int, list[int]]]]:
    """Returns each request's new tokens and predictions, step by step.

    count: predictions after each step. runs: whether a request that computes from a token on runs through the layer.
    """
    found: dict[str, list[tuple[int, list[int]]]] = {}
    submit = engine.runner.submit

    def submitted(step: SchedulerOutput) -> Any:
        step.num_predicted = {one.request_id: count for one in step.requests if runs(one.request_id, one.start)}
        running = submit(step)
        output = running.result()
        for request_id, sampled in output.token_ids.items():
            found.setdefault(request_id, []).append((len(sampled), output.predicted.get(request_id, [])))
        running.result = lambda: output  # type: ignore[method-assign]
        return running

    engine.runner.submit = submitted  # type: ignore[method-assign]
    return found


@by_kernels("schedule", native=["batched", "chunked", "preempted"], torch=["chunked"])
def test_predictions_follow_the_formula(oracle: Oracle, schedule: str) -> None:
    settings: dict[str, Any] = {"speculation": "auto", "block_size": 4}
    if schedule == "chunked":
        settings |= {"max_num_batched_tokens": 9}
    if schedule == "preempted":
        settings |= {"kv_cache_memory": 24 * bytes_of_4(oracle.folder), "max_model_len": 80}
    engine, reference = engine_of(oracle.folder, **settings), Reference(oracle.folder)
    prompts = [oracle.prompt(seed, length) for seed, length in enumerate([40, 1, 23, 9, 50])]
    requests = [greedy(str(number), prompt) for number, prompt in enumerate(prompts)]
    assert check_predictions(engine, oracle, reference, requests) > 100
    assert bool(engine.stats().preemptions) == (schedule == "preempted")


def test_predictions_find_cached_prompts(oracle: Oracle) -> None:
    engine, reference = engine_of(oracle.folder, speculation="auto", block_size=4), Reference(oracle.folder)
    prompt = oracle.prompt(1, 60)
    longer = Prompt([*prompt.token_ids, *oracle.prompt(2, 9).token_ids])
    check_predictions(engine, oracle, reference, [greedy("first", prompt)])
    assert check_predictions(engine, oracle, reference, [greedy("same", prompt), greedy("longer", longer)]) > 50
    assert run(engine, [greedy("again", prompt)])["again"][-1].cached_tokens > 50


def test_predictions_resume_after_a_pause(oracle: Oracle) -> None:
    engine, reference = engine_of(oracle.folder, speculation="auto", block_size=4), Reference(oracle.folder)
    requests = [greedy("a", oracle.prompt(1, 10), 60), greedy("b", oracle.prompt(2, 20), 60)]
    steps = record_steps(engine, 3, lambda name, start: name == "a" and not 26 <= start < 45)
    answers = run(engine, requests)

    def since(length: int) -> int:
        return 48 if length > 48 else 0

    steps["a"] = [(new, [] if 46 <= length < 51 else found) for length, new, found in with_lengths(steps["a"], 10)]
    assert check_steps(steps, answers, oracle, reference, requests[:1], since) > 100
    assert not any(predicted for _, predicted in steps["b"])


def with_lengths(steps: list[tuple[int, list[int]]], length: int) -> Iterator[tuple[int, int, list[int]]]:
    """Also yields the number of known tokens after each step. length: of the prompt."""
    for new, predicted in steps:
        length += new
        yield length, new, predicted


@pytest.mark.parametrize("runs_before", [True, False])
def test_predictions_read_only_complete_blocks(oracle: Oracle, runs_before: bool) -> None:
    engine, reference = engine_of(oracle.folder, speculation="auto", block_size=4), Reference(oracle.folder)
    prompt = oracle.prompt(1, 60)
    longer = greedy("longer", Prompt([*prompt.token_ids, *oracle.prompt(2, 9).token_ids]))
    steps = record_steps(engine, 3, lambda name, _: runs_before or name == "longer")
    run(engine, [greedy("first", prompt)])
    answers = run(engine, [longer])
    cached = answers["longer"][-1].cached_tokens
    assert cached > 50
    first = 0 if runs_before else -(-cached // 4) * 4
    # the chunk that begins within a block also reads what the block has of other tokens
    steps["longer"][0] = steps["longer"][0][0], []
    assert check_steps(steps, answers, oracle, reference, [longer], lambda length: first) > 30


@pytest.mark.parametrize("settings", [{}, {"quantize": "int8"}, {"kernels": "torch"}], ids=str)
def test_right_predictions_save_steps(counting: Path, settings: dict[str, Any]) -> None:
    engine = engine_of(counting, speculation="auto", **settings)
    outputs = run(engine, [greedy("a", Prompt([50, 9, 30]), 60)])["a"]
    assert tokens(outputs) == [*range(31, 91)]
    assert outputs[-1].accepted_drafts > 40
    assert len(outputs) < 20


def test_requests_beside_others_predict(counting: Path) -> None:
    engine = engine_of(counting, speculation="auto")
    found = run(engine, [greedy(str(first), Prompt([9, first]), 60) for first in range(10, 130, 10)])
    assert [tokens(found[str(first)]) for first in range(10, 130, 10)] == [
        [*range(first + 1, first + 61)] for first in range(10, 130, 10)
    ]
    assert engine.stats().accepted_drafts > 200


@pytest.mark.parametrize("kind", ["counting", "random"])
def test_answers_are_those_without_predictions(counting: Path, oracle: Oracle, kind: str) -> None:
    folder = counting if kind == "counting" else oracle.folder
    plain, predicting = (engine_of(folder, speculation=way) for way in ("off", "auto"))
    record_steps(predicting, 4)
    params: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    requests = [*mixed(), request_of("cut", Grammar.json(PERSON), 3, max_tokens=25)]
    requests += [request_of(f"seeded {seed}", None, seed, temperature=0.7, **params) for seed in range(4)]
    requests += [request_of("penalized", None, 1, repetition_penalty=1.3, no_repeat_ngram_size=2, **params)]
    expected, actual = run(plain, requests), run(predicting, requests)
    for name, outputs in expected.items():
        assert whole(actual[name]) == whole(outputs)
    assert predicting.stats().drafted_tokens > 20


def test_images_have_predictions(tmp_path: Path) -> None:
    images = make_oracle(tmp_path, "qwen3_5")
    add_mtp(tmp_path)
    prompts = [
        images.prompt(seed, *shapes) for seed, shapes in enumerate([(5, (2, 3), 9), ((4, 1), 3), (2, (5, 5), 20)])
    ]
    requests = [greedy(str(number), prompt) for number, prompt in enumerate(prompts)]
    plain, predicting = (engine_of(tmp_path, speculation=way, max_num_batched_tokens=16) for way in ("off", "auto"))
    steps = record_steps(predicting, 3)
    expected, actual = run(plain, requests), run(predicting, requests)
    assert {name: tokens(one) for name, one in actual.items()} == {name: tokens(one) for name, one in expected.items()}
    assert all(any(predicted for _, predicted in steps[name]) for name in expected)


def test_engines_without_drafts_skip_mtp(counting: Path) -> None:
    engine = engine_of(counting, speculation="off")
    assert engine.runner.model.predictor is None
    assert len(run(engine, [greedy("a", Prompt([50, 9, 30]), 30)])["a"]) == 30


def test_layer_costs_at_least_its_share():
    costs = drafting.layer_costs([1.0, 0.9, 0.8, 3.0, 2.5], 0.1)
    assert costs.draft == pytest.approx(0.1)
    assert [costs.rows.seconds(rows) for rows in (1, ROWS_OF_LAYER)] == [pytest.approx(0.1), pytest.approx(0.3)]
    costs = drafting.layer_costs([1.0, 1.5, 1.5 + 0.4 * PREDICTED, 3.0, 7.0], 0.1)
    assert costs.draft == pytest.approx(0.4)
    assert [costs.rows.seconds(rows) for rows in (1, ROWS_OF_LAYER)] == [pytest.approx(0.5), pytest.approx(4.0)]


def test_share_of_layer_counts_its_weights(counting: Path):
    model = engine_of(counting, speculation="auto").runner.model
    size = weight_bytes(model.language_model.mtp)
    assert 0 < share_of_layer(model) == size / model.weight_bytes < 0.5
