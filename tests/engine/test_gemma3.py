"""Gemma 3 with images against transformers' processor and model: images that see themselves whole, however prompts are
cut and cached."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import Gemma3ForConditionalGeneration, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from tests.at_once import chat_at_once
from tests.checkpoints import GEMMA3_NAMED, GEMMA3_PICTURE_TOKENS, GEMMA3_TEMPLATE, change_config, make_gemma3
from tests.engine.kinds import with_budgets
from tests.engine.test_parity import generate
from tests.engine.test_qwen_chat import assistant, logits_after, tokens, user
from tests.normalized import normalized
from vlmserve import LLM, SamplingParams
from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.kernels.attention import BatchMetadata
from vlmserve.layer_specs import CacheBytes
from vlmserve.types import Prompt

NEW_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


def blotches(width: int, height: int, seed: int) -> Image.Image:
    """An image of a few large spots, which are still there when it is resized."""
    levels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(levels).resize((width, height), Image.Resampling.BILINEAR)


IMAGES = [blotches(40, 30, 0), blotches(20, 60, 1), blotches(90, 50, 2)]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [user(IMAGES[0], "What is in the picture?")],
    [user("Hi"), assistant("Hello world"), user("First", IMAGES[1], "then\n", IMAGES[2], "\n?")],
    [user(IMAGES[2], IMAGES[0], IMAGES[1])],
    [user("How many green triangles are there?")],
    [user("The end of it is ", IMAGES[1])],
    [user(IMAGES[2], "?"), assistant("A number"), user("And now?")],
]


@dataclass
class Oracle:
    """A checkpoint and transformers' opinion of it."""

    folder: Path
    model: nn.Module
    processor: Any

    def llm(self, **settings: Any) -> LLM:
        settings = {"kv_cache_memory": "16MiB", "dtype": "float32", "device": "cpu", "block_size": 4, **settings}
        return LLM(str(self.folder), **settings)

    def inputs(self, conversation: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        text = self.processor.apply_chat_template(list(conversation), add_generation_prompt=True, tokenize=False)
        parts = [
            part for message in conversation if isinstance(message["content"], list) for part in message["content"]
        ]
        images = [part["image"] for part in parts if part["type"] == "image"]
        # The template has written the token that begins a text.
        return dict(self.processor(text=text, images=images or None, return_tensors="pt", add_special_tokens=False))

    @torch.inference_mode()
    def greedy(self, inputs: dict[str, torch.Tensor], num_tokens: int = NEW_TOKENS) -> list[int]:
        generated = self.model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
        return generated[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.fixture(scope="module", params=["mixed layers", "all layers slide"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    kinds = {} if request.param == "mixed layers" else {"layer_types": ["sliding_attention"] * 3, "sliding_window": 30}
    folder = make_gemma3(tmp_path_factory.mktemp("gemma3"), **kinds)
    model = Gemma3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    processor = Gemma3Processor(
        Gemma3ImageProcessorPil(size={"height": 32, "width": 32}),
        PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens=GEMMA3_NAMED),
        chat_template=GEMMA3_TEMPLATE,
        image_seq_length=GEMMA3_PICTURE_TOKENS,
    )
    return Oracle(folder, model, processor)


@pytest.fixture(scope="module")
def expected(oracle: Oracle) -> list[list[int]]:
    return [oracle.greedy(oracle.inputs(conversation)) for conversation in CONVERSATIONS]


def test_ids_and_pixels_are_those_of_the_processor(oracle: Oracle) -> None:
    preparer = oracle.llm(load="lazy").preparer
    for conversation in CONVERSATIONS:
        prompt, theirs = preparer.chat(conversation, allow_local=True), oracle.inputs(conversation)
        assert prompt.token_ids == theirs["input_ids"][0].tolist()
        if prompt.images:
            pixels = np.concatenate([normalized(span.image) for span in prompt.images])
            np.testing.assert_allclose(pixels, theirs["pixel_values"].numpy(), rtol=0, atol=1e-6)
    raw = preparer.text("a <start_of_image> b", [IMAGES[0]], allow_local=True)
    assert raw.token_ids == oracle.processor(text="a <start_of_image> b", images=[IMAGES[0]])["input_ids"][0]


def test_written_image_tokens_are_words(oracle: Oracle) -> None:
    preparer = oracle.llm(load="lazy").preparer
    words = " ".join(GEMMA3_NAMED.values())
    prompt = preparer.chat([user(words, IMAGES[0], words)], allow_local=True)
    controls = {preparer.tokenizer.token_id(token) for token in GEMMA3_NAMED.values()}
    assert sum(token_id in controls for token_id in prompt.token_ids) == GEMMA3_PICTURE_TOKENS + 2


@with_budgets
def test_answers_are_those_of_transformers(oracle: Oracle, expected: list[list[int]], budget: int) -> None:
    """A budget of 9 would cut through every image, one of 30 through some."""
    assert len({tuple(answer) for answer in expected}) == len(expected), "answers that are alike would prove little"
    llm = oracle.llm(max_num_batched_tokens=budget)
    ends = chunk_ends(llm)
    assert tokens(llm.chat(CONVERSATIONS, GREEDY, use_tqdm=False)) == expected
    assert len(ends) > {9: 40, 30: 10, 2048: 5}[budget]
    assert not any(span.start < end < span.end for end, spans in ends for span in spans)
    again = llm.chat(CONVERSATIONS, GREEDY, use_tqdm=False)
    assert tokens(again) == expected
    assert all(result.num_cached_tokens > 0 for result in again)
    if budget != 2048:
        return
    alone = oracle.llm()
    assert [tokens(alone.chat(asked, GREEDY, use_tqdm=False))[0] for asked in CONVERSATIONS] == expected


def chunk_ends(llm: LLM) -> list[tuple[int, Any]]:
    """Where the chunks of prompts end that an engine runs from now on, with the images of each."""
    ends: list[tuple[int, Any]] = []
    scheduler = llm.engine.scheduler  # type: ignore[attr-defined]
    schedule = scheduler.schedule

    def recording() -> Any:
        step = schedule()
        for scheduled in step.requests:
            request = scheduler.requests[scheduled.request_id]
            if scheduled.start < request.num_prompt_tokens:
                ends.append((scheduled.start + scheduled.num_tokens, request.image_spans))
        return step

    scheduler.schedule = recording
    return ends


def test_preempted_requests_give_the_same(oracle: Oracle) -> None:
    """Answers are long enough that requests run out of blocks that layers without a window keep."""
    inputs, new = [*map(oracle.inputs, CONVERSATIONS)], 40
    tight, sizes = tight_llm(oracle, new)
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    assert chat_at_once(tight, CONVERSATIONS, params) == [oracle.greedy(one, new) for one in inputs]
    assert tight.engine.stats().preemptions > 0 or sizes.windows[0] is not None


def tight_llm(oracle: Oracle, new: int, **settings: Any) -> tuple[LLM, CacheBytes]:
    """Its cache holds the longest conversation and `new` tokens, and nothing more."""
    longest = max(len(oracle.inputs(asked)["input_ids"][0]) for asked in CONVERSATIONS) + new
    sizes = oracle.llm(block_size=2).engine.runner.model.language_model.cache_bytes(2)  # type: ignore[attr-defined]
    settings = {"kv_cache_memory": sizes.pages(longest, 20) * sizes.page, "max_num_batched_tokens": 20, **settings}
    return oracle.llm(block_size=2, **settings), sizes


@pytest.mark.usefixtures("saving_pays")
def test_evicted_blocks_return_from_the_host(oracle: Oracle, expected: list[list[int]]) -> None:
    tight, _ = tight_llm(oracle, NEW_TOKENS, kv_offload_memory="16MiB")
    for _ in range(2):
        assert tokens(tight.chat(CONVERSATIONS, GREEDY, use_tqdm=False)) == expected
    assert tight.engine.stats().blocks_loaded > 0


def test_8_bits_give_the_same_in_any_batch(oracle: Oracle) -> None:
    alone = oracle.llm(kv_cache_dtype="int8")
    answers = [tokens(alone.chat(asked, GREEDY, use_tqdm=False))[0] for asked in CONVERSATIONS]
    together = oracle.llm(kv_cache_dtype="int8", max_num_batched_tokens=20)
    assert tokens(together.chat(CONVERSATIONS, GREEDY, use_tqdm=False)) == answers


def test_several_answers_share_the_prompts_blocks(oracle: Oracle, expected: list[list[int]]) -> None:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, n=3)
    results = oracle.llm().chat(CONVERSATIONS, params, use_tqdm=False)
    for result, answer in zip(results, expected, strict=True):
        assert [list(output.token_ids) for output in result.outputs] == [answer] * 3


def test_a_prefix_hit_may_end_inside_an_image(oracle: Oracle) -> None:
    """The cached part of the image was computed with all of it in sight, so the rest can follow by itself."""
    llm = oracle.llm(block_size=16)
    inside = 0
    for words in ("a", "green triangles", "The number is 42. hello world, the quick brown fox"):
        one, other = ([user(words, IMAGES[0], question)] for question in ("What?", "How many?"))
        llm.chat(one, GREEDY, use_tqdm=False)
        [result] = llm.chat(other, GREEDY, use_tqdm=False)
        assert tokens([result]) == [oracle.greedy(oracle.inputs(other))]
        [span] = llm.preparer.chat(other, allow_local=True).images
        inside += span.start < result.num_cached_tokens < span.end
    assert inside


def test_an_image_may_end_a_prompt(oracle: Oracle) -> None:
    """Then nothing but the last of its tokens is left to compute when the prompt comes again."""
    llm = oracle.llm()
    prompt = llm.preparer.chat([user("See", IMAGES[1])], allow_local=True)
    [span] = prompt.images
    cut = Prompt(prompt.token_ids[: span.end], prompt.images)
    inputs = {
        name: value[:, : span.end] for name, value in oracle.inputs([user("See", IMAGES[1])]).items() if value.ndim == 2
    }
    inputs["pixel_values"] = oracle.inputs([user("See", IMAGES[1])])["pixel_values"]
    answer = oracle.greedy(inputs)
    for _ in range(2):
        assert generate(llm.engine, [cut], max_tokens=NEW_TOKENS) == [answer]  # type: ignore[arg-type]


def test_without_bidirectional_attention_an_image_means_something_else(
    oracle: Oracle, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = oracle.llm()
    monkeypatch.setattr(
        "vlmserve.runner.batch.BatchMetadata", lambda **fields: BatchMetadata(**{**fields, "bidirectional": ()})
    )
    changed = tokens(llm.chat(CONVERSATIONS, GREEDY, use_tqdm=False))
    assert changed[3] == expected[3], "without an image nothing differs"
    assert changed != expected


def test_published_layouts_load_and_have_tied_embeddings(tmp_path: Path) -> None:
    plain, published = make_gemma3(tmp_path / "new"), make_gemma3(tmp_path / "old", published_names=True)
    text = json.loads((published / "config.json").read_text())["text_config"]
    del text["tie_word_embeddings"]
    change_config(published, tie_word_embeddings=None, text_config=text)
    answers = [
        tokens(
            LLM(str(folder), dtype="float32", kv_cache_memory="4MiB").chat(CONVERSATIONS[:2], GREEDY, use_tqdm=False)
        )
        for folder in (plain, published)
    ]
    assert answers[0] == answers[1]


def test_settings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = make_gemma3(tmp_path)
    change_config(folder, mm_tokens_per_image=15)
    with pytest.raises(ModelLoadError, match="8 x 8 patches cannot be averaged to mm_tokens_per_image 15"):
        LLM(str(folder), device="cpu")
    change_config(folder, mm_tokens_per_image=16)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps({**settings, "do_pan_and_scan": True}))
    with pytest.raises(UnsupportedModelError, match="do_pan_and_scan"):
        LLM(str(folder), device="cpu")


def test_bfloat16_is_within_its_own_rounding(oracle: Oracle) -> None:
    """As far from float32 as transformers' own bfloat16 is, and no further."""
    rounded = Gemma3ForConditionalGeneration.from_pretrained(oracle.folder, dtype=torch.bfloat16).eval()
    llm = oracle.llm(dtype="bfloat16")
    errors = []
    for conversation in CONVERSATIONS[:3]:
        inputs = oracle.inputs(conversation)
        with torch.inference_mode():
            exact = oracle.model(**inputs).logits[0, -1]
            theirs = rounded(**{**inputs, "pixel_values": inputs["pixel_values"].bfloat16()}).logits[0, -1].float()
        ours = logits_after(llm, conversation)
        errors.append(((ours - exact).square().mean(), (theirs - exact).square().mean()))
    assert sum(mine for mine, _ in errors) < 2 * sum(other for _, other in errors)


def test_another_image_means_another_answer(oracle: Oracle) -> None:
    llm = oracle.llm()
    asked = [[user("What is in", image, "?")] for image in IMAGES]
    answers = tokens(llm.chat(asked, GREEDY, use_tqdm=False))
    assert answers == [oracle.greedy(oracle.inputs(conversation)) for conversation in asked]
    assert len({tuple(answer) for answer in answers}) > 1
