"""Classifiers against transformers' `AutoModelForSequenceClassification`: scores of pairs, and classes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from tests.checkpoints import make_text_model
from tests.server.live import LiveServer
from vlmserve import LLM
from vlmserve.errors import InvalidRequestError

QUERY = "a red circle"
DOCUMENTS = ["there is a circle on the left", "two blue squares"]


def make_classifier(folder: Path, kind: str, num_labels: int) -> Path:
    model, config = {
        "llama": (LlamaForSequenceClassification, LlamaConfig),
        "qwen3": (Qwen3ForSequenceClassification, Qwen3Config),
    }[kind]
    return make_text_model(folder, model, config, num_labels=num_labels, pad_token_id=0)


@torch.inference_mode()
def logits(folder: Path, *texts: str) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)(*texts, return_tensors="pt").input_ids
    return model(input_ids=ids).logits[0].double()


@pytest.mark.parametrize(("kind", "num_labels"), [("llama", 1), ("qwen3", 2)])
def test_pairs_have_transformers_scores(tmp_path, kind, num_labels):
    folder = make_classifier(tmp_path, kind, num_labels)
    found = LLM(str(folder), dtype="float32", max_num_batched_tokens=7).score(QUERY, DOCUMENTS, use_tqdm=False)
    rows = [logits(folder, QUERY, document) for document in DOCUMENTS]
    expected = [row.sigmoid()[0] if num_labels == 1 else row.softmax(0)[1] for row in rows]
    np.testing.assert_allclose([one.outputs.score for one in found], expected, atol=1e-5)


def test_regressions_have_unbounded_scores(tmp_path):
    folder = make_classifier(tmp_path, "llama", 1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "problem_type": "regression"}))
    [found] = LLM(str(folder), dtype="float32").score(QUERY, DOCUMENTS[:1], use_tqdm=False)
    assert found.outputs.score == pytest.approx(float(logits(folder, QUERY, DOCUMENTS[0])), abs=1e-4)


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> Iterator[LiveServer]:
    """A model with three classes."""
    folder = make_classifier(tmp_path_factory.mktemp("three"), "qwen3", 3)
    with LiveServer(folder, engine={"engine": "real", "dtype": "float32"}) as server:
        yield server


def post(server: LiveServer, path: str, **fields) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=fields, timeout=30)


def test_texts_have_transformers_classes(three):
    answer = post(three, "/classify", input=DOCUMENTS).json()
    for document, one in zip(DOCUMENTS, answer["data"], strict=True):
        expected = logits(three.folder, document).softmax(0)
        np.testing.assert_allclose(one["probs"], expected, atol=1e-5)
        assert (one["label"], one["num_classes"]) == (f"LABEL_{int(expected.argmax())}", 3)


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/v1/score", {"queries": "a", "documents": "b"}, "3 classes; scores need one or two: use /classify"),
        ("/v1/embeddings", {"input": "a"}, "has classes, not vectors; use /classify"),
    ],
)
def test_wrong_uses_of_classifiers_are_explained(three, path, fields, message):
    answer = post(three, path, **fields)
    assert (answer.status_code, message in answer.text) == (400, True), answer.text


def test_models_without_classes_say_so(live):
    answer = post(live, "/classify", input="a")
    assert (answer.status_code, "does not classify" in answer.text) == (400, True)


def test_classifiers_embed_nothing(tmp_path):
    llm = LLM(str(make_classifier(tmp_path, "llama", 2)), dtype="float32")
    with pytest.raises(InvalidRequestError, match="has classes, not vectors"):
        llm.embed("a", use_tqdm=False)
