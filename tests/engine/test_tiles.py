"""LLaVA-NeXT, Idefics3, SmolVLM, InternVL, LFM2-VL, Pixtral and Ministral 3 against transformers, from the files of a
checkpoint: the same token ids and pixels for conversations with images of any shape, and the same answers whatever else
goes on."""

from __future__ import annotations

import base64
import importlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    Idefics3Processor,
    InternVLProcessor,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.lighton_ocr.processing_lighton_ocr import LightOnOcrProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from tests.checkpoints import (
    INTERNVL_NAMED,
    PIXTRAL_ENDS,
    make_idefics3,
    make_internvl,
    make_lighton_ocr,
    make_llava_next,
    make_mistral3,
    make_pixtral,
)
from tests.engine.image_parity import (
    CONVERSATIONS,
    Oracle,
    check_a_further_turn,
    check_bfloat16,
    open_oracle,
    shown,
    user,
)
from tests.engine.test_parity import NEW_TOKENS, assert_answers, engine_for, generate, tight_cache
from tests.lfm2_checkpoints import load_processor as load_lfm2_processor
from tests.lfm2_checkpoints import make_lfm2_vl
from tests.minicpmv_checkpoints import make_minicpmv, minicpmv_processor, side_by_side
from tests.module_stubs import replaced_modules
from tests.normalized import normalized
from tests.square_images import squares_of
from vlmserve import LLM, SamplingParams
from vlmserve.kernels.choice import VARIABLE
from vlmserve.types import Prompt

LARGE_TOWER = {"attention_bias": False, "use_qk_norm": True, "norm_type": "rms_norm"}
"""As InternVL3-38B and 78B have it."""
MAKERS: dict[str, Callable[[Path], Path]] = {
    "LLaVA-NeXT": make_llava_next,
    "LLaVA-NeXT over Mistral with a window": lambda folder: make_llava_next(
        folder, text_class=MistralConfig, text={"sliding_window": 40}, published_names=True
    ),
    "Idefics3": make_idefics3,
    "SmolVLM": lambda folder: make_idefics3(
        folder,
        family="SmolVLM",
        vision={"image_size": 24},
        text={"tie_word_embeddings": True},
        tie_word_embeddings=True,
    ),
    "InternVL": lambda folder: make_internvl(folder, published_names=True),
    "InternVL over Qwen3, with a tower of the other kind": lambda folder: make_internvl(
        folder, text_class=Qwen3Config, text={"head_dim": 8}, vision=LARGE_TOWER, tie_word_embeddings=True
    ),
    "LFM2-VL": make_lfm2_vl,
    "Pixtral": lambda folder: make_pixtral(folder, published_names=True),
    "Ministral 3": lambda folder: make_mistral3(folder, published_names=True),
    "LightOnOCR": make_lighton_ocr,
    "MiniCPM-V 4.6": make_minicpmv,
    "MiniCPM-V 4.7": lambda folder: make_minicpmv(folder, version="4_7"),
}
IMAGE_PROCESSORS = {
    "GotOcr2ImageProcessorFast": GotOcr2ImageProcessorPil,
    "LlavaNextImageProcessor": LlavaNextImageProcessorPil,
    "PixtralImageProcessor": PixtralImageProcessorPil,
    "Idefics3ImageProcessor": Idefics3ImageProcessorPil,
    "SmolVLMImageProcessor": SmolVLMImageProcessorPil,
}
SMOLVLM_TEMPLATE = (
    "<s>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{{ ':' if message['content'][0]['type'] == 'image' else ': ' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}"
    "{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""The way SmolVLM's checkpoints write conversations."""


class WithoutVideos(InternVLProcessor):
    """Without its part for videos, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return argument and super().check_argument_for_proper_class(argument_name, argument)


def pixtral_processor() -> Any:
    """transformers' class, which takes a function from a module that needs torchvision; another one has it, too."""
    replaced = {"transformers.models.pixtral.image_processing_pixtral": image_processing_pil_pixtral}
    with replaced_modules(replaced):
        return importlib.import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor


def load_processor(folder: Path) -> Any:
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    if settings["image_processor_type"].startswith("Lfm2Vl"):
        return load_lfm2_processor(folder)
    if settings["image_processor_type"].startswith("MiniCPMV"):
        return minicpmv_processor(folder)
    image_processor = IMAGE_PROCESSORS[settings.pop("image_processor_type")](**settings)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    template = (folder / "chat_template.jinja").read_text()
    if isinstance(image_processor, GotOcr2ImageProcessorPil):
        named = PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens=INTERNVL_NAMED)
        return WithoutVideos(image_processor, named, image_seq_length=4, chat_template=template)
    if isinstance(image_processor, PixtralImageProcessorPil):
        files = json.loads((folder / "processor_config.json").read_text())
        sizes = {name: files[name] for name in ("patch_size", "spatial_merge_size") if name in files}
        if files["processor_class"] == "LightOnOcrProcessor":
            named = PreTrainedTokenizerFast.from_pretrained(
                folder, extra_special_tokens={"image_token": "<image>", **PIXTRAL_ENDS}
            )
            return LightOnOcrProcessor(image_processor, named, chat_template=template, **sizes)
        return pixtral_processor()(
            image_processor, tokenizer, image_token="<image>", chat_template=template, **PIXTRAL_ENDS, **sizes
        )
    if isinstance(image_processor, LlavaNextImageProcessorPil):
        return LlavaNextProcessor(
            image_processor, tokenizer, patch_size=4, vision_feature_select_strategy="default",
            num_additional_image_tokens=1, chat_template=template,
        )  # fmt: skip
    return Idefics3Processor(image_processor, tokenizer, image_seq_len=4, chat_template=template)


