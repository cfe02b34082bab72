"""Scores of pairs against transformers: by yes and no in Qwen's prompt, and by vectors."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from tests.checkpoints import make_text_model
from vlmserve import LLM
from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.scoring import INSTRUCTION, make_scorer

QUERY = "a red circle"
DOCUMENTS = ["there is a circle on the left", "two blue squares", "yes or no"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = make_text_model(tmp_path_factory.mktemp("qwen3"), Qwen3ForCausalLM, Qwen3Config)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def theirs(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def test_yes_and_no_have_transformers_probabilities(folder, theirs):
    llm = LLM(str(folder), dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = [one.outputs.score for one in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    expected = []
    for document in DOCUMENTS:
        text = f"<Instruct>: {INSTRUCTION}\n<Query>: {QUERY}\n<Document>: {document}"
        system = (
            "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that "
            'the answer can only be "yes" or "no".'
        )
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        logits = theirs(input_ids=ids).logits[0, -1].double()
        expected.append(float(logits[[no, yes]].softmax(0)[1]))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert len({round(score, 6) for score in found}) == 3
    [other] = llm.score([QUERY], DOCUMENTS[:1], instruction="Find squares", use_tqdm=False)
    assert other.outputs.score != found[0]


@torch.inference_mode()
def test_embedding_models_compare_vectors(folder, theirs):
    llm = LLM(str(folder), dtype="float32", pooling="mean")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vectors = [theirs.model(input_ids=tokenizer(text, return_tensors="pt").input_ids).last_hidden_state[0].mean(0)
               for text in (QUERY, *DOCUMENTS)]  # fmt: skip
    cosines = torch.nn.functional.cosine_similarity(vectors[0], torch.stack(vectors[1:]), dim=1)
    found = [one.outputs.score for one in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    np.testing.assert_allclose(found, cosines.numpy(), atol=1e-4)
    pairs = llm.score(DOCUMENTS, DOCUMENTS, use_tqdm=False)
    np.testing.assert_allclose([one.outputs.score for one in pairs], 1, atol=1e-6)


def test_vectors_are_dropped_once_they_are_compared(folder):
    scorer = make_scorer(LLM(str(folder), engine="mock", pooling="all").preparer)
    held: list[weakref.ref[np.ndarray]] = []

    def results() -> Iterator[np.ndarray]:
        for number in range(5):
            assert sum(one() is not None for one in held) <= 2, "only the query and the last document"
            vector = np.full((3, 4), number, np.float32)
            held.append(weakref.ref(vector))
            yield vector
            del vector

    assert scorer.scores(results(), 1) == [0.0] * 4


def test_bounded_scores_lie_between_0_and_1(folder):
    query, opposite = np.array([3, 4], np.float32) / 5, np.array([-3, -4], np.float32) / 5
    scorer = make_scorer(LLM(str(folder), engine="mock", pooling="mean").preparer)
    results = [query, query, opposite, np.array([0.8, 0], np.float32)]
    np.testing.assert_allclose(scorer.scores(results, 1, bounded=True), [1, 0, 0.48], rtol=1e-6)
    late = make_scorer(LLM(str(folder), engine="mock", pooling="all").preparer)
    pair = np.stack([query, opposite])
    np.testing.assert_allclose(late.scores([pair, pair, pair[:1]], 1, bounded=True), [1, 0], atol=1e-6)


def test_wrong_pairs_are_explained(folder):
    llm = LLM(str(folder), engine="mock")
    assert llm.score("a", [], use_tqdm=False) == []
    with pytest.raises(InvalidRequestError, match="one query, or one for each document; got 2 for 3"):
        llm.score(["a", "b"], DOCUMENTS)
    with pytest.raises(InvalidRequestError, match="texts or lists of parts"):
        llm.score("a", [3])
    with pytest.raises(InvalidRequestError, match="takes no images"):
        llm.score("a", [{"type": "image", "image": "a.png"}])


def test_models_without_yes_and_no_cannot_judge(tmp_path):
    llm = LLM(str(make_text_model(tmp_path)), engine="mock")
    with pytest.raises(InvalidRequestError, match="cannot judge pairs: it needs a chat template, and yes and no"):
        llm.score("a", "b")
