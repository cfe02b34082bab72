"""Drafts of Gemma 4's assistant: they equal transformers', and answers do not depend on them."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from transformers import Gemma4UnifiedForCausalLM, Gemma4UnifiedTextConfig

from tests.assistants import Reference, make_assistant, make_counting
from tests.checkpoints import change_config, make_llama, make_text_model
from tests.engine.kinds import by_kernels
from tests.engine.test_drafts import whole
from tests.engine.test_mtp import greedy, record_steps
from tests.engine.test_parity import Oracle, bytes_of_4, text_oracle
from tests.engine.test_structured import PERSON, engine_of, mixed, request_of, run, tokens
from tests.gemma4 import LARGE
from tests.gguf_files import write_gguf
from tests.models.test_families import GEMMA4, make
from tests.peft_adapters import make_xlora
from vlmserve.engine import drafting
from vlmserve.engine.drafting import layer_costs, share_of_layer
from vlmserve.engine.engine import Engine
from vlmserve.errors import ModelLoadError
from vlmserve.runner.warm_up import PREDICTED
from vlmserve.scheduler.drafts.layer import LayerUse
from vlmserve.types import EngineRequest, Grammar, Prompt


class Pair(NamedTuple):
    oracle: Oracle
    assistant: Path


@pytest.fixture(autouse=True)
def _costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts and rows cost little."""
    curves = {"layer": [(0, 1.0), (1, 1.0), (2, 1.01)]}
    monkeypatch.setattr(drafting, "known_costs", lambda key, _: curves.get(key.split()[-1], [(1, 1.0), (32, 1.01)]))
    # a tiny model's assistant is a large share of it
    monkeypatch.setattr(drafting, "share_of_layer", lambda _: 0.0)


UNIFIED: dict[str, Any] = {name: value for name, value in {**GEMMA4, **LARGE}.items() if "per_layer" not in name}


@pytest.fixture(scope="module", params=["all tokens", "clusters", "unified"])
def pair(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    target = folder / "target"
    target.mkdir()
    own: dict[str, Any] = {}
    if request.param == "unified":
        make_text_model(target, Gemma4UnifiedForCausalLM, Gemma4UnifiedTextConfig, **UNIFIED)
        own = {name: LARGE[name] for name in ("attention_k_eq_v", "num_global_key_value_heads", "sliding_window")}
    else:
        make(target, "gemma4")
    assistant = make_assistant(folder / "assistant", target, clusters=request.param == "clusters", **own)
    return Pair(text_oracle(target), assistant)


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("counting")
    (folder / "target").mkdir()
    target = make(folder / "target", "gemma4")
    assistant = make_assistant(folder / "assistant", target, hidden_size=48, num_hidden_layers=2)
    make_counting(target, assistant)
    change_config(target, tie_word_embeddings=False)
    return target, assistant


@by_kernels("schedule", native=["batched", "chunked", "preempted"], torch=["chunked"])
def test_drafts_equal_those_of_transformers(pair: Pair, schedule: str) -> None:
    oracle = pair.oracle
    settings: dict[str, Any] = {"speculation": "auto", "block_size": 4, "draft_model": str(pair.assistant)}
    if schedule == "chunked":
        settings |= {"max_num_batched_tokens": 9}
    if schedule == "preempted":
        settings |= {"kv_cache_memory": 24 * bytes_of_4(oracle.folder), "max_model_len": 80}
    engine, reference = engine_of(oracle.folder, **settings), Reference(oracle.model, pair.assistant)
    requests = [greedy(str(n), oracle.prompt(n, length)) for n, length in enumerate([40, 1, 23, 9, 50])]
    assert check_drafts(engine, reference, requests) > 100
    assert bool(engine.stats().preemptions) == (schedule == "preempted")


def check_drafts(engine: Engine, reference: Reference, requests: Sequence[EngineRequest]) -> int:
    """Compare three drafts after each step. Returns the number of drafts."""
    steps = record_steps(engine, 3)
    answers = run(engine, list(requests))
    made = 0
    for request in requests:
        known = request.prompt.token_ids + tokens(answers[request.request_id])
        length = len(request.prompt.token_ids)
        for new, predicted in steps[request.request_id]:
            length += new
            if predicted:
                assert predicted == reference.chain(known[:length], len(predicted))
                made += len(predicted)
    return made


@by_kernels("length", native=[1023, 3000], torch=[1023])
def test_long_contexts_have_drafts(tmp_path: Path, length: int) -> None:
    """Rotations are computed for 1,024 positions, then for twice as many or as a prompt needs."""
    (tmp_path / "target").mkdir()
    target = make(tmp_path / "target", "gemma4")
    change_config(target, max_position_embeddings=8192)
    assistant = make_assistant(tmp_path / "assistant", target, max_position_embeddings=8192)
    oracle = text_oracle(target)
    engine = engine_of(
        target, speculation="auto", draft_model=str(assistant), max_model_len=8192, kv_cache_memory="64MiB"
    )
    request = greedy("a", oracle.prompt(1, length), 4)
    assert check_drafts(engine, Reference(oracle.model, assistant), [request]) > 3


def test_drafts_ignore_adapters(pair: Pair, tmp_path: Path) -> None:
    parts = [{"target_modules": ["embed_tokens", name]} for name in ("q_proj", "v_proj")]
    make_xlora(pair.oracle.model, tmp_path, parts, xlora_depth=1)
    requests = [
        msgspec.structs.replace(greedy(str(number), pair.oracle.prompt(number, 20)), adapter="x" if number else "")
        for number in range(3)
    ]
    answers = []
    for way, draft_model in (("off", None), ("auto", str(pair.assistant))):
        engine = engine_of(pair.oracle.folder, speculation=way, draft_model=draft_model, enable_lora=True, max_loras=11)
        engine.adapter_store.load("x", tmp_path)
        if draft_model is not None:
            record_steps(engine, 2)
        answers.append({name: tokens(outputs) for name, outputs in run(engine, requests).items()})
    assert all(len(answer) == 20 for answer in answers[0].values())
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "settings", [{}, {"quantize": "int8"}, {"kernels": "torch"}, {"kv_cache_dtype": "int8"}], ids=str
)
def test_right_drafts_save_steps(counting: tuple[Path, Path], settings: dict[str, Any]) -> None:
    target, assistant = counting
    engine = engine_of(target, speculation="auto", draft_model=str(assistant), **settings)
    outputs = run(engine, [greedy("a", Prompt([50, 9, 30]), 60)])["a"]
    assert tokens(outputs) == [*range(31, 91)]
    assert outputs[-1].accepted_drafts > 40
    assert len(outputs) < 20


