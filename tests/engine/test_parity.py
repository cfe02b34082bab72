"""The engine against transformers, in float32: the same tokens alone, batched, chunked and preempted."""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlavaForConditionalGeneration, MistralConfig, MistralForCausalLM

from tests.checkpoints import make_llama, make_llava, make_text_model
from tests.engine.kinds import by_kernels, with_kernels
from tests.normalized import normalized
from vlmserve.devices import choice
from vlmserve.devices.cpu import open_cpu
from vlmserve.engine.engine import Engine
from vlmserve.kernels.choice import VARIABLE
from vlmserve.settings.config import EngineConfig
from vlmserve.tools.verify import record_logits
from vlmserve.types import EngineRequest, ImageInput, ImageSpan, Prompt, SamplingParams

pytestmark = pytest.mark.usefixtures("native_kernels")

NEW_TOKENS = 12


@dataclass
class Oracle:
    """A checkpoint and transformers' opinion of it."""

    folder: Path
    model: torch.nn.Module
    image_token: int | None
    image_shape: tuple[int, ...]
    image_tokens: int
    vocab_size: int
    answers: dict[tuple[Prompt, int], list[int]] = field(default_factory=dict)
    """What `greedy` has found, since many tests ask for the same."""

    def make_image(self, seed: int) -> ImageInput:
        pixels = np.random.default_rng(seed).standard_normal((1, *self.image_shape)).astype(np.float32)
        return ImageInput(hashlib.sha256(pixels.tobytes()).digest(), pixels, self.image_tokens)

    def prompt(self, seed: int, *parts: int | str) -> Prompt:
        """Numbers are that many random text tokens, "image" is a new random image."""
        random = np.random.default_rng(seed)
        token_ids: list[int] = []
        spans = []
        for part in parts:
            if part == "image":
                spans.append(ImageSpan(self.make_image(seed * 100 + len(spans)), len(token_ids)))
                token_ids += [self.image_token] * self.image_tokens
            else:
                token_ids += random.integers(3, self.vocab_size - 8, part).tolist()
        return Prompt(token_ids, tuple(spans))

    @torch.inference_mode()
    def forward(self, prompt: Prompt, answer: list[int]) -> torch.Tensor:
        """Logits after the prompt and after each token of the answer, ``[1 + len(answer), vocabulary]``."""
        inputs = {"input_ids": torch.tensor([prompt.token_ids + answer])}
        if prompt.images:
            pixels = np.concatenate([normalized(span.image) for span in prompt.images])
            inputs["pixel_values"] = torch.from_numpy(pixels)
        return self.model(**inputs).logits[0, len(prompt.token_ids) - 1 :]

    def greedy(self, prompt: Prompt, count: int = NEW_TOKENS, guess: Sequence[int] = ()) -> list[int]:
        """guess: an answer that need not be right. One pass over all of it tells, which is faster than to find it."""
        if (prompt, count) not in self.answers and len(guess) == count and not self.turns_by_length:
            likeliest = self.forward(prompt, list(guess[:-1])).argmax(-1).tolist()
            if likeliest == list(guess):
                self.answers[prompt, count] = likeliest
        if (prompt, count) not in self.answers:
            inputs = {"input_ids": torch.tensor([prompt.token_ids])}
            if prompt.images:
                pixels = np.concatenate([normalized(span.image) for span in prompt.images])
                inputs["pixel_values"] = torch.from_numpy(pixels)
            generated = self.model.generate(**inputs, max_new_tokens=count, do_sample=False)
            self.answers[prompt, count] = generated[0, len(prompt.token_ids) :].tolist()
        return list(self.answers[prompt, count])

    @property
    def turns_by_length(self) -> bool:
        """Whether positions of a prompt are turned otherwise where an answer has made it longer."""
        rope = getattr(self.model.config.get_text_config(), "rope_parameters", None) or {}
        return rope.get("rope_type") in ("dynamic", "longrope")


