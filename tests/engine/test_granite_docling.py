"""Granite Docling against transformers, from the files of a checkpoint: prompts, pixels, logits, and tokens of every
schedule."""

from __future__ import annotations

import pytest
import torch

import vlmserve.engine.ranks
from tests.engine.image_parity import CONVERSATIONS, Oracle, check_a_further_turn, check_bfloat16, open_oracle, user
from tests.engine.kinds import with_budgets
from tests.engine.test_parity import assert_answers, engine_for, first_logits, generate, tight_cache
from tests.engine.test_tiles import with_detail
from tests.granite_docling import load_processor, make_granite_docling
from tests.normalized import normalized
from tests.ranks import RankThreads
from vlmserve.types import Prompt

pytestmark = [
    pytest.mark.usefixtures("native_kernels"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = make_granite_docling(tmp_path_factory.mktemp("docling"))
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
        if prompt.images:
            tiles = torch.cat([torch.tensor(normalized(span.image)) for span in prompt.images])
            torch.testing.assert_close(tiles, theirs["pixel_values"][0], atol=1e-5, rtol=0)


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
    assert len({tuple(answer) for answer in expected}) > 4, "answers that are alike would prove little"
    engine = engine_for(oracle, block_size=4, max_num_batched_tokens=budget)
    assert_answers(engine, prompts, expected)


def test_preempted_requests_give_the_same(oracle: Oracle, prompts: list[Prompt], expected: list[list[int]]) -> None:
    tight = tight_cache(oracle, prompts, max_num_batched_tokens=100)
    assert generate(tight, prompts) == expected
    assert tight.stats().preemptions > 0


def test_an_extra_turn_finds_the_first_images(oracle: Oracle) -> None:
    check_a_further_turn(oracle)


def test_two_ranks_give_the_same(
    oracle: Oracle, prompts: list[Prompt], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vlmserve.engine.ranks, "RankProcesses", RankThreads)
    assert generate(engine_for(oracle, tensor_parallel_size=2, max_num_batched_tokens=50), prompts) == expected


@pytest.mark.usefixtures("kernels")
def test_bfloat16_is_within_its_own_rounding(oracle: Oracle, prompts: list[Prompt]) -> None:
    check_bfloat16(oracle, prompts)


def test_budgets_bound_tiles_and_tokens(oracle: Oracle) -> None:
    message = user((90, 50), "What?")
    [whole] = oracle.prompt(message).images
    message["content"][0]["max_tokens"] = 20
    [limited] = oracle.prompt(message).images
    assert limited.image.num_tokens <= 20 < whole.image.num_tokens
    [low] = oracle.preparer.chat([with_detail(user((90, 50), "What?"), "low")]).images
    assert len(low.image.pixels) == 1