@pytest.mark.parametrize("kind", ["counting", "random"])
def test_answers_are_those_without_drafts(counting: tuple[Path, Path], pair: Pair, kind: str) -> None:
    folder, assistant = counting if kind == "counting" else (pair.oracle.folder, pair.assistant)
    plain = engine_of(folder, speculation="off")
    drafting_engine = engine_of(folder, speculation="auto", draft_model=str(assistant))
    record_steps(drafting_engine, 4)
    params: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    requests = [*mixed(), request_of("cut", Grammar.json(PERSON), 3, max_tokens=25)]
    requests += [request_of(f"seeded {seed}", None, seed, temperature=0.7, **params) for seed in range(4)]
    requests += [request_of("penalized", None, 1, repetition_penalty=1.3, no_repeat_ngram_size=2, **params)]
    expected, actual = run(plain, requests), run(drafting_engine, requests)
    for name, outputs in expected.items():
        assert whole(actual[name]) == whole(outputs)
    assert drafting_engine.stats().drafted_tokens > 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone_hidden_size": 40}, "drafts for a model of width 40"),
        ({"model_type": "gemma4_text"}, "does not draft for another model"),
        ({"text_config": {"head_dim": 16}}, "keys and values of other shapes"),
        ({"text_config": {"vocab_size": 300}}, "with 300 tokens"),
    ],
    ids=str,
)
def test_unfit_assistants_are_rejected(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "target").mkdir()
    target = make(tmp_path / "target", "gemma4")
    changes = dict(changes)
    assistant = make_assistant(tmp_path / "assistant", target, **changes.pop("text_config", {}))
    change_config(assistant, **changes)
    with pytest.raises(ModelLoadError, match=f"--draft-model {assistant}: .*{message}"):
        engine_of(target, speculation="auto", draft_model=str(assistant))


def test_other_models_have_no_layer_for_it(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    target = make(tmp_path / "target", "gemma4")
    (tmp_path / "llama").mkdir()
    llama = make_llama(tmp_path / "llama")
    assistant = make_assistant(tmp_path / "assistant", target)
    with pytest.raises(ModelLoadError, match="take the assistant of the same model"):
        engine_of(llama, speculation="auto", draft_model=str(assistant))


def test_assistants_alone_are_rejected(pair: Pair) -> None:
    with pytest.raises(ModelLoadError, match="--draft-model"):
        engine_of(pair.assistant)


def test_gguf_assistants_are_rejected(pair: Pair, tmp_path: Path) -> None:
    file = write_gguf(make_llama(tmp_path), tmp_path / "model.gguf")
    with pytest.raises(ModelLoadError, match="not from GGUF files"):
        engine_of(pair.oracle.folder, speculation="auto", draft_model=str(file))


def test_models_without_drafts_load_none(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine = engine_of(pair.oracle.folder, speculation="off", draft_model=str(pair.assistant))
    assert engine.runner.model.assistant is None
    assert "--draft-model is not used" in caplog.text


def test_draft_costs_at_least_its_share(pair: Pair) -> None:
    model = engine_of(pair.oracle.folder, speculation="auto", draft_model=str(pair.assistant)).runner.model
    assert model.assistant is not None
    share = share_of_layer(model)
    assert share == model.assistant.read_bytes / model.weight_bytes > 0
    clusters = json.loads((pair.assistant / "config.json").read_text())["use_ordered_embeddings"]
    assert (model.assistant.read_bytes < model.assistant.weight_bytes) == clusters
    assert layer_costs([1.0, 1.0, 0.5], share).draft == pytest.approx(share)
    costs = layer_costs([1.0, 1.0, 1.0 + 9 * PREDICTED], share)
    assert costs.draft == pytest.approx(9.0)
    assert costs.rows.seconds(300) == 0


@pytest.mark.parametrize(
    ("measured", "drafts"), [([1.0, 1.0, 1.1], 2), ([1.0, 1.1, 1.2, 3.0, 3.1], 0)], ids=["assistant", "MTP"]
)
def test_assistants_need_no_rows_before_drafts(measured: list[float], drafts: int) -> None:
    use = LayerUse()
    use.begin(has_context=layer_costs(measured, 0.0).has_context)
    assert use.count(2, may_draft=True) == drafts
