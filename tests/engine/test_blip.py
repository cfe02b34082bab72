"""BLIP in the engine against transformers: captions and answers, whatever else goes on."""

from __future__ import annotations

import pytest
import torch

from tests.blip import CLASSES, TEXT, BlipOracle
from tests.engine.kinds import with_budgets
from tests.engine.test_parity import assert_answers, assert_no_further, engine_for, first_logits, generate, tight_cache
from tests.normalized import normalized
from vlmserve.errors import InvalidImageError, InvalidRequestError, PromptTooLongError
from vlmserve.types import CrossInput, EngineRequest, ImageInput, Prompt, SamplingParams

pytestmark = pytest.mark.usefixtures("native_kernels")

ASKED = [(0, 5, 0), (1, 1, 1), (2, 17, 2), (0, 9, 3), (3, 30, 4), (1, 5, 0), (4, 12, 5), (2, 17, 6), (5, 2, 7)]
"""Image, tokens of text, which text."""


@pytest.fixture(scope="module", params=CLASSES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BlipOracle:
    return BlipOracle.make(tmp_path_factory.mktemp("blip"), request.param)


@pytest.fixture(scope="module")
def prompts(oracle: BlipOracle) -> list[Prompt]:
    return [oracle.prompt(*asked) for asked in ASKED]


@pytest.fixture(scope="module")
def expected(oracle: BlipOracle, prompts: list[Prompt]) -> list[list[int]]:
    return [oracle.greedy(prompt) for prompt in prompts]


@with_budgets
def test_tokens_are_those_of_transformers(
    oracle: BlipOracle, prompts: list[Prompt], expected: list[list[int]], budget: int
) -> None:
    assert len({tuple(answer) for answer in expected}) == len(ASKED), "answers that are alike would prove little"
    engine = engine_for(oracle, block_size=4, max_num_batched_tokens=budget)
    assert_answers(engine, prompts, expected)


def test_preempted_requests_give_the_same(oracle: BlipOracle, prompts: list[Prompt], expected: list[list[int]]) -> None:
    tight = tight_cache(oracle, prompts, max_num_batched_tokens=100)
    assert generate(tight, prompts) == expected
    assert tight.stats().preemptions > 0


def test_cross_states_may_come_and_go(oracle: BlipOracle, prompts: list[Prompt], expected: list[list[int]]) -> None:
    probe = engine_for(oracle)
    cross = probe.runner.model.cross
    assert cross is not None
    largest = max(
        prompt.cross.num_states * cross.state_size * probe.runner.model.dtype.itemsize
        + prompt.cross.image.num_tokens * probe.info.image_token_bytes
        for prompt in prompts
        if prompt.cross is not None
    )
    engine = engine_for(oracle, encoder_cache_memory=largest, max_encoded_images=1)
    for _ in range(2):
        assert generate(engine, prompts) == expected
    assert engine.stats().encoder_cache_pinned == 0
    with pytest.raises(InvalidRequestError, match="encoder-cache-memory"):
        generate(engine_for(oracle, encoder_cache_memory=largest - 1), prompts)


def test_an_image_is_encoded_once(oracle: BlipOracle) -> None:
    engine = engine_for(oracle)
    asked = [oracle.prompt(0, length, length) for length in (1, 4, 9)]
    assert generate(engine, asked) == [oracle.greedy(prompt) for prompt in asked]
    assert generate(engine, asked[:1]) == [oracle.greedy(asked[0])]
    assert engine.stats().images_encoded == 1
    assert (engine.stats().encoder_queries, engine.stats().encoder_hits) == (4, 3)


def test_the_prefix_cache_tells_cross_states_apart(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Token ids are equal, and so would blocks be whose keys knew nothing else."""
    oracle = BlipOracle.make(tmp_path_factory.mktemp("caption"), "caption")
    engine = engine_for(oracle, block_size=4)
    images = [oracle.prompt(image, 22, 0) for image in range(3)]
    expected = [oracle.greedy(prompt) for prompt in images]
    assert len({tuple(answer) for answer in expected}) == 3
    assert [generate(engine, [prompt])[0] for prompt in images] == expected
    assert engine.stats().prefix_cached_tokens == 0
    assert [generate(engine, [prompt])[0] for prompt in images] == expected
    assert engine.stats().prefix_cached_tokens > 3 * 19


def test_the_prefix_cache_tells_questions_apart(tmp_path_factory: pytest.TempPathFactory) -> None:
    oracle = BlipOracle.make(tmp_path_factory.mktemp("question"), "question")
    engine = engine_for(oracle, block_size=1)
    about = [oracle.prompt(image, 6, text) for image, text in ((0, 0), (0, 1), (1, 0))]
    # Prompts that begin alike, though an answer's beginning is nothing that a user gives.
    longer = [Prompt([*prompt.token_ids, 9, 9, 9], cross=prompt.cross) for prompt in about]
    alone = [generate(engine_for(oracle), [prompt])[0] for prompt in longer]
    assert len({tuple(answer) for answer in alone}) == 3
    assert [generate(engine, [prompt])[0] for prompt in longer] == alone
    assert engine.stats().prefix_cached_tokens == 0
    assert [generate(engine, [prompt])[0] for prompt in longer] == alone
    assert engine.stats().prefix_cached_tokens == 9


def test_answers_end_at_the_separator(oracle: BlipOracle, prompts: list[Prompt], expected: list[list[int]]) -> None:
    """Not at config.json's eos_token_id, which transformers does not use for this family either."""
    assert engine_for(oracle).info.end_token_ids == [TEXT["sep_token_id"]]


@pytest.mark.usefixtures("kernels")
@torch.inference_mode()
def test_bfloat16_is_within_its_own_rounding(oracle: BlipOracle, prompts: list[Prompt]) -> None:
    """As far from float32 as transformers' own bfloat16 is, and no further."""

    def of_transformers(dtype: torch.dtype, prompt: Prompt) -> torch.Tensor:
        model = oracle.model.to(dtype)
        assert prompt.cross is not None
        features = model.vision_model(torch.from_numpy(normalized(prompt.cross.image)).to(dtype)).last_hidden_state
        if prompt.cross.token_ids:
            question = torch.tensor([prompt.cross.token_ids])
            features = model.text_encoder(question, encoder_hidden_states=features).last_hidden_state
        decoder = model.text_decoder(torch.tensor([prompt.token_ids]), encoder_hidden_states=features)
        return decoder.logits[0, -1].float()

    try:
        theirs = torch.stack([of_transformers(torch.bfloat16, prompt) for prompt in prompts])
    finally:
        oracle.model = type(oracle.model).from_pretrained(oracle.folder, dtype=torch.float32).eval()
    exact = torch.stack([of_transformers(torch.float32, prompt) for prompt in prompts])
    assert_no_further(first_logits(engine_for(oracle, dtype="bfloat16"), prompts), theirs, exact)


def test_what_does_not_fit_is_refused(oracle: BlipOracle) -> None:
    engine = engine_for(oracle)
    good = oracle.prompt(0, 4, 0)
    assert good.cross is not None

    def refuse(prompt: Prompt, error: type[InvalidRequestError], match: str) -> None:
        with pytest.raises(error, match=match):
            engine.add(EngineRequest("a", prompt, SamplingParams()))

    refuse(Prompt(good.token_ids), InvalidRequestError, "one image with each request")
    small = ImageInput(good.cross.image.key, normalized(good.cross.image)[..., 1:], 10)
    refuse(Prompt([5], cross=CrossInput(small, good.cross.token_ids)), InvalidImageError, "24")
    few = ImageInput(good.cross.image.key, normalized(good.cross.image), 9)
    refuse(Prompt([5], cross=CrossInput(few, good.cross.token_ids)), InvalidImageError, "10 embeddings and has 9")
    if oracle.kind == "caption":
        refuse(Prompt([5], cross=CrossInput(good.cross.image, [5])), InvalidRequestError, "no question")
    else:
        refuse(Prompt([5], cross=CrossInput(good.cross.image)), InvalidRequestError, "ask one")
        refuse(Prompt([5], cross=CrossInput(good.cross.image, [5] * 97)), PromptTooLongError, "97 tokens")
        refuse(Prompt([5], cross=CrossInput(good.cross.image, [5, 202])), InvalidRequestError, "vocabulary")
    assert not engine.has_work()


def test_cross_states_without_memory_fail_alone(
    oracle: BlipOracle, prompts: list[Prompt], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(oracle)
    cross = engine.runner.model.cross
    assert cross is not None

    def encode(self: object, *args: object) -> list[torch.Tensor]:
        raise torch.AcceleratorError("CUDA error: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(cross), "encode", encode)
        engine.add(EngineRequest("a", prompts[0], SamplingParams(temperature=0)))
        outputs = [output for _ in range(3) if engine.has_work() for output in engine.step()]
    assert "too little memory" in str(outputs[-1].error)
    assert generate(engine, prompts[:2]) == expected[:2]
