"""PaliGemma's prompts and tokens are those of transformers: batched, cut where that is possible, cached, preempted."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PaliGemmaForConditionalGeneration

from tests.engine.test_transformers_images import (
    GREEDY,
    NEW_TOKENS,
    Oracle,
    answers,
    check_preempted,
    conversation,
    make_paligemma,
    make_paligemma2,
)
from tests.models.test_decoder import load
from vlmserve import LLM
from vlmserve.tasks import Score
from vlmserve.types import EngineRequest, Prompt, SamplingParams


@pytest.fixture(scope="module", params=[make_paligemma, make_paligemma2], ids=["gemma", "gemma 2"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle.of(request.param(tmp_path_factory.mktemp("paligemma")))


def own(oracle: Oracle, **settings: Any) -> LLM:
    return LLM(str(oracle.folder), **{"dtype": "float32", "kv_cache_memory": "8MiB", "block_size": 4, **settings})


@pytest.mark.usefixtures("native_kernels")
def test_tokens_are_those_of_transformers(oracle: Oracle) -> None:
    conversations = [conversation(images) for images in oracle.images]
    llm = own(oracle)
    found = llm.chat(conversations, GREEDY, use_tqdm=False)
    assert [result.prompt_token_ids for result in found] == oracle.prompts
    assert [result.outputs[0].token_ids for result in found] == oracle.answers
    assert answers(llm, conversations[:1]) == oracle.answers[:1], "with what is cached of it"
    assert answers(own(oracle, max_num_batched_tokens=9), conversations[::-1]) == oracle.answers[::-1]
    check_preempted(oracle, llm, partial(own, oracle))


@torch.inference_mode()
def test_embeddings_equal_transformers(oracle: Oracle) -> None:
    theirs = PaliGemmaForConditionalGeneration.from_pretrained(oracle.folder, dtype=torch.float32).eval()
    vision = load(oracle.folder).vision
    assert vision is not None
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    [embeddings] = vision.encode([pixels])
    torch.testing.assert_close(embeddings, theirs.model.get_image_features(pixels).pooler_output[0], atol=1e-4, rtol=0)
    vision.check(tuple(pixels.shape), len(embeddings))
    assert vision.products(tuple(pixels.shape)) > 0


@pytest.mark.parametrize("oracle", [make_paligemma], indirect=True, ids=["gemma"])
@pytest.mark.usefixtures("native_kernels")
def test_prompts_that_see_ahead_decide(oracle: Oracle) -> None:
    """Answers are no part of what sees ahead: their tokens are scored as they would be generated."""
    llm = own(oracle)
    [found] = llm.chat([conversation(oracle.images[0])], GREEDY, use_tqdm=False)
    prompt = llm.preparer.chat(conversation(oracle.images[0]), allow_local=True)
    likeliest = tuple(found.outputs[0].token_ids)
    choices = [likeliest, *((*likeliest[:4], token) for token in (3, 5))]
    scores = decide(llm, prompt, choices)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1)
    [found] = llm.chat([conversation(oracle.images[0])], params, use_tqdm=False)
    assert scores[0] == pytest.approx(found.outputs[0].cumulative_logprob, abs=1e-3)


def decide(llm: LLM, prompt: Prompt, choices: list[tuple[int, ...]]) -> list[float]:
    """Log probabilities of continuations."""
    llm.engine.add(EngineRequest("scores", prompt, task=Score(tuple(choices))))
    results = []
    while llm.engine.has_work():
        results += [output.result for output in llm.engine.step() if output.result is not None]
    return np.frombuffer(results[0].data, "<f4").tolist()