def llava_oracle(folder: Path) -> Oracle:
    make_llava(folder)
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    vision = model.config.vision_config
    tokens = (vision.image_size // vision.patch_size) ** 2
    shape = (3, vision.image_size, vision.image_size)
    return Oracle(folder, model, model.config.image_token_id, shape, tokens, model.config.text_config.vocab_size)


@pytest.fixture(scope="module")
def llava(tmp_path_factory) -> Oracle:
    return llava_oracle(tmp_path_factory.mktemp("llava"))


def text_oracle(folder: Path, file: Path | None = None) -> Oracle:
    """Of a language model; file: what the engine reads instead of the folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return Oracle(file or folder, model, None, (), 0, model.config.vocab_size)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Oracle:
    return text_oracle(make_llama(tmp_path_factory.mktemp("llama")))


def engine_for(oracle: Oracle, **settings) -> Engine:
    settings = {"kv_cache_memory": "64MiB", "dtype": "float32", "device": "cpu", "step_seconds": math.inf, **settings}
    settings = {"speculation": "off", **settings}  # so that each step adds one token to an answer
    return Engine(EngineConfig(model=str(oracle.folder), **settings), oracle.folder)


def tight_cache(oracle: Oracle, prompts: list[Prompt], **settings) -> Engine:
    """An engine whose cache holds the longest request and little more, in blocks of 4 tokens."""
    longest = max(len(prompt.token_ids) for prompt in prompts) + NEW_TOKENS
    return engine_for(oracle, kv_cache_memory=(longest // 4 + 8) * bytes_of_4(oracle.folder), block_size=4, **settings)


def bytes_of_4(folder: Path) -> int:
    """What a block of 4 tokens takes."""
    return _bytes_of_4(folder, os.environ.get(VARIABLE), choice.KINDS["cpu"] is open_cpu)


@functools.cache
def _bytes_of_4(folder: Path, kernels: str | None, on_cpu: bool) -> int:
    """kernels: those that the environment names, whose blocks differ; on_cpu: False for a static device."""
    config = EngineConfig(model=str(folder), kv_cache_memory="64MiB", dtype="float32", device="cpu", block_size=4)
    probe = Engine(config, folder)
    return probe.info.kv_cache_bytes // probe.stats().kv_blocks_total * probe.runner.num_columns


def generate(engine: Engine, prompts: list[Prompt], **params) -> list[list[int]]:
    params = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, **params}
    answers: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        engine.add(EngineRequest(str(number), prompt, SamplingParams(**params)))
        answers[str(number)] = []
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            answers[output.request_id] += output.token_ids
    assert engine.stats().kv_blocks_used == 0
    return list(answers.values())


def assert_answers(engine: Engine, prompts: list[Prompt], expected: list[list[int]]) -> None:
    """The answers are as expected alone, in a batch, and with what is cached."""
    assert [generate(engine, [prompt])[0] for prompt in prompts[:2]] == expected[:2]
    assert generate(engine, prompts) == expected
    assert generate(engine, prompts[::-1]) == expected[::-1]


def first_logits(engine: Engine, prompts: Sequence[Prompt]) -> torch.Tensor:
    """float32 ``[prompts, vocabulary]``, of the first token behind each prompt by itself."""
    with record_logits(engine.runner.model.language_model) as rows:
        for prompt in prompts:
            generate(engine, [prompt], max_tokens=1)
    return torch.cat(rows)


def assert_no_further(
    ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor, *, has_experts: bool = False
) -> None:
    """Rounding has moved ours about as far from the exact ones as theirs, which were rounded as coarsely.

    has_experts: rounding may choose other experts for a row, so compare the medians of rows.
    """
    our_errors, their_errors = ((rows - exact).square().mean(-1) for rows in (ours, theirs))
    if has_experts:
        assert our_errors.median() < 2 * their_errors.median()
    else:
        assert our_errors.mean() < 2 * their_errors.mean()


MIXED = [
    (5, "image", 9), ("image", 3), (7, "image"), (4,), ("image", 2, "image", 3, "image", 1), (33,), (1,),
    (16, "image", 16), (15,), (17,), ("image", "image", 5), (2, "image", 40), (64,), ("image", 1), (31, "image"), (8,),
]  # fmt: skip


def mixed_prompts(oracle: Oracle) -> list[Prompt]:
    return [oracle.prompt(seed, *parts) for seed, parts in enumerate(MIXED)]


@pytest.fixture(scope="module")
def expected(llava) -> list[list[int]]:
    prompts = mixed_prompts(llava)
    guesses = generate(engine_for(llava), prompts)
    return [llava.greedy(prompt, guess=guess) for prompt, guess in zip(prompts, guesses, strict=True)]


def test_random_checkpoints_give_answers_that_differ(expected):
    assert len({tuple(answer) for answer in expected}) > 12, "or these tests would prove little"


@by_kernels("count", native=[16], torch=[4])
def test_each_request_alone_gives_transformers_tokens(llava, expected, count):
    engine = engine_for(llava)
    assert [generate(engine, [prompt])[0] for prompt in mixed_prompts(llava)[:count]] == expected[:count]


ONE_BATCH = pytest.param({}, id="one batch")
CHUNKS = pytest.param({"max_num_batched_tokens": 7}, id="chunks of 7 tokens")
ODD_BLOCKS = pytest.param({"block_size": 5, "max_num_batched_tokens": 50}, id="blocks of five tokens")
SCHEDULES = [
    ONE_BATCH,
    CHUNKS,
    ODD_BLOCKS,
    pytest.param({"max_num_batched_tokens": 64, "max_num_seqs": 3}, id="three at a time"),
    pytest.param({"max_encoded_images": 1, "max_num_batched_tokens": 50}, id="one image a step"),
    pytest.param({"block_size": 1}, id="blocks of one token"),
]


@by_kernels("settings", native=SCHEDULES, torch=[ONE_BATCH, ODD_BLOCKS], static=[CHUNKS, ODD_BLOCKS])
def test_sixteen_mixed_requests_give_transformers_tokens(llava, expected, settings):
    assert generate(engine_for(llava, **settings), mixed_prompts(llava)) == expected


@by_kernels("budget", native=[100, 2048], torch=[100], static=[100])
def test_preempted_requests_give_transformers_tokens(llava, expected, budget):
    engine = tight_cache(llava, mixed_prompts(llava), max_num_batched_tokens=budget)
    assert generate(engine, mixed_prompts(llava)) == expected
    assert engine.stats().preemptions > 0


@with_kernels("native", "static")
def test_a_tiny_encoder_cache_gives_the_same_tokens(llava, expected):
    hidden = llava.model.config.text_config.hidden_size
    engine = engine_for(llava, encoder_cache_memory=llava.image_tokens * hidden * 4)
    assert generate(engine, mixed_prompts(llava)) == expected


@with_kernels("native", "static")
def test_requests_that_join_and_leave_change_nothing(llava, expected):
    engine = engine_for(llava, max_num_batched_tokens=40)
    prompts = mixed_prompts(llava)
    answers: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    waiting = list(enumerate(prompts))
    steps = 0
    while waiting or engine.has_work():
        if waiting:
            number, prompt = waiting.pop(0)
            engine.add(EngineRequest(str(number), prompt, params))
            engine.add(EngineRequest(f"aborted {number}", prompt, params))
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
        steps += 1
        engine.abort([f"aborted {steps - 3}"])
    assert [answers[str(number)] for number in range(len(prompts))] == expected
    assert engine.stats().kv_blocks_used == 0


@with_kernels("native", "torch", "static")
def test_logits_are_within_a_ten_thousandth(llava, monkeypatch):
    engine = engine_for(llava, max_num_batched_tokens=50)
    runner = engine.runner
    original = runner.logits_of
    seen: dict[str, list[torch.Tensor]] = {}
    update = runner.requests.update
    names: list[str] = []

    def recording_update(step):
        scheduled = update(step)
        names[:] = [one.state.request_id for one in scheduled if one.num_sampled]
        return scheduled

    def recording_logits(batch):
        logits = original(batch)
        for name, row in zip(names, logits, strict=True):
            seen.setdefault(name, []).append(row.clone())
        return logits

    monkeypatch.setattr(runner.requests, "update", recording_update)
    monkeypatch.setattr(runner, "logits_of", recording_logits)
    prompts = mixed_prompts(llava)
    answers = generate(engine, prompts)
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        expected = llava.forward(prompt, answer[:-1])
        torch.testing.assert_close(torch.stack(seen[str(number)]), expected, atol=1e-4, rtol=0)


@with_kernels("native", "static")
def test_a_text_model_gives_transformers_tokens(llama):
    prompts = [llama.prompt(seed, length) for seed, length in enumerate([1, 2, 15, 16, 17, 40, 3])]
    answers = generate(engine_for(llama), prompts)
    expected = [llama.greedy(prompt, guess=answer) for prompt, answer in zip(prompts, answers, strict=True)]
    assert answers == expected
    assert generate(engine_for(llama, max_num_batched_tokens=7), prompts) == expected


@by_kernels("count", native=[16], static=[6])
def test_seeded_sampling_is_the_same_batched(llava, count):
    prompts = mixed_prompts(llava)[:count]
    params = {"temperature": 0.9, "top_p": 0.95, "seed": 1234}
    by_itself = engine_for(llava, enable_prefix_caching=False)
    alone = [generate(by_itself, [prompt], **params)[0] for prompt in prompts]
    assert generate(engine_for(llava), prompts, **params) == alone
    tight = tight_cache(llava, prompts)
    assert generate(tight, prompts, **params) == alone
    assert tight.stats().preemptions > 0
    assert generate(engine_for(llava), prompts, **{**params, "seed": 1235}) != alone


def test_another_image_gives_another_answer(llava):
    one, other = llava.prompt(1, 3, "image", 5), llava.prompt(1, 3, "image", 5)
    other = Prompt(other.token_ids, (ImageSpan(llava.make_image(77), 3),))
    first, second = generate(engine_for(llava), [one, other])
    assert first == llava.greedy(one, guess=first)
    assert second == llava.greedy(other, guess=second)
    assert first != second


@by_kernels("budget, prefix_caching", native=[(7, True), (64, False), (2048, True)], static=[(64, True)])
def test_tokens_are_the_same_cold_and_warm(llava, expected, budget, prefix_caching):
    engine = engine_for(
        llava,
        max_num_batched_tokens=budget,
        enable_prefix_caching=prefix_caching,
        block_size=4,
        encoder_cache_memory="2KB",
    )
    prompts = mixed_prompts(llava)
    assert generate(engine, prompts) == expected
    assert generate(engine, prompts) == expected
    assert generate(engine, prompts[::-1]) == expected[::-1]
    assert (engine.stats().prefix_cached_tokens > 0) == prefix_caching


def test_prefix_hits_under_eviction_change_nothing(llava, expected):
    prompts = mixed_prompts(llava)
    engine = tight_cache(llava, prompts, max_num_batched_tokens=100)
    twice = [answer for answer in expected for _ in range(2)]
    for _ in range(2):
        assert generate(engine, [prompt for prompt in prompts for _ in range(2)]) == twice
    assert engine.stats().preemptions > 0
    assert engine.stats().prefix_cached_tokens > 0


@pytest.mark.usefixtures("saving_pays")
@by_kernels("budget", native=[7, 100], static=[100])
def test_swapped_requests_give_transformers_tokens(llava, expected, budget):
    prompts = mixed_prompts(llava)
    engine = tight_cache(llava, prompts, max_num_batched_tokens=budget, kv_offload_memory="64MiB")
    for _ in range(2):
        assert generate(engine, prompts) == expected
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.blocks_offloaded > 0
    assert stats.blocks_loaded > 0


@pytest.mark.usefixtures("saving_pays", "kernels")
def test_a_tiny_host_pool_gives_transformers_tokens(llava, expected):
    prompts = mixed_prompts(llava)
    engine = tight_cache(llava, prompts, kv_offload_memory=5 * bytes_of_4(llava.folder))
    for _ in range(2):
        assert generate(engine, prompts) == expected
    assert engine.stats().host_blocks_used == 5


def test_equal_requests_at_once_share_a_prompt(llava, expected):
    engine = engine_for(llava, block_size=4)
    for prompt, answer in zip(mixed_prompts(llava), expected, strict=True):
        before = engine.stats()
        assert generate(engine, [prompt] * 3) == [answer] * 3
        after = engine.stats()
        assert after.prompt_tokens - before.prompt_tokens <= len(prompt.token_ids) + 2 * 4


@pytest.fixture(scope="module")
def mistral(tmp_path_factory) -> Oracle:
    folder = tmp_path_factory.mktemp("mistral")
    return text_oracle(make_text_model(folder, MistralForCausalLM, MistralConfig, sliding_window=10))


@by_kernels(
    "settings",
    native=[{}, {"max_num_batched_tokens": 7}, {"enable_prefix_caching": False}],
    torch=[{"max_num_batched_tokens": 7}],
    static=[{}],
)
def test_sliding_windows_free_blocks(mistral, settings):
    prompts = [mistral.prompt(seed, length) for seed, length in enumerate([1, 9, 10, 11, 40, 63])]
    engine = engine_for(mistral, block_size=4, **settings)
    first = generate(engine, prompts)
    assert first == [mistral.greedy(prompt, guess=answer) for prompt, answer in zip(prompts, first, strict=True)]
    assert generate(engine, prompts) == first
    engine.add(EngineRequest("a", prompts[-1], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)))
    used = []
    while engine.has_work():
        engine.step()
        used.append(engine.stats().kv_blocks_used)
    assert max(used[-5:-1]) <= 4, "10 positions touch at most 4 blocks of 4"


def test_a_second_turn_finds_the_first(llava):
    engine = engine_for(llava, block_size=4)
    first = llava.prompt(5, 6, "image", 9)
    (answer,) = generate(engine, [first])
    second = Prompt(first.token_ids + answer + [7, 8, 9, 10], first.images)
    before = engine.stats()
    [again] = generate(engine, [second])
    assert again == llava.greedy(second, guess=again)
    after = engine.stats()
    known = len(first.token_ids) + len(answer) - 1
    assert after.prefix_cached_tokens - before.prefix_cached_tokens == known // 4 * 4
    assert after.images_encoded == before.images_encoded


def test_reordered_images_share_the_text_before(llava):
    engine = engine_for(llava, block_size=4)
    one, other = llava.make_image(1), llava.make_image(2)
    text, placeholders = [5, 6, 7, 8], [llava.image_token] * llava.image_tokens

    def prompt(*images: ImageInput) -> Prompt:
        token_ids, spans = list(text), []
        for image in images:
            spans.append(ImageSpan(image, len(token_ids)))
            token_ids += placeholders
        return Prompt([*token_ids, 9, 10, 11], tuple(spans))

    for images in ((one, other), (other, one), (one, one), (other, other), (one, other)):
        [answer] = generate(engine, [prompt(*images)])
        assert answer == llava.greedy(prompt(*images), guess=answer)
