"""The small LLaVA's recipe: what it changes of its language model, and what it learns from."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from training.llava import PLACEHOLDER, assemble, conversation, reorder_channels, train
from training.pixie.export import IMAGE_TOKENS, new_model
from vlmserve.models.hub import resolve_model


def make_language_model(*, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1100, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, head_dim=8, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_channels_in_another_order_compute_the_same(tied: bool) -> None:
    model = make_language_model(tied=tied)
    tokens = torch.arange(40)[None]
    before, weight = model(tokens).logits, model.model.layers[1].mlp.down_proj.weight.clone()
    reorder_channels(model, torch.Generator().manual_seed(0))
    assert not torch.equal(model.model.layers[1].mlp.down_proj.weight, weight)
    torch.testing.assert_close(model(tokens).logits, before, atol=1e-5, rtol=1e-5)


def test_the_projector_learns_and_all_else_stays() -> None:
    tokenizer = Tokenizer.from_file(str(resolve_model("pixie") / "tokenizer.json"))
    tokenizer.add_special_tokens([PLACEHOLDER])
    placeholder = tokenizer.token_to_id(PLACEHOLDER)

    class Encoder:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            return ids

    image, tokens, said = conversation(Encoder(), 5)
    assert image.shape == (108, 108, 3)
    assert tokens.count(placeholder) == IMAGE_TOKENS
    assert 0 < sum(said) < len(said) == len(tokens)
    model = assemble(make_language_model(tied=True), new_model(), placeholder)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    train(model, Encoder(), steps=1, batch=1, rate=1e-2)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed
    assert all("multi_modal_projector" in name for name in changed)