@pytest.fixture(scope="module", params=MAKERS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = MAKERS[request.param](tmp_path_factory.mktemp("tiles"))
    if "SmolVLM" in request.param:
        (folder / "chat_template.jinja").write_text(SMOLVLM_TEMPLATE)
    return open_oracle(folder, load_processor(folder))


@pytest.fixture(scope="module")
def prompts(oracle: Oracle) -> list[Prompt]:
    return [oracle.prompt(message) for message in CONVERSATIONS]


@pytest.fixture(scope="module")
def expected(oracle: Oracle, prompts: list[Prompt]) -> list[list[int]]:
    guesses = generate(engine_for(oracle), prompts)
    return [oracle.greedy(message, guess=guess) for message, guess in zip(CONVERSATIONS, guesses, strict=True)]


def test_prompts_and_pixels_are_those_of_transformers(oracle: Oracle, prompts: list[Prompt]) -> None:
    for message, prompt in zip(CONVERSATIONS, prompts, strict=True):
        theirs = oracle.inputs(message)
        assert prompt.token_ids == theirs["input_ids"][0].tolist()
        assert len(prompt.images) == len(shown(message))
        if not prompt.images:
            continue
        ours = [normalized(span.image) for span in prompt.images]
        pixels = theirs["pixel_values"].numpy()
        if "spatial_shapes" in theirs:
            pixels = squares_of(theirs, 8)
        if "target_sizes" in theirs:
            own = np.concatenate([side_by_side(pixels, 4) for pixels in ours], 3)
            np.testing.assert_allclose(own, pixels, rtol=0, atol=1e-6)
            continue
        # All images, padded to the largest, or all tiles, or one row of them a prompt, or one an image, padded to the
        # longest.
        if "image_sizes" in theirs and pixels.ndim == 4:
            for own, image, (height, width) in zip(ours, pixels, theirs["image_sizes"].tolist(), strict=True):
                np.testing.assert_allclose(own, image[None, :, :height, :width], rtol=0, atol=1e-6)
            continue
        if pixels.ndim == 4:
            pass
        elif len(ours) > 1 and len(pixels) == len(ours):
            pixels = np.concatenate([own[: len(tiles)] for own, tiles in zip(pixels, ours, strict=True)])
        else:
            pixels = pixels[0]
        np.testing.assert_allclose(np.concatenate(ours), pixels, rtol=0, atol=1e-6)


def test_what_users_write_of_tiles_is_text(oracle: Oracle) -> None:
    words = "<row_1_col_1> <image> <global-img><fake_token_around_image></img>"
    prompt = oracle.prompt(user((40, 30), words, (16, 20)))
    plain = oracle.prompt(user((40, 30), "x", (16, 20)))
    count = prompt.token_ids.count(oracle.preparer.tokenizer.image_token_id)
    assert count == plain.token_ids.count(oracle.preparer.tokenizer.image_token_id)
    first, second = prompt.images
    between = prompt.token_ids[first.end : second.start - len(oracle.preparer.media.label(1))]
    assert not oracle.preparer.tokenizer.special_ids & set(between)
    assert oracle.preparer.tokenizer.decode(between) == words


@pytest.mark.usefixtures("native_kernels")
def test_tokens_are_those_of_transformers(oracle: Oracle, prompts: list[Prompt], expected: list[list[int]]) -> None:
    assert len({tuple(answer) for answer in expected}) > 6, "answers that are alike would prove little"
    assert_answers(engine_for(oracle, block_size=4), prompts, expected)
    assert generate(engine_for(oracle, block_size=4, max_num_batched_tokens=9), prompts) == expected


@pytest.mark.parametrize("name", ["LLaVA-NeXT over Mistral with a window", "Ministral 3"])
def test_torchs_kernels_do_as_well(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is scheduled does not depend on the kernels; tests/models compares all towers by torch's."""
    monkeypatch.setenv(VARIABLE, "torch")
    folder = MAKERS[name](tmp_path)
    oracle = open_oracle(folder, load_processor(folder))
    prompts = [oracle.prompt(message) for message in CONVERSATIONS]
    engine = engine_for(oracle, block_size=4, max_num_batched_tokens=40)
    answers = generate(engine, prompts)
    expected = [oracle.greedy(one, guess=answer) for one, answer in zip(CONVERSATIONS, answers, strict=True)]
    assert answers == expected
    assert generate(engine, prompts[::-1]) == expected[::-1]


def test_an_encoder_cache_for_one_image_is_enough(
    oracle: Oracle, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    largest = max(span.image.num_embeddings for prompt in prompts for span in prompt.images)
    size = largest * oracle.model.config.text_config.hidden_size * 4
    settings = {"encoder_cache_memory": size, "enable_prefix_caching": False, "max_encoded_images": 1}
    assert generate(engine_for(oracle, **settings), prompts) == expected


@pytest.mark.usefixtures("native_kernels")
def test_preempted_requests_give_the_same(oracle: Oracle, prompts: list[Prompt], expected: list[list[int]]) -> None:
    tight = tight_cache(oracle, prompts, max_num_batched_tokens=100)
    assert generate(tight, prompts) == expected
    # Where layers have a short window, all requests may fit.
    assert tight.stats().preemptions > 0 or tight.runner.model.language_model.cache_layout.windows[-1] is not None


def test_a_prefix_may_end_anywhere_in_an_image(
    oracle: Oracle, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    """Others take the last blocks of a prompt, some more each time, and what is left of it is found again."""
    prompt, answer = prompts[0], expected[0][:2]
    [span] = prompt.images
    probe = engine_for(oracle, block_size=1)
    if probe.runner.model.language_model.state_specs:
        pytest.skip("states are known at boundaries only")
    block_bytes = probe.info.kv_cache_bytes // probe.stats().kv_blocks_total
    engine = engine_for(oracle, block_size=1, kv_cache_memory=(len(prompt.token_ids) + 2 + 4) * block_bytes)
    ends = set()
    for number, count in enumerate(range(1, len(prompt.token_ids), 4)):
        before = engine.stats().prefix_cached_tokens
        assert generate(engine, [prompt], max_tokens=2) == [answer]
        ends.add(engine.stats().prefix_cached_tokens - before)
        generate(engine, [Prompt([3 + number] * count)], max_tokens=2)
    inside = {end for end in ends if span.start < end < span.end}
    model = engine.runner.model.language_model
    # Layers with windows or states resume at fewer places.
    assert len(inside) > 5 or model.cache_layout.windows[-1] is not None or model.state_specs


def test_only_a_repeated_image_is_found(oracle: Oracle) -> None:
    same, other = user((40, 30), "What is this?"), user((40, 30), "What is this?", seed=7)
    prompts = [oracle.prompt(message) for message in (same, other)]
    assert prompts[0].token_ids == prompts[1].token_ids
    answers = [oracle.greedy(message) for message in (same, other)]
    assert answers[0] != answers[1]
    engine = engine_for(oracle, block_size=4)
    cached = []
    for number in (0, 1, 0, 1):
        before = engine.stats().prefix_cached_tokens
        assert generate(engine, [prompts[number]]) == [answers[number]]
        cached.append(engine.stats().prefix_cached_tokens - before)
    start, length = prompts[0].images[0].start, len(prompts[0].token_ids)
    assert cached[0] == 0
    assert cached[1] <= start, "not even the words inside of another image"
    assert min(cached[2:]) >= length - 4
    assert engine.stats().images_encoded == 2


def with_detail(message: dict[str, Any], detail: str) -> dict[str, Any]:
    """The same with its images as URLs, beside which it stands how much of them is to be seen."""

    def shown(image: Image.Image) -> dict[str, Any]:
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        return {"type": "image_url", "image_url": {"url": url, "detail": detail}}

    content = [shown(part["image"]) if part["type"] == "image" else part for part in message["content"]]
    return {**message, "content": content}


@torch.inference_mode()
def greedy_of_low_detail(oracle: Oracle, message: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What transformers says if it gets nothing but the tile that shows all of an image."""
    with monkeypatch.context() as patch:
        if isinstance(oracle.processor, LlavaNextProcessor):
            patch.setattr(oracle.model.model.config, "image_grid_pinpoints", [[0, 0]])
            # Of the tile, 4 x 4, and the newline.
            patch.setattr(LlavaNextProcessor, "replace_image_token", lambda self, *_, **__: self.image_token * 17)
            inputs = oracle.inputs(message)
            inputs["pixel_values"] = inputs["pixel_values"][:, :1]
        else:
            limits = {GotOcr2ImageProcessorPil: ("max_patches", 1), MiniCPMV4_6ImageProcessorPil: ("slice_mode", False)}
            limit = limits.get(type(oracle.processor.image_processor), ("do_image_splitting", False))
            patch.setattr(oracle.processor.image_processor, *limit)
            inputs = oracle.inputs(message)
        generated = oracle.model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    return generated[0, inputs["input_ids"].shape[1] :].tolist()


def test_an_image_of_low_detail_is_another_one(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(oracle.processor.image_processor, PixtralImageProcessorPil):
        pytest.skip("images that are not cut become smaller only if they are large")
    messages = [user((40, 30), "What is this?"), user("Look: ", (20, 60)), user("a", (48, 48), "and", (30, 31))]
    low = [oracle.preparer.chat([with_detail(message, "low")]) for message in messages]
    high = [oracle.preparer.chat([with_detail(message, "high")]) for message in messages]
    expected_low = [greedy_of_low_detail(oracle, message, monkeypatch) for message in messages]
    expected_high = [oracle.greedy(message) for message in messages]
    assert expected_low != expected_high
    assert all(len(own.token_ids) <= len(other.token_ids) for own, other in zip(low, high, strict=True))
    assert len(low[0].token_ids) < len(high[0].token_ids)
    engine = engine_for(oracle, block_size=4)
    assert generate(engine, [*low, *high]) == expected_low + expected_high
    assert engine.stats().images_encoded == 8, "no cache takes one for the other"
    assert [generate(engine, [prompt])[0] for prompt in low] == expected_low
    assert engine.stats().images_encoded == 8, "and each is found again"
    chunked = engine_for(oracle, block_size=4, max_num_batched_tokens=9)
    assert generate(chunked, low) == expected_low


def test_an_extra_turn_finds_the_first_images(oracle: Oracle) -> None:
    check_a_further_turn(oracle)


def test_bfloat16_is_within_its_own_rounding(oracle: Oracle, prompts: list[Prompt]) -> None:
    check_bfloat16(oracle, prompts)


def test_offline_answers_come_from_files_alone(oracle: Oracle, expected: list[list[int]]) -> None:
    llm = LLM(str(oracle.folder), dtype="float32", device="cpu", kv_cache_memory="16MiB")
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    results = llm.chat([[message] for message in CONVERSATIONS], params)
    assert [result.outputs[0].token_ids for result in results] == expected
    assert [result.num_images_encoded for result in results] == [len(shown(message)) for message in CONVERSATIONS]
