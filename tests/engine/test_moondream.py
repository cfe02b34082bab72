"""Moondream in the engine against the oracle: a bidirectional prefix, whatever else runs."""

from __future__ import annotations

import pytest
import torch

from tests.engine.kinds import with_budgets
from tests.engine.test_parity import assert_answers, engine_for, first_logits, generate, tight_cache
from tests.moondream import BEGIN, TOKENS, Moondream
from vlmserve.types import ImageSpan, Prompt

pytestmark = pytest.mark.usefixtures("native_kernels")

ASKED = [(0, 5, 0), (1, 1, 1), (2, 17, 2), (0, 9, 3), (3, 30, 4), (4, 5, 0), (5, 12, 5), (2, 0, 6)]
"""Image, tokens of a question, which question."""


@pytest.fixture(scope="module", params=[4, 2], ids=["as published", "grouped heads"])
def moondream(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Moondream:
    return Moondream.make(tmp_path_factory.mktemp("moondream"), n_kv_heads=request.param)


@pytest.fixture(scope="module")
def prompts(moondream: Moondream) -> list[Prompt]:
    return [moondream.prompt(*asked) for asked in ASKED]


@pytest.fixture(scope="module")
def expected(moondream: Moondream, prompts: list[Prompt]) -> list[list[int]]:
    return [moondream.greedy(asked[0], prompt) for asked, prompt in zip(ASKED, prompts, strict=True)]


@with_budgets
def test_tokens_are_the_oracles(
    moondream: Moondream, prompts: list[Prompt], expected: list[list[int]], budget: int
) -> None:
    assert len({tuple(answer) for answer in expected}) == len(ASKED), "answers that are alike would prove little"
    engine = engine_for(moondream, block_size=4, max_num_batched_tokens=budget)
    assert_answers(engine, prompts, expected)
    assert engine.stats().prefix_cached_tokens > 0


def test_a_known_image_computes_the_rest_only(
    moondream: Moondream, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    """26 tokens see each other, 24 of them are in full blocks of 4."""
    engine = engine_for(moondream, block_size=4, max_num_batched_tokens=5)
    assert generate(engine, [prompts[0]]) == [expected[0]]
    assert generate(engine, [prompts[3]]) == [expected[3]]
    assert engine.stats().prefix_cached_tokens == 24
    assert engine.stats().images_encoded == 1


def test_preempted_requests_give_the_same(
    moondream: Moondream, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    for budget in (9, 100):
        tight = tight_cache(moondream, prompts, max_num_batched_tokens=budget)
        for _ in range(2):
            assert generate(tight, prompts) == expected
        assert tight.stats().preemptions > 0


def test_few_images_at_a_time_give_the_same(
    moondream: Moondream, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    engine = engine_for(moondream, max_encoded_images=1, encoder_cache_memory=TOKENS * 48 * 4)
    assert generate(engine, prompts) == expected


def test_text_before_an_image_is_its_prefix(moondream: Moondream) -> None:
    """Tokens of the first block see the image and the words before it, so the block is not that of another."""
    _, image = moondream.make_image(0)
    _, other = moondream.make_image(1)
    engine = engine_for(moondream, block_size=4)
    variants = [([5] * 8, image), ([5] * 8, other), ([5] * 7 + [6], image)]
    asked = [Prompt([*words, *[BEGIN] * TOKENS, 9, 10, 11], (ImageSpan(image, 8),)) for words, image in variants]
    alone = [generate(engine_for(moondream), [prompt])[0] for prompt in asked]
    assert len({tuple(answer) for answer in alone}) == 3
    assert [generate(engine, [prompt])[0] for prompt in asked] == alone
    assert engine.stats().prefix_cached_tokens == 0


def test_without_an_image_tokens_see_what_came_before(moondream: Moondream) -> None:
    prompt = Prompt([BEGIN, 5, 6, 7, 8, 9, 10, 11])
    embeddings = moondream.oracle.embed(prompt.token_ids)
    expected = int(moondream.oracle.logits(embeddings, 0)[-1].argmax())
    for budget in (3, 2048):
        engine = engine_for(moondream, max_num_batched_tokens=budget)
        assert generate(engine, [prompt], max_tokens=1) == [[expected]]


@pytest.mark.usefixtures("kernels")
@torch.inference_mode()
def test_bfloat16_is_within_its_own_rounding(
    moondream: Moondream, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    """Of logits, on average, a few parts in a hundred of their spread."""
    ours = first_logits(engine_for(moondream, dtype="bfloat16"), prompts)
    for (image, _, _), prompt, logits in zip(ASKED, prompts, ours, strict=True):
        embeddings = moondream.oracle.embed(prompt.token_ids)
        embeddings[1 : 1 + TOKENS] = moondream.oracle.see(*moondream.oracle.crops(moondream.make_image(image)[0]))
        exact = moondream.oracle.logits(embeddings, 1 + TOKENS)[-1]
        assert (logits.double() - exact).abs().mean() < 0.04 * exact.std()
