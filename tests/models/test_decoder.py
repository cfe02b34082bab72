"""The decoder against transformers, in float32."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.checkpoints import make_llama, make_text_model
from tests.paged import BlockTables, PagedRun
from vlmserve.models.decoder import Decoder
from vlmserve.models.image_rows import LayerFeatures
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.protocols import LoadedModel
from vlmserve.models.registry import load_model

pytestmark = pytest.mark.usefixtures("kernels")

LENGTHS = [1, 37, 2, 16, 8, 64, 3, 15, 17, 5, 33, 1, 11, 4, 20, 9]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "explicit head size": {"head_dim": 24},
    "one head each": {"num_key_value_heads": 6},
    "one key-value head": {"num_key_value_heads": 1},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "gelu": {"hidden_act": "gelu"},
}


def load(folder: Path) -> LoadedModel:
    return load_model(folder, LoadSettings(device=torch.device("cpu"), dtype=torch.float32))


def token_sequences(vocab_size: int, lengths: list[int] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in lengths]


MOST_COMPUTED = 128
_COMPUTED: dict[bytes, list[torch.Tensor]] = {}
"""Logits by the files and the tokens of which they are, the oldest first: tests with either kind of kernels ask for the
same."""


@torch.inference_mode()
def transformers_logits(folder: Path, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    asked = hashlib.sha256(b"".join(path.read_bytes() for path in files))
    asked.update(repr([sequence.tolist() for sequence in sequences]).encode())
    same = asked.digest()
    if same not in _COMPUTED:
        if len(_COMPUTED) == MOST_COMPUTED:
            del _COMPUTED[next(iter(_COMPUTED))]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        _COMPUTED[same] = [model(input_ids=sequence[None]).logits[0] for sequence in sequences]
    return [logits.clone() for logits in _COMPUTED[same]]


def paged_run(loaded: LoadedModel, sequences: list[torch.Tensor], block_size: int = 4) -> PagedRun:
    model = loaded.language_model
    return PagedRun(model, [model.embed(sequence) for sequence in sequences], block_size)


def assert_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert max(logits.abs().max() for logits in expected) > 1, "logits near zero would agree whatever they are"
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("overrides", LLAMAS.values(), ids=LLAMAS)
def test_logits_of_llama_equal_transformers(tmp_path: Path, overrides: dict[str, Any]) -> None:
    folder = make_llama(tmp_path, **overrides)
    sequences = token_sequences(300, [40, 1, 23])
    actual = paged_run(load(folder), sequences).finish([9, 9, 9])
    assert_equal(actual, transformers_logits(folder, sequences))


@pytest.mark.parametrize(
    ("model_class", "config_class", "overrides"),
    [
        (MistralForCausalLM, MistralConfig, {"sliding_window": 7}),
        (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
        (Qwen2ForCausalLM, Qwen2Config, {}),
        (Qwen2ForCausalLM, Qwen2Config, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    ],
    ids=["mistral", "mistral without a window", "qwen2", "qwen2 with windows"],
)
def test_logits_of_llama_s_relatives_equal_transformers(
    tmp_path: Path, model_class: Any, config_class: Any, overrides: dict[str, Any]
) -> None:
    folder = make_text_model(tmp_path, model_class, config_class, **overrides)
    sequences = token_sequences(300, [40, 1, 23])
    actual = paged_run(load(folder), sequences).finish([9, 9, 9])
    assert_equal(actual, transformers_logits(folder, sequences))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[torch.Tensor]:
    return transformers_logits(llama, token_sequences(300))


@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_a_flat_batch_of_sixteen_prompts_equals_transformers(
    llama: Path, expected: list[torch.Tensor], block_size: int
) -> None:
    assert_equal(paged_run(load(llama), token_sequences(300), block_size).finish([64] * 16), expected)


def test_prompts_in_chunks_of_seven_equal_transformers(llama: Path, expected: list[torch.Tensor]) -> None:
    assert_equal(paged_run(load(llama), token_sequences(300)).finish([7] * 16), expected)


def test_decodes_equal_transformers(llama: Path, expected: list[torch.Tensor]) -> None:
    assert_equal(paged_run(load(llama), token_sequences(300)).finish([1] * 16), expected)


def test_decodes_beside_chunks_equal_transformers(llama: Path, expected: list[torch.Tensor]) -> None:
    run = paged_run(load(llama), token_sequences(300))
    run.step([0, 30, 0, 5] * 4)
    run.step([1, 1, 2, 1] * 4)
    assert_equal(run.finish([1, 3, 1, 20] * 4), expected)


def test_greedy_answers_equal_transformers(llama: Path) -> None:
    prompt = token_sequences(300, [20])[0]
    reference = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    generated = reference.generate(prompt[None], max_new_tokens=20, do_sample=False, eos_token_id=-1, pad_token_id=0)
    run = paged_run(load(llama), [generated[0]])
    run.step([20])
    logits = torch.cat(run.finish([1]))
    assert logits[19:-1].argmax(-1).tolist() == generated[0, 20:].tolist()


@pytest.mark.parametrize(
    ("model_class", "config_class", "deepstack"),
    [
        (LlamaForCausalLM, LlamaConfig, 0),
        (LlamaForCausalLM, LlamaConfig, 2),
        (LlamaForCausalLM, LlamaConfig, 3),
        (Glm4ForCausalLM, Glm4Config, 0),
        (PhiForCausalLM, PhiConfig, 0),
    ],
    ids=["llama", "features of 2 layers", "of all 3", "norms of outputs", "parallel"],
)
@torch.inference_mode()
def test_rows_that_are_wanted_are_those_of_all(
    tmp_path: Path, model_class: Any, config_class: Any, deepstack: int
) -> None:
    """Two decodes and two chunks, of which the cache gets all keys and values."""
    decoder = load(make_text_model(tmp_path, model_class, config_class, pad_token_id=0)).language_model
    assert isinstance(decoder, Decoder)
    decoder.spec = dataclasses.replace(decoder.spec, deepstack=deepstack)
    chunks = [(0, 3, 1), (1, 5, 1), (2, 0, 10), (3, 4, 16)]
    blocks = BlockTables([20] * 4, 4)
    torch.manual_seed(0)
    embeddings = torch.randn(28, decoder.hidden_size)
    features = [LayerFeatures(4, 9, torch.randn(5, deepstack * decoder.hidden_size))] if deepstack else []
    positions = torch.cat([torch.arange(before, before + new) for _, before, new in chunks])
    step = embeddings, positions, blocks.metadata(chunks)
    caches = decoder.allocate_cache(blocks.num_blocks, 4)
    everything = decoder.forward(*step, caches, features)
    for wanted in ([0, 1, 11, 27], [5], []):
        others = decoder.allocate_cache(blocks.num_blocks, 4)
        rows = decoder.forward(*step, others, features, torch.tensor(wanted, dtype=torch.int64))
        torch.testing.assert_close(rows, everything[wanted])
        for one, other in zip(caches, others, strict=True):
            torch.testing.assert_close(one.keys, other.keys)
            torch.testing.assert_close(one.values, other.values)


def test_cache_size_is_told_and_allocated_alike(llama: Path) -> None:
    model = load(llama).language_model
    caches = model.allocate_cache(5, 16)
    assert len(caches) == 3
    allocated = sum(tensor.nbytes for cache in caches for tensor in (cache.keys, cache.values))
    assert allocated == 5 * model.cache_bytes(16).block


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    folder = make_llama(tmp_path)
    sequences = token_sequences(300, [40, 23])
    exact = transformers_logits(folder, sequences)
    loaded = load_model(folder, LoadSettings(device=torch.device("cpu"), dtype=torch.bfloat16))
    for ours, theirs in zip(paged_run(loaded, sequences).finish([1, 9]), exact, strict=True):
        assert ours.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(ours, theirs).min() > 0.99


def test_parameters_are_counted_once(tmp_path: Path) -> None:
    folder = make_text_model(tmp_path, LlamaForCausalLM, LlamaConfig, tie_word_embeddings=True)
    reference = AutoModelForCausalLM.from_pretrained(folder)
    assert load(folder).num_parameters == reference.num_parameters()
