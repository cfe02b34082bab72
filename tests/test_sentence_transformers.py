"""Vectors of models that sentence-transformers wrote, compared with its own; skipped where it is not installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.checkpoints import make_text_model
from vlmserve import LLM
from vlmserve.errors import InvalidRequestError

sentence_transformers = pytest.importorskip("sentence_transformers")
models = pytest.importorskip("sentence_transformers.models")
TEXTS = ["hello", "a red circle", "there is a small blue square on the left", "a"]
SIZE = 48


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_text_model(tmp_path_factory.mktemp("base"), Qwen3ForCausalLM, Qwen3Config)
    (folder / "chat_template.jinja").unlink()  # with it, sentence-transformers makes messages of texts
    return folder


def saved(base: Path, folder: Path, mode: object, dense: str | None, *, normalize: bool, **options: object) -> Path:
    """A model as sentence-transformers writes it. dense: activation of a Dense module. options: of the Transformer."""
    torch.manual_seed(0)
    modules = [models.Transformer(str(base), **options), models.Pooling(SIZE, mode)]
    modules[0].tokenizer.pad_token = modules[0].tokenizer.convert_ids_to_tokens(2)
    if dense is not None:
        modules.append(models.Dense(SIZE, 20, activation_function=getattr(torch.nn, dense)()))
    if normalize:
        modules.append(models.Normalize())
    sentence_transformers.SentenceTransformer(modules=modules, device="cpu").save(str(folder))
    return folder


@pytest.mark.parametrize(
    ("mode", "dense", "normalize"),
    [
        ("mean", None, True),
        ("lasttoken", None, False),
        ("cls", None, True),
        ("mean", "Tanh", True),
        ("lasttoken", "Identity", False),
    ],
)
def test_saved_models_have_the_same_vectors(
    base: Path, tmp_path: Path, mode: str, dense: str | None, normalize: bool
) -> None:
    folder = saved(base, tmp_path / "saved", mode, dense, normalize=normalize)
    expected = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    llm = LLM(str(folder), dtype="float32")
    together = [one.outputs.data for one in llm.embed(TEXTS, use_tqdm=False)]
    alone = [llm.embed(text, use_tqdm=False)[0].outputs.data for text in TEXTS]
    np.testing.assert_allclose(together, expected, atol=1e-4)
    np.testing.assert_allclose(alone, expected, atol=1e-4)


@pytest.mark.parametrize("begins", [False, True])
def test_models_that_read_messages_have_the_same_vectors(tmp_path: Path, begins: bool) -> None:
    base = make_text_model(tmp_path / "base", Qwen3ForCausalLM, Qwen3Config)
    options = {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}} if begins else {}
    folder = saved(base, tmp_path / "saved", "lasttoken", None, normalize=True, **options)
    expected = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    llm = LLM(str(folder), dtype="float32")
    conversations = [[{"role": "user", "content": text}] for text in TEXTS]
    for prompts in (TEXTS, conversations):
        found = [one.outputs.data for one in llm.embed(prompts, use_tqdm=False)]
        np.testing.assert_allclose(found, expected, atol=1e-4)
    scores = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)]
    np.testing.assert_allclose(scores, expected[1:] @ expected[0], atol=1e-4)


@pytest.mark.parametrize("mode", ["max", ("mean", "cls")])
def test_other_pooling_modes_are_rejected_by_name(base: Path, tmp_path: Path, mode: object) -> None:
    llm = LLM(str(saved(base, tmp_path / "saved", mode, None, normalize=True)), engine="mock")
    name = mode if isinstance(mode, str) else "+".join(mode)
    with pytest.raises(InvalidRequestError, match=f"the pooling mode {name}".replace("+", r"\+")):
        llm.embed(TEXTS)
