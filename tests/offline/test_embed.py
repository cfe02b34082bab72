"""`LLM.embed` and `AsyncLLM.embed`: vectors of texts, token ids, images and conversations, in order."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from tests.checkpoints import make_text_model, rename_tensors
from tests.mock_checkpoint import make_mock_checkpoint
from vlmserve import LLM, AsyncLLM
from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.deciding import Question

TEXTS = ["hello", "a red circle", "there is a small blue square on the left"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_mock_checkpoint(tmp_path_factory.mktemp("mock"))


@pytest.fixture(scope="module")
def mock_llm(folder) -> LLM:
    return LLM(str(folder), engine="mock")


def test_embedding_repr_shows_no_values(mock_llm):
    [result] = mock_llm.embed("hello", use_tqdm=False)
    assert repr(result.outputs) == f"PoolingOutput(shape=({len(result.outputs.embedding)},))"


def vectors(llm: LLM, prompts: object, **options) -> np.ndarray:
    return np.stack([result.outputs.data for result in llm.embed(prompts, use_tqdm=False, **options)])


def test_texts_have_the_vectors_of_transformers(tmp_path):
    folder = make_text_model(tmp_path, Qwen3ForCausalLM, Qwen3Config)
    llm = LLM(str(folder), dtype="float32", pooling="mean", max_num_batched_tokens=16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = []
    for text in TEXTS:
        with torch.inference_mode():
            states = model.model(input_ids=tokenizer(text, return_tensors="pt").input_ids).last_hidden_state[0]
        expected.append(torch.nn.functional.normalize(states.mean(0)[:6], dim=0).numpy())
    np.testing.assert_allclose(vectors(llm, TEXTS, dimensions=6), np.stack(expected), atol=1e-4)


def test_checkpoints_without_heads_have_vectors(tmp_path):
    whole = make_text_model(tmp_path / "whole", Qwen3ForCausalLM, Qwen3Config)
    expected = vectors(LLM(str(whole), dtype="float32"), TEXTS)
    bare = make_text_model(tmp_path / "bare", Qwen3ForCausalLM, Qwen3Config)
    rename_tensors(bare, lambda name: None if name.startswith("lm_head") else name.removeprefix("model."))
    write_modules(bare, Transformer={}, Pooling={"pooling_mode": "lasttoken"}, Normalize={})
    np.testing.assert_allclose(vectors(LLM(str(bare), dtype="float32"), TEXTS), expected, atol=1e-6)


def test_dense_modules_follow_pooling(tmp_path):
    folder = make_text_model(tmp_path, Qwen3ForCausalLM, Qwen3Config)
    write_modules(folder, Transformer={}, Pooling={"pooling_mode": "mean"})
    expected = torch.from_numpy(vectors(LLM(str(folder), dtype="float32"), TEXTS))
    dense = {"activation_function": "torch.nn.modules.activation.Tanh"}
    write_modules(folder, Transformer={}, Pooling={"pooling_mode": "mean"}, Dense=dense, Normalize={})
    layer = torch.nn.Linear(48, 20)
    save_file(
        {f"linear.{name}": value for name, value in layer.state_dict().items()}, folder / "2" / "model.safetensors"
    )
    llm = LLM(str(folder), dtype="float32")
    with torch.inference_mode():
        whole = layer(expected).tanh()
    np.testing.assert_allclose(vectors(llm, TEXTS), torch.nn.functional.normalize(whole), atol=1e-5)
    kept = torch.nn.functional.normalize(whole[:, :7])
    np.testing.assert_allclose(vectors(llm, TEXTS, dimensions=7), kept, atol=1e-5)
    with pytest.raises(InvalidRequestError, match="dimensions must be from 1 to 20"):
        llm.embed("a", dimensions=21)


@pytest.mark.parametrize("name", ["pixie", "random"])
def test_quantized_vectors_have_the_stated_cosine(tmp_path, name):
    model = name
    if name == "random":
        sizes = {"hidden_size": 64, "intermediate_size": 128}
        model = str(make_text_model(tmp_path, Qwen3ForCausalLM, Qwen3Config, **sizes))
    options = {"kv_cache_memory": "8MiB", "pooling": "last"}
    expected = vectors(LLM(model, dtype="float32", **options), TEXTS)
    for scheme, least in (("int8", 0.999), ("int4", 0.95)):
        found = vectors(LLM(model, quantize=scheme, **options), TEXTS)
        assert (found != expected).any()
        assert (found * expected).sum(1).min() > least, scheme


def write_modules(folder: Path, **configs: dict[str, str]) -> None:
    """Modules of sentence-transformers by the names of their classes, in folders 0, 1 and so on."""
    modules = [{"path": str(place), "type": f"a.{name}"} for place, name in enumerate(configs)]
    (folder / "modules.json").write_text(json.dumps(modules))
    for place, config in enumerate(configs.values()):
        (folder / str(place)).mkdir(exist_ok=True)
        (folder / str(place) / "config.json").write_text(json.dumps(config))


def test_prompts_of_all_kinds_have_vectors(mock_llm):
    image = Image.new("RGB", (40, 30), "red")
    conversation = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "a"}]}]
    token_ids = mock_llm.preparer.encode("hello")
    found = vectors(mock_llm, ["hello", token_ids, {"prompt_token_ids": token_ids}, conversation])
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()
    assert not np.allclose(found[0], found[3])
    assert (vectors(mock_llm, conversation)[0] == found[3]).all()
    assert len(mock_llm.embed("hello", use_tqdm=False)[0].outputs.embedding) == 64


def test_dimensions_keep_leading_elements(mock_llm):
    whole, kept = vectors(mock_llm, "hello")[0], vectors(mock_llm, "hello", dimensions=8)[0]
    np.testing.assert_allclose(kept, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
    with pytest.raises(InvalidRequestError, match="dimensions must be from 1 to 64"):
        mock_llm.embed("hello", dimensions=65)


def test_long_prompts_are_truncated_where_asked(mock_llm):
    [result] = mock_llm.embed("one two three four five", truncate_prompt_tokens=2, use_tqdm=False)
    assert len(result.prompt_token_ids) == 2


def test_wrong_prompts_are_named_before_any_runs(mock_llm):
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\]"):
        mock_llm.embed(["a", {"text": "b"}], use_tqdm=False)
    fine, wrong = mock_llm.embed(["a", {"text": "b"}], use_tqdm=False, on_error="return")
    assert isinstance(wrong, InvalidRequestError)
    assert fine.outputs.error is None


def test_salts_separate_what_is_cached(tmp_path):
    llm = LLM(str(make_text_model(tmp_path, Qwen3ForCausalLM, Qwen3Config)), dtype="float32", pooling="last")

    def cached(prompt: object, salt: str | None) -> int:
        return llm.embed(prompt, use_tqdm=False, cache_salt=salt)[0].num_cached_tokens

    embedded, scored = (f"{word} red circle on the left of two small blue squares " * 4 for word in ("a", "the"))
    conversation = [{"role": "user", "content": "two small blue squares " * 8}]
    llm.embed(embedded, use_tqdm=False, cache_salt="one")
    llm.score("a", scored, use_tqdm=False, cache_salt="one")
    llm.decide(conversation, [Question.predicate("b")], use_tqdm=False, cache_salt="one")
    for prompt in (embedded, scored, conversation):
        assert cached(prompt, None) == cached(prompt, "other") == 0
        assert cached(prompt, "one") > 0


def test_async_vectors_are_the_same(folder, mock_llm):
    async def embed() -> list[np.ndarray]:
        async with AsyncLLM(str(folder), engine="mock") as llm:
            streamed = [result async for result in llm.embed(TEXTS, stream=True)]
            return [result.outputs.data for result in [*await llm.embed(TEXTS), *streamed]]

    found = asyncio.run(embed())
    assert (np.stack(found) == vectors(mock_llm, TEXTS * 2)).all()
