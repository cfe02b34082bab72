"""Merged checkpoints, as transformers computes them, against PEFT."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlavaForConditionalGeneration
from typer.testing import CliRunner

from tests.adapters.test_parity import LLAMA_CASES, LLAVA_CASES, PARTS
from tests.checkpoints import make_llama, make_llava
from tests.engine.test_parity import Oracle, llava_oracle, text_oracle
from tests.peft_adapters import make_adapter
from vlmserve.adapters.merge import merge_adapter
from vlmserve.cli import app
from vlmserve.errors import AdapterError, ConfigurationError


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> tuple[Oracle, Oracle]:
    folder = tmp_path_factory.mktemp("bases")
    return llava_oracle(folder / "llava"), text_oracle(make_llama(folder / "llama", tie_word_embeddings=True))


@pytest.mark.parametrize("case", [case for case in LLAVA_CASES if case != "bias of the second factor"])
def test_a_merged_vlm_gives_the_logits_of_peft(bases, tmp_path, case):
    oracle = bases[0]
    adapted = make_adapter(oracle.model, tmp_path / "adapter", **LLAVA_CASES[case])
    assert merge_adapter(oracle.folder, tmp_path / "adapter", tmp_path / "merged") > 0
    merged = LlavaForConditionalGeneration.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert_same_logits(oracle, adapted, merged, PARTS[0])


@pytest.mark.parametrize("case", LLAMA_CASES)
def test_merging_unties_embeddings_where_it_has_to(bases, tmp_path, case):
    oracle = bases[1]
    adapted = make_adapter(oracle.model, tmp_path / "adapter", **LLAMA_CASES[case])
    command = ["merge-lora", str(oracle.folder), str(tmp_path / "adapter"), str(tmp_path / "merged")]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    assert "tensors changed" in result.stdout
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert merged.config.tie_word_embeddings == (case in ("tied tokens", "tied modules"))
    assert_same_logits(oracle, adapted, merged, (30,))


def assert_same_logits(oracle: Oracle, adapted: torch.nn.Module, merged: torch.nn.Module, parts) -> None:
    prompt, answer = oracle.prompt(3, *parts), [5, 6, 7]
    expected, found = (
        Oracle(oracle.folder, model, oracle.image_token, oracle.image_shape, oracle.image_tokens, oracle.vocab_size)
        .forward(prompt, answer)
        for model in (adapted, merged)
    )  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_what_cannot_be_merged_is_refused(bases, tmp_path):
    llava, llama = bases
    make_adapter(llava.model, tmp_path / "biased", **LLAVA_CASES["bias of the second factor"])
    with pytest.raises(AdapterError, match="would get a bias"):
        merge_adapter(llava.folder, tmp_path / "biased", tmp_path / "merged")
    with pytest.raises(AdapterError, match=r"would be|has no layer"):
        merge_adapter(llama.folder, tmp_path / "biased", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    with pytest.raises(ConfigurationError, match="new or an empty folder"):
        merge_adapter(llava.folder, tmp_path / "biased", tmp_path)
    make_llava(tmp_path / "other", published_names=True)
    make_adapter(llava.model, tmp_path / "good", **LLAVA_CASES["dora"])
    assert merge_adapter(tmp_path / "other", tmp_path / "good", tmp_path / "published") > 0
