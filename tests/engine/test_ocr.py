"""GLM-OCR, GLM-4.5V, GLM-4.6V-Flash and PaddleOCR-VL against transformers, from the files of a checkpoint: the same
token ids and pixels for conversations with images of any shape, and the same answers whatever else goes on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.image_parity import CONVERSATIONS, Oracle, check_a_further_turn, check_bfloat16, open_oracle, user
from tests.engine.kinds import with_budgets
from tests.engine.test_parity import NEW_TOKENS, assert_answers, engine_for, first_logits, generate, tight_cache
from tests.normalized import normalized
from tests.ocr_checkpoints import BOUNDS, load_processor, make_glm4v, make_glm_ocr, make_paddleocr, rows_of
from vlmserve import LLM, SamplingParams
from vlmserve.types import Prompt

pytestmark = [
    pytest.mark.usefixtures("native_kernels"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

MAKERS: dict[str, Callable[[Path], Path]] = {
    "GLM-OCR": make_glm_ocr,
    "GLM-4.5V": partial(make_glm4v, kind="Glm4vMoe"),
    "GLM-4.6V-Flash": partial(make_glm4v, kind="Glm46V"),
    "PaddleOCR-VL": lambda folder: make_paddleocr(folder, published_names=True),
}


@pytest.fixture(scope="module", params=MAKERS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = MAKERS[request.param](tmp_path_factory.mktemp("ocr"))
    return open_oracle(folder, load_processor(folder))


@pytest.fixture(scope="module")
def prompts(oracle: Oracle) -> list[Prompt]:
    return [oracle.prompt(message) for message in CONVERSATIONS]


@pytest.fixture(scope="module")
def expected(oracle: Oracle, prompts: list[Prompt]) -> list[list[int]]:
    guesses = generate(engine_for(oracle), prompts)
    return [oracle.greedy(message, guess=guess) for message, guess in zip(CONVERSATIONS, guesses, strict=True)]


def test_prompts_pixels_and_grids_are_those_of_transformers(oracle: Oracle, prompts: list[Prompt]) -> None:
    for message, prompt in zip(CONVERSATIONS, prompts, strict=True):
        theirs = oracle.inputs(message)
        assert prompt.token_ids == theirs["input_ids"][0].tolist()
        if not prompt.images:
            continue
        pixels = [torch.tensor(normalized(span.image)) for span in prompt.images]
        rows = [rows_of(of_image, oracle.model.config.vision_config) for of_image in pixels]
        assert [span.image.grid for span in prompt.images] == [
            (frames, down // 2, across // 2) for frames, down, across in theirs["image_grid_thw"].tolist()
        ]
        torch.testing.assert_close(torch.cat([own for own, _ in rows]), theirs["pixel_values"], atol=1e-5, rtol=0)


@pytest.mark.usefixtures("kernels")
@torch.inference_mode()
def test_logits_are_those_of_transformers(oracle: Oracle, prompts: list[Prompt]) -> None:
    expected = torch.stack([oracle.model(**oracle.inputs(message)).logits[0, -1] for message in CONVERSATIONS])
    assert expected.std(0).mean() > 0.1, "prompts differ"
    actual = first_logits(engine_for(oracle, block_size=4), prompts)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@with_budgets
def test_tokens_are_those_of_transformers(
    oracle: Oracle, prompts: list[Prompt], expected: list[list[int]], budget: int
) -> None:
    assert len({tuple(answer) for answer in expected}) > 6, "answers that are alike would prove little"
    engine = engine_for(oracle, block_size=4, max_num_batched_tokens=budget)
    assert_answers(engine, prompts, expected)


def test_preempted_requests_give_the_same(oracle: Oracle, prompts: list[Prompt], expected: list[list[int]]) -> None:
    tight = tight_cache(oracle, prompts, max_num_batched_tokens=100)
    assert generate(tight, prompts) == expected
    assert tight.stats().preemptions > 0


def test_a_prefix_hit_may_end_inside_an_image(oracle: Oracle, prompts: list[Prompt]) -> None:
    first = prompts[0]
    [span] = first.images
    other = oracle.prompt(user((40, 30), "Read it."))
    assert other.images[0].image.key == span.image.key
    # The token behind the image is the same, too.
    end, size = next(
        (end, size) for size in (4, 8, 16) if span.start < (end := (span.end + 1) // size * size) < span.end
    )
    engine = engine_for(oracle, block_size=size)
    generate(engine, [first])
    before = engine.stats().prefix_cached_tokens
    assert generate(engine, [other]) == [oracle.greedy(user((40, 30), "Read it."))]
    assert engine.stats().prefix_cached_tokens - before == end


def test_an_extra_turn_finds_the_first_images(oracle: Oracle) -> None:
    check_a_further_turn(oracle)


@pytest.mark.usefixtures("kernels")
def test_bfloat16_is_within_its_own_rounding(oracle: Oracle, prompts: list[Prompt]) -> None:
    check_bfloat16(oracle, prompts)


def test_budgets_are_those_of_the_processor(oracle: Oracle) -> None:
    message = user((90, 50), "What?")
    count = oracle.model.config.vision_config.to_dict().get("temporal_patch_size", 1)

    def limited(**limits: Any) -> dict[str, Any]:
        return {**message, "content": [{**message["content"][0], **limits}, *message["content"][1:]]}

    def greedy(least: int, most: int) -> list[int]:
        processor = load_processor(oracle.folder)
        processor.image_processor.size = {"shortest_edge": count * least, "longest_edge": count * most}
        return Oracle(oracle.folder, oracle.model, oracle.preparer, processor).greedy(message)

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "16MiB"}
    asked = [[message], [limited(max_pixels=600)], [limited(max_tokens=20)], [limited(max_pixels=1500, max_tokens=9)]]
    results = LLM(str(oracle.folder), **settings).chat(asked, params, use_tqdm=False)
    expected = [greedy(BOUNDS[0], most) for most in (BOUNDS[1], 600, 20 * 64, 9 * 64)]
    assert [result.outputs[0].token_ids for result in results] == expected
    lengths = [len(result.prompt_token_ids) for result in results]
    assert lengths[0] > lengths[2] > lengths[1] > lengths[3] - 1
    bounded = LLM(str(oracle.folder), mm_processor_kwargs={"max_pixels": 600}, **settings)
    [result] = bounded.chat([message], params, use_tqdm=False)
    assert result.outputs[0].token_ids == expected[1]
