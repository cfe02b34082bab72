"""Images that are encoded over several steps: the same tokens whatever the budget; those given up leave nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.blip import BlipOracle
from tests.checkpoints import make_llava_next
from tests.engine.kinds import by_kernels
from tests.engine.test_parity import MIXED, NEW_TOKENS, Oracle, engine_for, generate, llava_oracle, tight_cache
from tests.moondream import Moondream
from tests.scheduler.made_up import FixedLimits
from vlmserve.devices.cpu import CpuDevice
from vlmserve.engine.engine import Engine
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.scheduler.step_limits import MeasuredLimits
from vlmserve.settings.config import MediaConfig
from vlmserve.types import EngineRequest, Prompt, SamplingParams

pytestmark = pytest.mark.usefixtures("native_kernels")


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return llava_oracle(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def prompts(llava: Oracle) -> list[Prompt]:
    return [llava.prompt(seed, *parts) for seed, parts in enumerate(MIXED)]


@pytest.fixture(scope="module")
def expected(llava: Oracle, prompts: list[Prompt]) -> list[list[int]]:
    return [llava.greedy(prompt) for prompt in prompts]


@pytest.fixture(autouse=True)
def small_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "stage_products", 5000)
    monkeypatch.setattr(CpuDevice, "stage_rows", 1)


def bounded(engine: Engine, budget: float) -> Engine:
    engine.scheduler.limits = FixedLimits(budget)
    return engine


def answers(engine: Engine, prompts: list[Prompt]) -> tuple[list[list[int]], int]:
    """One request generates before the others come. Also how many steps did nothing but encode parts of images."""
    engine.add(EngineRequest("text", Prompt([5, 6, 7]), SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)))
    engine.step()
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    tokens: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    for number, prompt in enumerate(prompts):
        engine.add(EngineRequest(str(number), prompt, params))
    partial = 0
    submit = engine.runner.submit

    def counted(step):
        nonlocal partial
        partial += any(one.products is not None for one in step.encodings)
        return submit(step)

    engine.runner.submit = counted
    running = set(tokens)
    while running:
        for output in engine.step():
            assert output.error is None
            tokens.get(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                running.discard(output.request_id)
    engine.abort(["text"])
    return list(tokens.values()), partial


def assert_nothing_is_left(engine: Engine, prompt: Prompt | None = None) -> None:
    while engine.has_work():
        engine.step()
    # What was given up is dropped with the next step that runs.
    generate(engine, [prompt or Prompt([5, 6])])
    images = engine.runner.images
    assert images.unfinished == {}
    stats = engine.stats()
    assert sum(one.nbytes for one in images.embeddings.values()) == stats.encoder_cache_used_bytes
    assert stats.encoder_cache_pinned == 0


@pytest.mark.parametrize("budget", [20_000, 90_000, 1_000_000])
def test_tokens_are_those_of_transformers_whatever_the_budget(llava, prompts, expected, budget):
    """An image takes 450,000 multiplications."""
    engine = bounded(engine_for(llava, enable_prefix_caching=False), budget)
    got, partial = answers(engine, prompts)
    assert got == expected
    assert partial > 1
    assert_nothing_is_left(engine)


@pytest.mark.usefixtures("native_kernels")
def test_preempted_requests_give_transformers_tokens(llava, prompts, expected):
    engine = bounded(tight_cache(llava, prompts), 100_000)
    assert generate(engine, prompts) == expected
    assert engine.stats().preemptions > 0
    assert_nothing_is_left(engine)


def test_a_tiny_encoder_cache_gives_the_same_tokens(llava, prompts, expected):
    hidden = llava.model.config.text_config.hidden_size
    engine = bounded(engine_for(llava, encoder_cache_memory=llava.image_tokens * hidden * 4), 100_000)
    assert answers(engine, prompts)[0] == expected
    assert_nothing_is_left(engine)


def test_images_of_requests_that_leave_are_given_up(llava, prompts, expected):
    engine = bounded(engine_for(llava, enable_prefix_caching=False), 50_000)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    engine.add(EngineRequest("text", Prompt([5, 6, 7]), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)))
    engine.step()
    for steps in range(1, 10):
        engine.add(EngineRequest("leaves", prompts[0], params))
        for _ in range(steps):
            engine.step()
        engine.abort(["leaves"])
    engine.add(EngineRequest("stays", prompts[0], params))
    tokens: list[int] = []
    while engine.has_work():
        for output in engine.step():
            tokens += output.token_ids if output.request_id == "stays" else []
    assert tokens == expected[0]
    assert_nothing_is_left(engine)


def test_stats_tell_how_long_images_still_take(llava, prompts):
    engine = engine_for(llava, enable_prefix_caching=False)
    assert isinstance(engine.scheduler.limits, MeasuredLimits)
    engine.scheduler.limits.seconds_per_mac = 1e-4
    bounded(engine, 50_000)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    engine.add(EngineRequest("text", Prompt([5, 6, 7]), params))
    engine.step()
    engine.add(EngineRequest("image", prompts[0], params))
    left = []
    for _ in range(2):
        engine.step()
        stats = engine.stats()
        left.append(stats.image_seconds_left)
        assert stats.images_in_progress == 1
    assert left[0] - left[1] == pytest.approx(50_000 * 1e-4)
    engine.abort(["image"])
    engine.step()
    assert (engine.stats().images_in_progress, engine.stats().image_seconds_left) == (0, 0)


@by_kernels("kind", native=["caption", "question"], torch=["question"])
def test_blips_tokens_are_those_of_transformers(tmp_path: Path, kind: str):
    oracle = BlipOracle.make(tmp_path, kind)
    prompts = [oracle.prompt(*asked) for asked in [(0, 5, 0), (1, 1, 1), (2, 17, 2), (0, 9, 3)]]
    engine = bounded(engine_for(oracle), 30_000)
    assert two_at_a_time(engine, prompts) == [oracle.greedy(prompt) for prompt in prompts]
    assert_nothing_is_left(engine, prompts[0])


def test_prefix_spans_wait_for_all_of_their_image(tmp_path: Path):
    moondream = Moondream.make(tmp_path)
    prompts = [moondream.prompt(seed, 4 + seed) for seed in range(3)]
    engine = bounded(engine_for(moondream), 100_000)
    expected = [moondream.greedy(seed, prompt) for seed, prompt in enumerate(prompts)]
    assert two_at_a_time(engine, prompts) == expected
    assert_nothing_is_left(engine)


def two_at_a_time(engine: Engine, prompts: list[Prompt]) -> list[list[int]]:
    """One generates while the next one's image is encoded."""
    results: list[list[int]] = []
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    while len(results) < len(prompts) or engine.has_work():
        if len(results) < len(prompts) and len(engine.scheduler) < 2:
            engine.add(EngineRequest(str(len(results)), prompts[len(results)], params))
            results.append([])
        for output in engine.step():
            assert output.error is None
            results[int(output.request_id)] += output.token_ids
    return results


def test_tiles_of_an_image_take_several_steps(tmp_path: Path):
    preparer = RequestPreparer(make_llava_next(tmp_path), MediaConfig())
    content = [{"type": "image", "image": Image.effect_noise((90, 50), 80)}, {"type": "text", "text": "what?"}]
    prompt = preparer.chat([{"role": "user", "content": content}], allow_local=True)
    assert len(prompt.images[0].image.pixels) > 2
    oracle = Oracle(tmp_path, torch.nn.Identity(), None, (), 0, 0)
    whole = generate(engine_for(oracle), [prompt])
    engine = bounded(engine_for(oracle), 200_000)
    got, partial = answers(engine, [prompt])
    assert got == whole
    assert partial > 5
    assert_nothing_is_left(engine)
