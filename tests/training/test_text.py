"""The small language model's recipe: what it reads, and that it learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from training import text
from vlmserve import LLM, SamplingParams
from vlmserve.perplexity import python_manual


def test_all_inputs_are_multiples_of_the_largest_groups() -> None:
    products = [module for module in text.new_model(0).modules() if isinstance(module, torch.nn.Linear)]
    assert len(products) == 6 * 7 + 1
    assert all(product.in_features % 128 == 0 for product in products)


def test_the_beginning_of_the_manual_is_not_read() -> None:
    documents, manual = text.texts(), python_manual()
    assert len(documents) > 400
    kept, left_out = documents[-1], manual[: text.LEFT_OUT]
    assert left_out + kept == manual
    assert len(left_out) == text.LEFT_OUT
    assert not any(left_out[10_000:10_500] in document for document in documents)


def test_it_learns_and_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = "for name in names: print(name)\n" * 400
    tokenizer = text.train_tokenizer([sample])
    assert tokenizer.decode(tokenizer(sample)["input_ids"]) == sample
    tokens = torch.tensor(tokenizer(text.END.join([sample] * 3))["input_ids"])
    monkeypatch.setattr(text, "LENGTH", 32)
    model = text.new_model(tokenizer.eos_token_id)

    def loss() -> float:
        ids: Tensor = tokens[None, :200]
        with torch.inference_mode():
            return float(model(input_ids=ids, labels=ids).loss)

    before = loss()
    text.train(model, tokens, steps=20, batch=4, rate=3e-3)
    assert loss() < before / 2
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), kv_cache_memory="16MiB", max_model_len=256)
    (output,) = llm.generate("for name in names:", SamplingParams(temperature=0, max_tokens=4))
    assert output.outputs[0].text.strip()
