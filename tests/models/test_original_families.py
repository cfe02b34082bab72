"""Decoders that transformers does not have against their architecture written out in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import change_config
from tests.models.test_decoder import assert_equal, load, paged_run, token_sequences
from tests.oracles.original_decoders import ChatGLM, OriginalDecoder, Qwen
from tests.original_checkpoints import make_chatglm, make_qwen
from vlmserve.errors import UnsupportedModelError
from vlmserve.layer_specs import RopeSpec
from vlmserve.layers.rope import stages
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.registry import load_model

pytestmark = pytest.mark.usefixtures("kernels")

Kind = tuple[type[OriginalDecoder], Any, dict[str, Any]]
KINDS: dict[str, Kind] = {
    "chatglm3": (ChatGLM, make_chatglm, {}),
    "chatglm3, stretched": (ChatGLM, make_chatglm, {"rope_ratio": 50}),
    "chatglm, halves": (ChatGLM, make_chatglm, {"original_rope": False, "multi_query_group_num": 3}),
    "chatglm with biases and layer norms": (ChatGLM, make_chatglm, {"add_bias_linear": True, "rmsnorm": False}),
    "chatglm without biases": (ChatGLM, make_chatglm, {"add_qkv_bias": False}),
    "qwen": (Qwen, make_qwen, {"seq_length": 512}),
    "qwen with biases": (Qwen, make_qwen, {"seq_length": 512, "no_bias": False, "rotary_pct": 0.5}),
    "qwen, queries that grow": (Qwen, make_qwen, {"use_dynamic_ntk": False, "seq_length": 16}),
}


@pytest.mark.parametrize("name", KINDS)
def test_logits_equal_those_of_the_architecture(tmp_path: Path, name: str) -> None:
    oracle_class, make, overrides = KINDS[name]
    folder = make(tmp_path, **overrides)
    sequences = token_sequences(300, [40, 1, 23])
    loaded, oracle = load(folder), oracle_class(folder)
    expected = [oracle.logits(sequence.tolist()).float() for sequence in sequences]
    assert_equal(paged_run(loaded, sequences).finish([9, 9, 9]), expected)
    mixed = paged_run(loaded, sequences)
    mixed.step([33, 0, 5])
    mixed.step([1, 1, 1])
    assert_equal(mixed.finish([1, 1, 11]), expected)


@pytest.mark.parametrize("trait", ["rope_ratio", "original_rope", "rotary_emb_base"])
def test_what_the_config_says_of_positions_matters(tmp_path: Path, trait: str) -> None:
    """Or the tests above would pass without it."""
    oracle_class, make = (Qwen, make_qwen) if trait == "rotary_emb_base" else (ChatGLM, make_chatglm)
    (sequence,) = token_sequences(300, [40])
    folder = make(tmp_path, **({} if make is make_chatglm else {"seq_length": 512}))
    before = oracle_class(folder).logits(sequence.tolist())
    change_config(folder, **{trait: {"rope_ratio": 50, "original_rope": False, "rotary_emb_base": 500}[trait]})
    after = oracle_class(folder).logits(sequence.tolist())
    assert (after - before).abs().max() > 0.1
    assert_equal(paged_run(load(folder), [sequence]).finish([7]), [after.float()])


def test_chatglm_has_its_trained_context(tmp_path: Path) -> None:
    assert load(make_chatglm(tmp_path, seq_length=384)).max_position == 384


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, 256), ({"use_dynamic_ntk": False}, 32), ({"max_position_embeddings": 16}, 32)],
    ids=["stretched", "as trained", "trained on more than it says"],
)
def test_qwen_exceeds_its_trained_context(tmp_path: Path, fields: dict[str, Any], expected: int) -> None:
    assert load(make_qwen(tmp_path, **fields)).max_position == expected


def test_the_base_grows_with_the_prompt() -> None:
    parameters = {"rope_type": "prompt_ntk", "original_max_position_embeddings": 32}
    spec = RopeSpec.from_config(8, 10000.0, parameters, 256)
    lengths = [1, 32, 33, 64, 65, 128, 129, 256]
    assert [spec.level(length) for length in lengths] == [0, 0, 1, 1, 2, 2, 3, 3]
    found = stages(spec, torch.device("cpu"))
    assert [start for start, _ in found] == [0, 256, 512, 768]
    for alpha, (_, frequencies) in zip([1, 3, 7, 15], found, strict=True):
        base = 10000 * alpha ** (8 / 6)
        torch.testing.assert_close(frequencies, torch.tensor([base ** (-2 * i / 8) for i in range(4)]))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"vision_config": {"hidden_size": 8}}, "GLM-4V"),
        ({"position_encoding_2d": True}, "the first ChatGLM-6B"),
        ({"multi_query_attention": False}, "multi_query_attention is False"),
        ({"apply_residual_connection_post_layernorm": True}, "residuals"),
        ({"post_layer_norm": False}, "post_layer_norm"),
        ({"pre_seq_len": 128}, "a learned prefix"),
        ({"quantization_bit": 4}, "few bits"),
    ],
)
def test_chatglms_that_are_otherwise_are_refused(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    folder = make_chatglm(tmp_path)
    change_config(folder, **fields)
    with pytest.raises(UnsupportedModelError, match=says):
        load(folder)


def test_answers_end_where_another_turn_begins(tmp_path: Path) -> None:
    assert load(make_chatglm(tmp_path / "small")).end_token_ids == {2}
    assert load(make_chatglm(tmp_path / "chatglm3", padded_vocab_size=65024)).end_token_ids == {2, 64795, 64797}
    folder = make_qwen(tmp_path / "qwen", vocab_size=151936, hidden_size=8, num_hidden_layers=1)
    (folder / "generation_config.json").write_text('{"chat_format": "chatml", "eos_token_id": 151643}')
    assert load(folder).end_token_ids == {151643, 151644, 151645}


def test_both_names_of_the_architecture_are_known(tmp_path: Path) -> None:
    names = ("ChatGLMModel", "ChatGLMForConditionalGeneration")
    loaded = [load(make_chatglm(tmp_path / name, architectures=[name])) for name in names]
    assert {model.architecture for model in loaded} == {"ChatGLMForConditionalGeneration"}


@pytest.mark.parametrize("name", ["chatglm3", "qwen, queries that grow"])
def test_bfloat16_stays_near(tmp_path: Path, name: str) -> None:
    oracle_class, make, overrides = KINDS[name]
    folder = make(tmp_path, **overrides)
    (sequence,) = token_sequences(300, [40])
    loaded = load_model(folder, LoadSettings(device=torch.device("cpu"), dtype=torch.bfloat16))
    (actual,) = paged_run(loaded, [sequence]).finish([9])
    expected = oracle_class(folder).logits(sequence.tolist()).float()
    assert torch.nn.functional.cosine_similarity(actual, expected).min() > 0.99
