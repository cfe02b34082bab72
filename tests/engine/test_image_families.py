"""Granite Docling and Muse Glimmer against transformers, from the files of a checkpoint: prompts, pixels, logits, and
tokens of every schedule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import vlmserve.engine.ranks
from tests import granite_docling, muse_glimmer
from tests.engine.image_parity import CONVERSATIONS, Oracle, check_a_further_turn, check_bfloat16, open_oracle, user
from tests.engine.kinds import with_budgets
from tests.engine.test_parity import NEW_TOKENS, assert_answers, bytes_of_4, engine_for, first_logits, generate
from tests.engine.test_tiles import with_detail
from tests.normalized import normalized
from tests.ranks import RankThreads
from vlmserve.types import Prompt

pytestmark = [
    pytest.mark.usefixtures("native_kernels"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


LONG = 40
"""Tokens of an answer."""


class Family(NamedTuple):
    make: Callable[[Path], Path]
    load_processor: Callable[[Path], Any]
    pixels: Callable[[list[Tensor], Tensor], tuple[Tensor, Tensor]]
    """Ours, of all images, and transformers', in one layout."""


FAMILIES = {
    "Granite Docling": Family(
        granite_docling.make_granite_docling,
        granite_docling.load_processor,
        lambda own, theirs: (torch.cat(own), theirs[0]),
    ),
    "Muse Glimmer": Family(
        muse_glimmer.make_muse_glimmer,
        muse_glimmer.load_processor,
        lambda own, theirs: (torch.cat([muse_glimmer.rows_of(pixels)[0] for pixels in own]), theirs),
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def oracle(name: str, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = FAMILIES[name].make(tmp_path_factory.mktemp("checkpoint"))
    return open_oracle(folder, FAMILIES[name].load_processor(folder))


@pytest.fixture(scope="module")
def prompts(oracle: Oracle) -> list[Prompt]:
    return [oracle.prompt(message) for message in CONVERSATIONS]


@pytest.fixture(scope="module")
def expected(oracle: Oracle, prompts: list[Prompt]) -> list[list[int]]:
    guesses = generate(engine_for(oracle), prompts)
    return [oracle.greedy(message, guess=guess) for message, guess in zip(CONVERSATIONS, guesses, strict=True)]


def test_prompts_and_pixels_are_those_of_transformers(name: str, oracle: Oracle, prompts: list[Prompt]) -> None:
    for message, prompt in zip(CONVERSATIONS, prompts, strict=True):
        theirs = oracle.inputs(message)
        text = [{position + span.start: id_ for position, id_ in span.image.text} for span in prompt.images]
        written = {position: id_ for of_image in text for position, id_ in of_image.items()}
        ids = [written.get(position, id_) for position, id_ in enumerate(prompt.token_ids)]
        assert ids == theirs["input_ids"][0].tolist()
        if prompt.images:
            own = [torch.tensor(normalized(span.image)) for span in prompt.images]
            torch.testing.assert_close(*FAMILIES[name].pixels(own, theirs["pixel_values"]), atol=1e-5, rtol=0)


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
    """Answers are long, because layers with windows need few blocks for short ones."""
    alone = [generate(engine_for(oracle), [prompt], max_tokens=LONG)[0] for prompt in prompts]
    assert [answer[:NEW_TOKENS] for answer in alone] == expected
    blocks = (max(len(prompt.token_ids) for prompt in prompts) + LONG) // 4 + 4
    memory = blocks * bytes_of_4(oracle.folder)
    tight = engine_for(oracle, kv_cache_memory=memory, block_size=4, max_num_batched_tokens=100)
    assert generate(tight, prompts, max_tokens=LONG) == alone
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


@pytest.mark.parametrize("name", ["Granite Docling"], indirect=True)
def test_budgets_bound_tiles_and_tokens(oracle: Oracle) -> None:
    message = user((90, 50), "What?")
    [whole] = oracle.prompt(message).images
    message["content"][0]["max_tokens"] = 20
    [limited] = oracle.prompt(message).images
    assert limited.image.num_tokens <= 20 < whole.image.num_tokens
    [low] = oracle.preparer.chat([with_detail(user((90, 50), "What?"), "low")]).images
    assert len(low.image.pixels) == 1


@pytest.mark.parametrize("name", ["Muse Glimmer"], indirect=True)
def test_budgets_count_the_tokens_around_images(oracle: Oracle) -> None:
    message = user((90, 50), "What?")
    for most, grid in ((11, 9), (4, 2), (3, 1)):
        message["content"][0]["max_tokens"] = most
        [span] = oracle.prompt(message).images
        processor = muse_glimmer.load_processor(oracle.folder)
        processor.image_processor.max_image_tokens = most - 2
        theirs = processor.image_processor(message["content"][0]["image"])
        assert span.image.num_tokens - 2 == theirs["image_grid_thw"].prod() // 4 <= grid
