"""Vectors and scores against transformers' hidden states and logits, in float32: alone, batched, chunked, cached."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import vlmserve.engine.ranks
from tests.engine.kinds import by_kernels
from tests.engine.test_parity import Oracle, engine_for, generate, llava_oracle, tight_cache
from tests.normalized import normalized
from tests.ranks import RankThreads
from vlmserve.engine.engine import Engine
from vlmserve.tasks import Embed, Prefill, Score, Task
from vlmserve.types import EngineOutput, EngineRequest, Prompt, SamplingParams

pytestmark = pytest.mark.usefixtures("native_kernels")

PARTS = [(5, "image", 9), ("image", 3), (4,), ("image", 2, "image", 1), (33,), (1,), (17,), (2, "image", 40)]
TASKS: list[Task] = [
    Embed(),
    Embed("mean"),
    Embed("cls"),
    Embed("mean", normalize=False),
    Embed(dimensions=5),
    Score(((7,), (3,))),
    Embed("all", dimensions=7),
]


@pytest.fixture(scope="module")
def llava(tmp_path_factory) -> Oracle:
    return llava_oracle(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def prompts(llava) -> list[Prompt]:
    return [llava.prompt(seed, *parts) for seed, parts in enumerate(PARTS)]


@pytest.fixture(scope="module")
def expected(llava, prompts) -> list[np.ndarray]:
    """What transformers has for each prompt with each task, prompt by prompt."""
    return [_expected(llava, prompt, task) for prompt in prompts for task in TASKS]


@torch.inference_mode()
def _expected(oracle: Oracle, prompt: Prompt, task: Task) -> np.ndarray:
    if isinstance(task, Score):
        return oracle.forward(prompt, [])[0].log_softmax(-1)[[tokens[0] for tokens in task.continuations]].numpy()
    inputs = {"input_ids": torch.tensor([prompt.token_ids])}
    if prompt.images:
        inputs["pixel_values"] = torch.from_numpy(np.concatenate([normalized(span.image) for span in prompt.images]))
    states = oracle.model.model(**inputs).last_hidden_state[0].double()
    pooled = {"last": states[-1:], "mean": states.mean(0, keepdim=True), "cls": states[:1], "all": states}
    vectors = pooled[task.pooling][:, : task.dimensions]
    return (vectors / vectors.norm(dim=1, keepdim=True) if task.normalize else vectors).float().flatten().numpy()


def run(
    engine: Engine, prompts: list[Prompt], tasks: list[Task], *, beside: Sequence[Prompt] = ()
) -> list[EngineOutput]:
    """One output for each prompt with each task. beside: prompts that are answered meanwhile."""
    for number, prompt in enumerate(beside):
        engine.add(
            EngineRequest(f"answer {number}", prompt, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
        )
    pairs = [(prompt, task) for prompt in prompts for task in tasks]
    for number, (prompt, task) in enumerate(pairs):
        engine.add(EngineRequest(str(number), prompt, task=task))
    outputs: dict[str, EngineOutput] = {}
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            if output.result is not None:
                assert (output.finish_reason, output.token_ids) == ("stop", [])
                outputs[output.request_id] = output
    assert engine.stats().kv_blocks_used == 0
    return [outputs[str(number)] for number in range(len(pairs))]


def values(outputs: list[EngineOutput]) -> list[np.ndarray]:
    return [np.frombuffer(output.result.data, "<f4") for output in outputs]


def assert_close(outputs: list[EngineOutput], expected: list[np.ndarray]) -> None:
    for ours, theirs in zip(values(outputs), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


SETTINGS = [{}, {"max_num_batched_tokens": 7}, {"block_size": 5, "max_num_batched_tokens": 50, "max_num_seqs": 3}]


@by_kernels("settings", native=SETTINGS, torch=SETTINGS[1:2], static=SETTINGS[1:])
def test_vectors_equal_transformers_in_any_chunks(llava, prompts, expected, settings):
    engine = engine_for(llava, **settings)
    assert_close(run(engine, prompts, TASKS, beside=prompts[:3]), expected)


def test_each_prompt_alone_has_the_same_vector(llava, prompts, expected):
    engine = engine_for(llava)
    for number, prompt in enumerate(prompts):
        assert_close(run(engine, [prompt], TASKS[:2]), expected[number * len(TASKS) :][:2])


def test_preempted_prompts_have_the_same_vectors(llava, prompts, expected):
    engine = tight_cache(llava, prompts, max_num_batched_tokens=20)
    assert_close(run(engine, prompts, TASKS, beside=prompts), expected)
    assert engine.stats().preemptions > 0


def test_vectors_share_caches_with_answers(llava, prompts, expected):
    engine = engine_for(llava)
    generate(engine, prompts[:1], max_tokens=2)
    outputs = run(engine, prompts[:1], TASKS)
    assert_close(outputs, expected[: len(TASKS)])
    assert [output.images_encoded for output in outputs] == [0] * len(TASKS)
    found = [output.cached_tokens > 0 for output in outputs]
    assert found == [True, False, False, False, True, True, False], "others need the states of all tokens"
    generate(engine, prompts[3:4], max_tokens=2)
    assert engine.stats().encoder_hits > 0


def test_vectors_take_no_decode_steps(llava, prompts):
    engine = engine_for(llava)
    run(engine, [prompt for prompt in prompts if not prompt.images], TASKS[:1])
    assert (engine.stats().steps, engine.stats().generation_tokens) == (1, 0)


def test_two_ranks_give_the_same_vectors(llava, prompts, expected, monkeypatch):
    monkeypatch.setattr(vlmserve.engine.ranks, "RankProcesses", RankThreads)
    engine = engine_for(llava, max_num_batched_tokens=30, tensor_parallel_size=2)
    assert_close(run(engine, prompts, TASKS, beside=prompts[:2]), expected)


def test_prefilled_prompts_are_found_cached(llava, prompts):
    engine = engine_for(llava, max_num_batched_tokens=7)
    [prefilled] = run(engine, prompts[:1], [Prefill()])
    assert prefilled.result.data == b""
    [output] = run(engine, prompts[:1], [Embed()])
    assert output.cached_tokens > 0


@pytest.mark.parametrize("task", [Embed("last"), Score(((1,),))])
def test_broken_states_fail_only_their_request(tmp_path: Path, task):
    oracle = llava_oracle(tmp_path)
    engine = engine_for(oracle)
    engine.runner.model.language_model.embed_tokens.weight.data[5] = torch.nan
    engine.add(EngineRequest("broken", Prompt([5, 6]), task=task))
    engine.add(EngineRequest("whole", Prompt([7, 6]), task=task))
    outputs = {output.request_id: output for output in engine.step()}
    assert "not a number" in (outputs["broken"].error or "")
    assert outputs["whole"].result is not None
