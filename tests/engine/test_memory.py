"""A step that takes more memory than there is ends what caused it, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from tests.checkpoints import make_llama
from tests.engine.kinds import by_kernels, with_kernels
from tests.engine.test_overlap import answers, request
from tests.engine.test_parity import Oracle, engine_for, llava  # noqa: F401
from tests.engine.test_structured import engine_of, run
from tests.scheduler.made_up import FixedLimits
from tests.static_device import StaticDraw
from vlmserve.engine.engine import Engine
from vlmserve.runner.batch import Batch, BatchBuilder
from vlmserve.runner.encoder import ImageEncoder
from vlmserve.runner.requests import ScheduledRequest
from vlmserve.runner.runner import ModelRunner
from vlmserve.runner.sampling import TokenSampler
from vlmserve.types import EngineOutput, EngineRequest, ImageInput, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


def limited(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Steps of more tokens run out of memory."""
    hidden = ModelRunner.hidden_states

    def checked(self: ModelRunner, batch: Any, *wanted: Any) -> torch.Tensor:
        if len(batch.token_ids) > most:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return hidden(self, batch, *wanted)

    monkeypatch.setattr(ModelRunner, "hidden_states", checked)


def collect(engine: Engine, outputs: dict[str, list[EngineOutput]]) -> None:
    """One step."""
    for output in engine.step():
        outputs[output.request_id].append(output)


@with_kernels("native", "static")
def test_a_long_prompt_fails_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = [request("a"), request("bb", 9)], request("ccc", 100)
    expected = answers(run(engine_of(folder), short))
    engine = engine_of(folder)
    limited(monkeypatch, 40)
    outputs: dict[str, list[EngineOutput]] = {"a": [], "bb": [], "ccc": []}
    for one in (*short, long):
        engine.add(one)
        collect(engine, outputs)
    assert not outputs["a"][-1].finish_reason, "it decodes beside the prompt"
    while engine.has_work():
        collect(engine, outputs)
    found = answers(outputs)
    assert {name: found[name] for name in expected} == expected
    assert "too little memory" in found["ccc"][3]
    assert engine.stats().kv_blocks_used == 0


@with_kernels("native", "static")
def test_prompts_that_failed_leave_no_cached_blocks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = request("a", 64)
    expected = answers(run(engine_of(folder), [one]))
    engine = engine_of(folder)
    with monkeypatch.context() as patch:
        limited(patch, 8)
        assert "too little memory" in answers(run(engine, [one]))["a"][3]
    assert answers(run(engine, [one])) == expected
    assert engine.stats().prefix_cached_tokens == 0


@with_kernels("native", "static")
def test_the_newest_of_many_decodes_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request("x" * (1 + number), 5) for number in range(4)]
    expected = answers(run(engine_of(folder), requests))
    engine = engine_of(folder)
    hidden = ModelRunner.hidden_states

    def checked(self: ModelRunner, batch: Any, *wanted: Any) -> torch.Tensor:
        if batch.metadata.num_decodes and len(batch.sampled_rows) == 4:
            raise torch.OutOfMemoryError("four decodes")
        return hidden(self, batch, *wanted)

    monkeypatch.setattr(ModelRunner, "hidden_states", checked)
    found = answers(run(engine, requests))
    assert "too little memory" in found["xxxx"][3]
    assert {name: found[name] for name in ("x", "xx", "xxx")} == {name: expected[name] for name in ("x", "xx", "xxx")}


@with_kernels("native", "static")
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("Triton Error [CUDA]: out of memory")], ids=repr)
def test_a_batch_without_memory_fails_alone(folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Memory for its uploads, before any layer runs."""
    build = BatchBuilder.build

    def checked(self: BatchBuilder, scheduled: Sequence[ScheduledRequest], *rest: Any) -> Batch:
        if sum(one.num_tokens for one in scheduled) > 40:
            raise error
        return build(self, scheduled, *rest)

    monkeypatch.setattr(BatchBuilder, "build", checked)
    engine = engine_of(folder, step_seconds=math.inf)
    found = answers(run(engine, [request("a"), request("bb", 9), request("ccc", 100)]))
    assert "too little memory" in found["ccc"][3]
    assert not found["a"][3]
    assert not found["bb"][3]


@by_kernels("sampler", native=[((TokenSampler, "sample"),)], static=[((StaticDraw, "launch"),)])
def test_sampling_without_memory_ends_sampled_requests(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sampler: tuple[type, str]
) -> None:
    """A prompt whose chunks need no token goes on."""
    long = request("long", 200, temperature=0)
    expected = answers(run(engine_of(folder), [long]))
    engine = engine_of(folder, max_num_batched_tokens=24, step_seconds=math.inf)
    outputs: dict[str, list[EngineOutput]] = {"short": [], "long": [], "later": []}
    engine.add(request("short", max_tokens=100))
    while not outputs["short"]:
        collect(engine, outputs)
    engine.add(long)
    with monkeypatch.context() as patch:
        patch.setattr(*sampler, out_of_memory)
        while not outputs["short"][-1].finish_reason:
            collect(engine, outputs)
    assert "too little memory" in str(outputs["short"][-1].error)
    engine.add(request("later"))
    while engine.has_work():
        collect(engine, outputs)
    found = answers(outputs)
    assert found["long"] == expected["long"]
    assert not found["later"][3]
    assert engine.stats().kv_blocks_used == 0


def out_of_memory(*arguments: Any) -> NoReturn:
    raise torch.AcceleratorError("CUDA error: out of memory")


@with_kernels("native", "static")
def test_log_probabilities_without_memory_fail_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, scored = request("a"), request("bb", prompt_logprobs=1)
    expected = answers(run(engine_of(folder), [plain]))
    monkeypatch.setattr("vlmserve.runner.prompt_logprobs.token_logprobs", out_of_memory)
    found = answers(run(engine_of(folder), [plain, scored]))
    assert "too little memory" in found["bb"][3]
    assert found["a"] == expected["a"]


@by_kernels("in_steps", native=[False, True], static=[False, True])
def test_an_image_that_is_too_large_fails_alone(
    llava: Oracle,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    in_steps: bool,
) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    requests = [EngineRequest(str(seed), llava.prompt(seed, 4, "image", 3), greedy) for seed in range(3)]
    expected = answers(run(engine_for(llava), requests))
    engine = engine_for(llava)
    outputs: dict[str, list[EngineOutput]] = {"decoding": [], "0": [], "1": [], "2": []}
    if in_steps:
        engine.scheduler.limits = FixedLimits(1000.0)
        decoding = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        engine.add(EngineRequest("decoding", llava.prompt(9, 5), decoding))
        collect(engine, outputs)
    large, pixels = requests[1].prompt.images[0].image.key, ImageEncoder.upload

    def checked(self: ImageEncoder, image: ImageInput) -> torch.Tensor:
        if image.key == large:
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        return pixels(self, image)

    with monkeypatch.context() as patch:
        patch.setattr(ImageEncoder, "upload", checked)
        for one in requests:
            engine.add(one)
        while engine.has_work():
            collect(engine, outputs)
    found = answers({name: parts for name, parts in outputs.items() if parts})
    assert "too little memory" in found["1"][3]
    assert {name: found[name] for name in ("0", "2")} == {name: expected[name] for name in ("0", "2")}
    # Once there is enough memory, nothing is left of what was missing.
    assert answers(run(engine, requests)) == expected
