"""Captured steps of the data flow of a GPU against transformers: see `tests.static_device`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest
from torch import Tensor

from tests.checkpoints import make_llama
from tests.engine.test_parity import Oracle, engine_for, generate, text_oracle
from tests.models.test_families import make
from tests.static_device import StaticDevice, kernels, static_devices  # noqa: F401
from vlmserve.devices import graphs
from vlmserve.kernels.attention import LayerCache
from vlmserve.layers.step import StepContext
from vlmserve.types import EngineRequest, Prompt, SamplingParams


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return text_oracle(make_llama(tmp_path_factory.mktemp("llama")))


def test_short_prompts_are_captured(
    llama: Oracle,
    static_devices: list[StaticDevice],  # noqa: F811
) -> None:
    engine = engine_for(llama, block_size=8)
    common = llama.prompt(0, [40])
    ends = [llama.prompt(seed, [length]) for seed, length in enumerate((9, 16, 12, 10, 15), 1)]
    for end in ends:
        for prompt in (end, Prompt(common.token_ids + end.token_ids)):
            assert generate(engine, [prompt], max_tokens=1) == [llama.greedy(prompt, 1)]
    # One graph for short prompts, whose tables are two blocks wide, and one for ends of long ones.
    assert static_devices[-1].executors[0].num_captured == 2


def test_enforce_eager_captures_nothing(
    llama: Oracle,
    static_devices: list[StaticDevice],  # noqa: F811
) -> None:
    engine, prompt = engine_for(llama, enforce_eager=True), llama.prompt(0, [12])
    for _ in range(3):
        assert generate(engine, [prompt]) == [llama.greedy(prompt)]
    assert static_devices[-1].executors[0].num_captured == 0


def test_contexts_that_grow_while_steps_are_repeated(llama: Oracle) -> None:
    """From where kernels compute them in one part to where they split them."""
    engine = engine_for(llama)
    prompts = [llama.prompt(seed, [length]) for seed, length in enumerate((120, 124, 126, 40))]
    for some in (prompts, prompts[1:], prompts[:2]):
        assert generate(engine, some, max_tokens=14) == [llama.greedy(prompt, 14) for prompt in some]


def test_tables_of_columns_grow_while_steps_are_repeated(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Layers with a window have other block tables, whose places depend on the width of all tables."""
    oracle = text_oracle(make(tmp_path_factory.mktemp("gemma3"), "gemma3"))
    engine = engine_for(oracle, block_size=4)
    prompts = [oracle.prompt(seed, [length]) for seed, length in enumerate((30, 9))]
    for some in (prompts, prompts[1:]):
        assert generate(engine, some, max_tokens=9) == [oracle.greedy(prompt, 9) for prompt in some]


def test_decodes_beside_prompts_are_captured(
    llama: Oracle,
    static_devices: list[StaticDevice],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any number of them by one graph."""
    decodes: dict[Hashable, set[int]] = {}
    key_of = graphs.graph_key

    def noted(x: Tensor, caches: Sequence[LayerCache], step: StepContext) -> Hashable:
        key = key_of(x, caches, step)
        if step.metadata.decodes is not None:
            decodes.setdefault(key, set()).add(step.metadata.num_decodes)
        return key

    monkeypatch.setattr(graphs, "graph_key", noted)
    engine = engine_for(llama, block_size=64)
    prompts = [llama.prompt(seed, [length]) for seed, length in enumerate((25, 29, 30, 24, 27, 28, 26, 25, 23))]
    waiting = [
        EngineRequest(str(number), prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        for number, prompt in enumerate(prompts)
    ]
    answers: dict[str, list[int]] = {}
    while waiting or engine.has_work():
        # One prompt after the other comes while those before are answered.
        for request in waiting[:1]:
            engine.add(waiting.pop(0))
            answers[request.request_id] = []
        for output in engine.step():
            answers[output.request_id] += output.token_ids
    assert list(answers.values()) == [llama.greedy(prompt, 8) for prompt in prompts]
    assert None not in decodes
    assert max(map(len, decodes.values())) >= 2
    assert static_devices[-1].executors[0].num_captured >= 2
