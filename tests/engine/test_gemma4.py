"""Gemma 4 with images against transformers' model, and prompts whose last layers compute the last token alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from tests.engine.image_parity import make_image
from tests.engine.test_qwen_chat import assistant, tokens, user
from tests.gemma4 import LARGE, NAMED, image_inputs, make_gemma4, make_unified, open_theirs
from vlmserve import LLM, SamplingParams
from vlmserve.types import Prompt

NEW_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
IMAGES = [make_image(40, 30), make_image(20, 60), make_image(90, 10)]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [user(IMAGES[0], "What is in the picture?")],
    [user("Hi"), assistant("Hello world"), user("First", IMAGES[1], "then\n", IMAGES[2], "\n?")],
    [user("How many green triangles are there?")],
    [user("The end of it is ", IMAGES[1])],
]


@dataclass
class Oracle:
    """A checkpoint and transformers' opinion of it."""

    folder: Path
    model: nn.Module

    def llm(self, **settings: Any) -> LLM:
        settings = {"kv_cache_memory": "16MiB", "dtype": "float32", "device": "cpu", "block_size": 4, **settings}
        return LLM(str(self.folder), **settings)

    @torch.inference_mode()
    def greedy(self, prompt: Prompt, images: Sequence[Image.Image]) -> list[int]:
        ids = torch.tensor([prompt.token_ids])
        if self.model.config.model_type == "gemma4_unified":
            return self._greedy_of_masks(ids, image_inputs(images, unified=True) if images else {})
        inputs = image_inputs(images) if images else {}
        inputs["mm_token_type_ids"] = (ids == self.model.config.image_token_id).long()
        generated = self.model.generate(input_ids=ids, **inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        return list(generated[0, ids.shape[1] :].tolist())

    def _greedy_of_masks(self, ids: torch.Tensor, inputs: dict[str, torch.Tensor]) -> list[int]:
        """By the masks that transformers prepares for compiled models. Those of its other calls let images attend ahead
        in all layers, which Google's own code does not."""
        length, images = ids.shape[1], ids == self.model.config.image_token_id
        for _ in range(NEW_TOKENS):
            seen = torch.nn.functional.pad(images.long(), (0, ids.shape[1] - length))
            masks = self.model.create_masks_for_generate(
                self.model.config,
                self.model.get_input_embeddings()(ids),
                torch.ones_like(ids),
                None,
                torch.arange(ids.shape[1])[None],
                mm_token_type_ids=seen,
            )
            logits = self.model(input_ids=ids, attention_mask=masks, mm_token_type_ids=seen, **inputs).logits
            ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
        return list(ids[0, length:].tolist())


def _oracle(folder: Path) -> Oracle:
    model = open_theirs(folder)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return Oracle(folder, model)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return _oracle(make_gemma4(tmp_path_factory.mktemp("gemma4"), vision={"use_clipped_linears": True}))


@pytest.fixture(scope="module")
def expected(oracle: Oracle) -> list[list[int]]:
    return _expected(oracle)


def _expected(oracle: Oracle) -> list[list[int]]:
    preparer = oracle.llm(load="lazy").preparer
    answers = []
    for conversation in CONVERSATIONS:
        prompt = preparer.chat(conversation, allow_local=True)
        parts = [
            part for message in conversation if isinstance(message["content"], list) for part in message["content"]
        ]
        answers.append(oracle.greedy(prompt, [part["image"] for part in parts if part["type"] == "image"]))
    return answers


def test_images_stand_between_their_tokens(oracle: Oracle) -> None:
    preparer = oracle.llm(load="lazy").preparer
    prompt = preparer.chat(CONVERSATIONS[0], allow_local=True)
    begin, end, placeholder = (preparer.tokenizer.token_id(token) for token in NAMED.values())
    [span] = prompt.images
    shown = prompt.token_ids[span.start : span.start + span.image.num_tokens]
    assert shown == [begin, *[placeholder] * (len(shown) - 2), end]
    assert begin not in prompt.token_ids[: span.start]
    assert 60 < len(shown) - 2 <= 70


def test_videos_are_images_after_their_times(oracle: Oracle) -> None:
    preparer = oracle.llm(load="lazy").preparer
    video = {"type": "video", "video": IMAGES[:2], "fps": 0.4}
    shown = preparer.chat([{"role": "user", "content": [video, {"type": "text", "text": "What?"}]}], allow_local=True)
    said = preparer.chat([user("00:00 ", IMAGES[0], " 00:02 ", IMAGES[1], "What?")], allow_local=True)
    assert shown.token_ids == said.token_ids
    assert len(shown.images) == 2


@pytest.mark.parametrize("budget", [9, 30, 2048])
def test_answers_are_those_of_transformers(oracle: Oracle, expected: list[list[int]], budget: int) -> None:
    assert len({tuple(answer) for answer in expected}) == len(expected), "answers that are alike would prove little"
    llm = oracle.llm(max_num_batched_tokens=budget)
    assert tokens(llm.chat(CONVERSATIONS, GREEDY, use_tqdm=False)) == expected
    again = llm.chat(CONVERSATIONS, GREEDY, use_tqdm=False)
    assert tokens(again) == expected
    assert all(result.num_cached_tokens > 0 for result in again)


@pytest.mark.parametrize("make", [partial(make_gemma4, **LARGE), make_unified], ids=["tower", "unified"])
def test_images_attend_ahead_within_windows(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    oracle = _oracle(make(tmp_path))
    expected = _expected(oracle)
    for settings in ({}, {"kernels": "torch"}):
        llm = oracle.llm(max_num_batched_tokens=80, **settings)
        for _ in range(2):
            assert tokens(llm.chat(CONVERSATIONS, GREEDY, use_tqdm=False)) == expected
    causal = json.loads((tmp_path / "config.json").read_text())
    causal["text_config"]["use_bidirectional_attention"] = None
    (tmp_path / "config.json").write_text(json.dumps(causal))
    assert tokens(oracle.llm().chat(CONVERSATIONS, GREEDY, use_tqdm=False)) != expected


def test_scored_prompts_skip_no_rows(oracle: Oracle, expected: list[list[int]]) -> None:
    llm = oracle.llm(max_num_batched_tokens=30)
    scored = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, prompt_logprobs=0)
    params = [scored, GREEDY, GREEDY, scored]
    results = llm.chat(CONVERSATIONS, params, use_tqdm=False)
    assert tokens(results) == expected
    alone = oracle.llm().chat(CONVERSATIONS[:1], scored, use_tqdm=False)
    ours, theirs = (
        [one.logprob for place in result.prompt_logprobs if place for one in place.values()]
        for result in (results[0], alone[0])
    )
    assert len(ours) > 10
    assert ours == pytest.approx(theirs, abs=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_read_all_rows(oracle: Oracle, pooling: str) -> None:
    ids = [[3, 9, 4, 21, 7, 30, 11], [5, 8, 2, 40, 12]]
    llm = oracle.llm(max_num_batched_tokens=9, pooling=pooling)
    for ours, one in zip(llm.embed([{"prompt_token_ids": one} for one in ids], use_tqdm=False), ids, strict=True):
        states = oracle.model.model(input_ids=torch.tensor([one])).last_hidden_state[0]
        theirs = states.mean(0) if pooling == "mean" else states[-1]
        torch.testing.assert_close(torch.tensor(ours.outputs.embedding), theirs / theirs.norm(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("settings", [{"quantize": "int8"}, {"quantize": "int4"}, {"kv_cache_dtype": "int8"}])
def test_skipped_rows_change_no_rounded_answers(oracle: Oracle, settings: dict[str, str]) -> None:
    """One step of all prompts, and steps of one token, in which no row is skipped."""
    skipping, whole = oracle.llm(**settings), oracle.llm(max_num_batched_tokens=4, **settings)
    asked = [CONVERSATIONS[2], CONVERSATIONS[0]]
    first, second = (llm.chat(asked, GREEDY, use_tqdm=False) for llm in (skipping, whole))
    assert tokens(first) == tokens(second)
