"""Steps of decodes with adapters by the data flow of a GPU: captured once, then repeated with other adapters, in other
rows. See `tests.static_device`."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters.test_parity import answers
from tests.checkpoints import make_llama
from tests.engine.test_parity import Oracle, engine_for, text_oracle
from tests.peft_adapters import make_adapter, make_xlora
from tests.static_device import StaticDevice, kernels, static_devices  # noqa: F401
from vlmserve.engine.engine import Engine
from vlmserve.types import Prompt

ALL = "all-linear"
STRONG = {"lora_alpha": 100}
"""So that each answers in its own way."""
CASES = {
    "plain": {"target_modules": ALL, **STRONG},
    "DoRA": {"target_modules": ALL, "use_dora": True, **STRONG},
    "a bias": {"target_modules": ["v_proj", "gate_proj"], "lora_bias": True, "use_rslora": True, **STRONG},
    "embeddings": {"target_modules": ["embed_tokens", "lm_head", "q_proj"], **STRONG},
    "whole modules": {"target_modules": ["q_proj"], "modules_to_save": ["k_proj"], **STRONG},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Oracle]]:
    """A folder with adapters, and PEFT's opinions by name; the model's own is that of no name."""
    folder = tmp_path_factory.mktemp("served")
    base = text_oracle(make_llama(folder / "model"))
    oracles = {"": base}
    for seed, (name, config) in enumerate(CASES.items()):
        oracles[name] = replace(base, model=make_adapter(base.model, folder / name, seed=seed, **config), answers={})
    mixed = [{"target_modules": ["q_proj", "down_proj"], **STRONG}, {"target_modules": ALL, "r": 3, **STRONG}]
    settings = {"xlora_depth": 1, "scaling_pass_value": 0.4}
    oracles["X-LoRA"] = replace(
        base, model=make_xlora(base.model, folder / "X-LoRA", mixed, seed=9, **settings), answers={}
    )
    return folder, oracles


def engine_of(served: tuple[Path, dict[str, Oracle]], names: list[str], **settings: int) -> Engine:
    folder, oracles = served
    engine = engine_for(oracles[""], enable_lora=True, **{"max_loras": 4, **settings})
    for name in names:
        engine.adapter_store.load(name, folder / name)
    return engine


def check(
    engine: Engine, oracles: dict[str, Oracle], names: list[str], *, served: str | None = None, length: int = 20
) -> None:
    """Requests of those adapters at once. served: as what they are served; None: by these names. length: of prompts."""
    requests = [(name, oracles[""].prompt(number, length)) for number, name in enumerate(names)]
    served_as = [(name if served is None else served, prompt) for name, prompt in requests]
    found = answers(engine, served_as, max_tokens=12)
    for (name, prompt), answer in zip(requests, found, strict=True):
        # The weights of X-LoRA depend on all tokens of a pass, so its answers are found token by token.
        assert answer == oracles[name].greedy(prompt, 12, guess=() if name == "X-LoRA" else answer)
        for other in {*names} - {name}:
            assert differs(oracles[other], other, prompt, answer), "they can be told apart"


def differs(oracle: Oracle, name: str, prompt: Prompt, answer: list[int]) -> bool:
    if name == "X-LoRA" or (prompt, len(answer)) in oracle.answers:
        return oracle.greedy(prompt, len(answer)) != answer
    return oracle.forward(prompt, answer[:-1]).argmax(-1).tolist() != answer


def captured(devices: list[StaticDevice]) -> int:
    return sum(executor.num_captured for device in devices for executor in device.executors)


def test_rows_of_captured_steps_have_their_adapters(
    served: tuple[Path, dict[str, Oracle]],
    static_devices: list[StaticDevice],  # noqa: F811
) -> None:
    engine = engine_of(served, ["plain", "DoRA", "a bias", "embeddings"], enable_prefix_caching=False)
    check(engine, served[1], ["plain", "DoRA", "a bias", "embeddings", ""])
    assert captured(static_devices)
    check(engine, served[1], ["", "embeddings", "embeddings", "plain", "a bias"])
    before = captured(static_devices)
    check(engine, served[1], ["DoRA", "DoRA", "DoRA", "", ""])
    check(engine, served[1], ["plain", "embeddings", "", "a bias", "plain"])
    assert captured(static_devices) == before, "the same graphs, whoever has which row"


def test_old_graphs_find_new_adapters(
    served: tuple[Path, dict[str, Oracle]],
    static_devices: list[StaticDevice],  # noqa: F811
    tmp_path: Path,
) -> None:
    folder, oracles = served
    engine = engine_of(served, [], max_loras=1)
    graphs = []
    for name in ("plain", "DoRA", "plain", "DoRA"):
        shutil.copytree(folder / name, tmp_path / "loaded", dirs_exist_ok=True)
        engine.adapter_store.load("loaded", tmp_path / "loaded")
        check(engine, oracles, [name], served="loaded")
        graphs.append(captured(static_devices))
        engine.unload_adapter("loaded")
    # The second time that it comes, a prompt is captured, too.
    assert graphs[1:] == graphs[1:2] * 3, "their ranks are the same"


def test_later_adapters_repeat_graphs_of_the_start(
    served: tuple[Path, dict[str, Oracle]],
    static_devices: list[StaticDevice],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StaticDevice, "warms_up", True)
    monkeypatch.setattr(StaticDevice, "captures_repeats", False)
    monkeypatch.setattr("vlmserve.runner.warm_up.PROMPT_ROWS", (8,))
    # The test's attention has a graph for each width of block tables.
    engine = engine_of(served, ["plain"], max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, block_size=64)
    at_start = static_devices[-1].executors[-1].num_captured
    assert at_start == 2 * 2 * len((1, 2, 4)), "with split contexts and without, with adapters and without"
    check(engine, served[1], ["plain", "", "plain"])
    for name in ("DoRA", "a bias"):
        engine.adapter_store.load(name, served[0] / name)
    check(engine, served[1], ["a bias", "DoRA", "plain", ""])
    assert static_devices[-1].executors[-1].num_captured == at_start


def test_mixed_adapter_steps_are_captured(
    served: tuple[Path, dict[str, Oracle]],
    static_devices: list[StaticDevice],  # noqa: F811
) -> None:
    engine = engine_of(served, ["X-LoRA", "plain"])
    before = captured(static_devices)
    check(engine, served[1], ["X-LoRA"])
    assert captured(static_devices) == before + 2
    check(engine, served[1], ["plain", "X-LoRA", ""])


def test_the_last_layer_computes_sampled_rows(
    served: tuple[Path, dict[str, Oracle]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that are not captured."""
    monkeypatch.setattr("vlmserve.devices.graphs.MOST_CHUNK_ROWS", 128)
    engine = engine_of(served, ["plain", "X-LoRA"])
    rows: list[int] = []
    layer = engine.runner.model.language_model.layers[-1]
    hook = layer.mlp.register_forward_pre_hook(lambda _, arguments: rows.append(len(arguments[0])))
    check(engine, served[1], ["plain", "", "X-LoRA"], length=60)
    hook.remove()
    assert rows[:2] == [64, 3], "all of a padded scaling pass, and three of 180"


def test_weights_that_are_replaced_are_not_captured(
    served: tuple[Path, dict[str, Oracle]],
    static_devices: list[StaticDevice],  # noqa: F811
) -> None:
    check(engine_of(served, ["plain"]), served[1], ["plain"])
    engine = engine_of(served, ["whole modules"])
    before = captured(static_devices)
    assert before > 0
    check(engine, served[1], ["whole modules"])
    check(engine, served[1], ["whole modules", ""])
    assert captured(static_devices) == before
