"""Qwen2-VL to Qwen3.5 and LFM3-VL in the engine against transformers: images of any shape, whatever else goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    Lfm3VlConfig,
    Lfm3VlForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.lfm3_vl.configuration_lfm3_vl import Lfm3VlVisionConfig

from tests.checkpoints import TEXT, write_tokenizer
from tests.engine.kinds import by_kernels, with_kernels
from tests.engine.test_parity import NEW_TOKENS, assert_answers, engine_for, first_logits, generate, tight_cache
from tests.models.test_families import LFM3, QWEN3_MOE, QWEN35
from tests.models.test_qwen_vision import QWEN2, QWEN3, QWEN25, patches
from tests.models.test_qwen_vision import QWEN35 as VISION35
from tests.normalized import normalized
from tests.saved_models import save_model
from vlmserve.engine.lengths import least_embedding_bytes
from vlmserve.settings.config import EngineConfig
from vlmserve.types import ImageInput, ImageSpan, Prompt

pytestmark = pytest.mark.usefixtures("native_kernels")

IMAGE_TOKEN = 290
SIDE = 8
"""Pixels of what becomes an embedding."""
CLASSES = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration, QWEN2),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, QWEN25),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration, QWEN3),
    "qwen3_vl_moe": (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration, QWEN3),
}
VISION3 = Lfm3VlVisionConfig(
    num_hidden_layers=4, hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2,
    patch_size=4, initializer_range=0.15,
)  # fmt: skip
HYBRIDS = {
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration, VISION35),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, VISION35),
    "lfm3_vl": (Lfm3VlConfig, Lfm3VlForConditionalGeneration, VISION3),
}
"""Models with layers that have states."""


@dataclass
class Oracle:
    """A checkpoint and transformers' opinion of it."""

    folder: Path
    model: nn.Module

    def make_image(self, seed: int, rows: int, columns: int) -> ImageInput:
        """Of so many embeddings each way."""
        shape = (1, 3, SIDE * rows, SIDE * columns)
        pixels = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
        key = hashlib.sha256(pixels.tobytes() + bytes((rows, columns))).digest()
        return ImageInput(key, pixels, rows * columns, (1, rows, columns))

    def prompt(self, seed: int, *parts: int | tuple[int, int]) -> Prompt:
        """Numbers are that many random text tokens, pairs a new random image of that shape."""
        random = np.random.default_rng(seed)
        token_ids: list[int] = []
        spans = []
        for part in parts:
            if isinstance(part, tuple):
                image = self.make_image(seed * 100 + len(spans), *part)
                spans.append(ImageSpan(image, len(token_ids)))
                token_ids += [IMAGE_TOKEN] * image.num_tokens
            else:
                token_ids += random.integers(3, 280, part).tolist()
        return Prompt(token_ids, tuple(spans))

    def inputs(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        """What transformers' model takes."""
        ids = torch.tensor([prompt.token_ids])
        inputs = {"input_ids": ids}
        if self.model.config.model_type != "lfm3_vl":
            inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
        if prompt.images:
            vision = self.model.config.vision_config
            rows = [patches(torch.from_numpy(normalized(span.image)), vision) for span in prompt.images]
            inputs["pixel_values"] = torch.cat([patch for patch, _ in rows])
            inputs["image_grid_thw"] = torch.cat([grid for _, grid in rows])
        return inputs

    @torch.inference_mode()
    def logits(self, prompt: Prompt, answer: list[int]) -> torch.Tensor:
        """After the prompt and after each token of an answer."""
        longer = Prompt(prompt.token_ids + answer, prompt.images)
        return self.model(**self.inputs(longer)).logits[0, len(prompt.token_ids) - 1 :]

    @torch.inference_mode()
    def greedy(self, prompt: Prompt, guess: Sequence[int] = ()) -> list[int]:
        """guess: an answer that need not be right. One pass over all of it tells, which is faster than to find it."""
        if len(guess) == NEW_TOKENS and IMAGE_TOKEN not in guess:
            likeliest = self.logits(prompt, list(guess[:-1])).argmax(-1).tolist()
            if likeliest == list(guess):
                return likeliest
        generated = self.model.generate(**self.inputs(prompt), max_new_tokens=NEW_TOKENS, do_sample=False)
        return generated[0, len(prompt.token_ids) :].tolist()


def make_oracle(folder: Path, kind: str) -> Oracle:
    """A random checkpoint in `folder`."""
    config_class, model_class, vision = (CLASSES | HYBRIDS)[kind]
    write_tokenizer(folder, takes_images=False)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = {**TEXT, "vocab_size": 300, "rope_parameters": rope}
    if kind.startswith("qwen3_vl"):
        text["head_dim"] = 8
    if kind.startswith("qwen3_5"):
        text |= {**QWEN35, "initializer_range": 0.1}
    if kind.endswith("_moe"):
        text |= {**QWEN3_MOE, "head_dim": text["head_dim"]}
    if kind == "qwen3_5_moe":
        text["shared_expert_intermediate_size"] = 24
    vision_fields = {**vision.to_dict()}
    if kind == "lfm3_vl":
        text |= {**LFM3, "model_type": "lfm3", "rope_parameters": None, "initializer_range": 0.12}
    else:
        vision_fields["hidden_size" if kind == "qwen2_vl" else "out_hidden_size"] = TEXT["hidden_size"]
    config = config_class(text_config=text, vision_config=vision_fields, image_token_id=IMAGE_TOKEN, video_token_id=291,
                          vision_start_token_id=292, vision_end_token_id=293)  # fmt: skip
    save_model(folder, model_class, config, 0, torch.float32, "1GB")
    model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return Oracle(folder, model)


@pytest.fixture(scope="module", params=CLASSES | HYBRIDS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle(tmp_path_factory.mktemp(request.param), request.param)


MIXED: list[tuple[int | tuple[int, int], ...]] = [
    (5, (2, 3), 9), ((4, 1), 3), (7, (1, 5), 1), (4,), ((2, 2), 2, (3, 5), 3, (1, 1), 1), (33,),
    (16, (6, 4), 16), ((1, 2), 1, (2, 1), 5), (2, (5, 5), 20),
]  # fmt: skip


@pytest.fixture(scope="module")
def prompts(oracle: Oracle) -> list[Prompt]:
    return [oracle.prompt(seed, *parts) for seed, parts in enumerate(MIXED)]


@pytest.fixture(scope="module")
def expected(oracle: Oracle, prompts: list[Prompt]) -> list[list[int]]:
    guesses = generate(engine_for(oracle), prompts)
    return [oracle.greedy(prompt, guess) for prompt, guess in zip(prompts, guesses, strict=True)]


def test_image_tokens_are_sized_before_loading(oracle: Oracle) -> None:
    config = EngineConfig(model=str(oracle.folder), dtype="float32")
    assert least_embedding_bytes(config, oracle.folder) == engine_for(oracle).info.image_token_bytes > 0


@by_kernels("budget", native=(9, 2048))
def test_tokens_are_those_of_transformers(
    oracle: Oracle, prompts: list[Prompt], expected: list[list[int]], budget: int
) -> None:
    assert len({tuple(answer) for answer in expected}) > 5, "answers that are alike would prove little"
    engine = engine_for(oracle, block_size=4, max_num_batched_tokens=budget)
    assert_answers(engine, prompts, expected)


OTHER_KERNELS = (
    ("qwen3_vl_moe", "torch"), ("qwen3_5", "torch"),
    ("qwen3_vl", "static"), ("qwen3_5_moe", "static"), ("lfm3_vl", "static"),
)  # fmt: skip
"""One model of each kind of layers. Logits of all models by torch's kernels are compared below."""


@pytest.mark.parametrize(("oracle", "kernels"), OTHER_KERNELS, indirect=True)
@pytest.mark.usefixtures("kernels")
def test_other_kernels_give_the_same_tokens(oracle: Oracle, prompts: list[Prompt], expected: list[list[int]]) -> None:
    assert_answers(engine_for(oracle, block_size=4, max_num_batched_tokens=30), prompts, expected)


@pytest.mark.usefixtures("kernels")
@torch.inference_mode()
def test_logits_are_those_of_transformers(oracle: Oracle, prompts: list[Prompt]) -> None:
    expected = torch.stack([oracle.model(**oracle.inputs(prompt)).logits[0, -1] for prompt in prompts])
    actual = first_logits(engine_for(oracle, block_size=4), prompts)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_preempted_requests_give_the_same(oracle: Oracle, prompts: list[Prompt], expected: list[list[int]]) -> None:
    tight = tight_cache(oracle, prompts, max_num_batched_tokens=100)
    assert generate(tight, prompts) == expected
    # Slots of states bound what runs, so that blocks suffice.
    assert tight.stats().preemptions > 0 or tight.runner.model.language_model.state_specs


@with_kernels("static")
def test_captured_steps_are_the_same_after_preemption(tmp_path: Path) -> None:
    oracle = make_oracle(tmp_path, "qwen3_vl")
    prompts = [oracle.prompt(seed, *parts) for seed, parts in enumerate(MIXED)]
    tight = tight_cache(oracle, prompts, max_num_batched_tokens=100)
    answers = generate(tight, prompts)
    assert answers == [oracle.greedy(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    assert tight.stats().preemptions > 0


def test_a_prefix_hit_may_end_inside_an_image(oracle: Oracle) -> None:
    first = oracle.prompt(9, 6, (3, 4), 5)
    [span] = first.images
    if engine_for(oracle).runner.model.language_model.state_specs:
        pytest.skip("states are known at boundaries only")
    other = Prompt([*first.token_ids[: span.end], 17, 4, 8], first.images)
    engine = engine_for(oracle, block_size=4)
    generate(engine, [first])
    before = engine.stats().prefix_cached_tokens
    assert generate(engine, [other]) == [oracle.greedy(other)]
    assert span.start < engine.stats().prefix_cached_tokens - before < span.end


def test_an_extra_turn_finds_the_image(oracle: Oracle) -> None:
    first = oracle.prompt(7, 6, (3, 4), 5)
    answer = oracle.greedy(first)
    second = oracle.prompt(8, 9, (2, 5), 4)
    spans = [ImageSpan(span.image, span.start + len(first.token_ids) + len(answer)) for span in second.images]
    both = Prompt(first.token_ids + answer + second.token_ids, (*first.images, *spans))
    engine = engine_for(oracle, block_size=4)
    assert generate(engine, [first]) == [answer]
    assert generate(engine, [both]) == [oracle.greedy(both)]
    assert engine.stats().prefix_cached_tokens > len(first.token_ids) // 2
