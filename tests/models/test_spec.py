"""Specs from configs: what configs leave out is what transformers presumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    CLIPVisionConfig,
    Gemma4TextConfig,
    Glm4vConfig,
    Glm4vTextConfig,
    Glm46VConfig,
    GlmOcrConfig,
    GlmOcrTextConfig,
    Idefics3Config,
    InternVLConfig,
    Lfm2Config,
    Lfm3Config,
    LlamaConfig,
    LlavaConfig,
    LlavaNextConfig,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    PaddleOCRVLConfig,
    PixtralVisionConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3VLTextConfig,
    SmolVLMConfig,
)

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.families.llava import VISION
from vlmserve.families.registry import LANGUAGE_FAMILIES, VISION_FAMILIES, decoder_spec
from vlmserve.models.sizes import check_sizes
from vlmserve.models.vision.clip import ClipSpec
from vlmserve.models.vision.intern import InternSpec
from vlmserve.models.vision.pixtral import PixtralSpec
from vlmserve.models.vision.qwen_spec import QwenVisionSpec
from vlmserve.models.vision.siglip import IDEFICS3_DEFAULTS, IDEFICS3_KINDS


@pytest.mark.parametrize(
    "config_class",
    [
        LlamaConfig,
        MistralConfig,
        Ministral3Config,
        Qwen2Config,
        Qwen3VLTextConfig,
        GlmOcrTextConfig,
        Glm4vTextConfig,
        Gemma4TextConfig,
        Qwen3_5TextConfig,
        Lfm2Config,
        Lfm3Config,
    ],
)
def test_an_empty_config_means_what_transformers_presumes(config_class: type[Any]) -> None:
    config = config_class()
    complete = config.to_dict()
    assert decoder_spec({"model_type": config.model_type}) == decoder_spec(complete)
    assert LANGUAGE_FAMILIES[config.model_type].defaults["eos_token_id"] == complete.get("eos_token_id")


def test_lfm3_rejects_biases_beside_gates() -> None:
    assert decoder_spec({"model_type": "lfm3", "attention_bias": True, "use_attention_gate": False}).qkv_bias
    with pytest.raises(UnsupportedModelError, match="attention_bias is True"):
        decoder_spec({"model_type": "lfm3", "attention_bias": True})


def test_an_empty_vision_config_means_what_transformers_presumes() -> None:
    assert ClipSpec.from_config({}) == ClipSpec.from_config(CLIPVisionConfig().to_dict())


def test_an_empty_llava_config_means_transformers_defaults() -> None:
    config = LlavaConfig()
    assert ClipSpec.from_config(VISION) == ClipSpec.from_config(config.vision_config.to_dict())
    assert decoder_spec({}) == decoder_spec(config.text_config.to_dict())


@pytest.mark.parametrize("config_class", [Idefics3Config, SmolVLMConfig])
def test_an_empty_splitting_config_means_transformers_defaults(config_class: type[Any]) -> None:
    vision = config_class().vision_config.to_dict()
    complete = ClipSpec.from_config(vision, IDEFICS3_KINDS, {})
    assert ClipSpec.from_config({}, IDEFICS3_KINDS, IDEFICS3_DEFAULTS) == complete


def test_an_empty_internvl_config_means_transformers_defaults() -> None:
    config = InternVLConfig()
    complete = config.vision_config.to_dict()
    assert InternSpec.from_config({}) == InternSpec.from_config(complete)
    family = VISION_FAMILIES["internvl"]
    assert decoder_spec(family.text_config({})) == decoder_spec(config.text_config.to_dict())
    assert family.tied == config.tie_word_embeddings


def test_an_empty_pixtral_config_means_transformers_defaults() -> None:
    assert PixtralSpec.from_config({}) == PixtralSpec.from_config(PixtralVisionConfig().to_dict())
    assert VISION_FAMILIES["mistral3"].tied == Mistral3Config().tie_word_embeddings


@pytest.mark.parametrize("config_class", [GlmOcrConfig, Glm4vConfig, Glm46VConfig, PaddleOCRVLConfig])
def test_an_empty_ocr_config_means_transformers_defaults(config_class: type[Any]) -> None:
    config = config_class()
    complete = config.vision_config.to_dict()
    kind = {"model_type": complete["model_type"]}
    assert QwenVisionSpec.from_config(kind, 1536) == QwenVisionSpec.from_config(complete, 1536)
    family = VISION_FAMILIES[config.model_type]
    assert decoder_spec(family.text_config({})) == decoder_spec(config.text_config.to_dict())
    assert family.tied == config.tie_word_embeddings


@pytest.mark.parametrize(
    "config_class",
    [LlavaConfig, LlavaNextConfig, Idefics3Config, SmolVLMConfig, InternVLConfig, Mistral3Config, GlmOcrConfig,
     PaddleOCRVLConfig],
)  # fmt: skip
def test_unnamed_placeholders_are_those_of_transformers(config_class: type[Any]) -> None:
    config = config_class()
    assert VISION_FAMILIES[config.model_type].placeholder({}) == config.image_token_id


def test_no_window_can_be_asked_for() -> None:
    spec = decoder_spec({"model_type": "mistral", "sliding_window": None})
    assert {attention.window for attention in spec.attention} == {None}


def test_linear_rope_lengthens_the_context() -> None:
    linear = {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert decoder_spec(linear).max_position == 16384
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert decoder_spec({"max_position_embeddings": 131072, "rope_scaling": llama3}).max_position == 131072


def test_another_family_is_refused_naming_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'gpt2'.*llama, ministral3, mistral, .*qwen2"):
        decoder_spec({"model_type": "gpt2"})


@pytest.mark.parametrize("heads", [{"num_key_value_heads": 3}, {"num_attention_heads": 7, "num_key_value_heads": 7}])
def test_heads_that_do_not_divide_are_refused(heads: dict[str, int]) -> None:
    with pytest.raises(ModelLoadError, match="heads"):
        decoder_spec({"hidden_size": 64, "num_attention_heads": 4, **heads})


def test_states_that_no_kernel_can_compute_are_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"5 value heads .*2 key heads"):
        decoder_spec({"model_type": "qwen3_5_text", "linear_num_key_heads": 2, "linear_num_value_heads": 5})
    with pytest.raises(UnsupportedModelError, match="without any layer with attention"):
        decoder_spec({"model_type": "lfm2", "full_attn_idxs": []})


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mixtral", "num_experts_per_tok": 9},
        {"model_type": "qwen3_moe", "num_experts_per_tok": 0},
        {"model_type": "qwen3_moe", "num_experts": 10**12},
        {"model_type": "gemma4_text", "enable_moe_block": True, "num_experts": 8, "top_k_experts": 9,
         "moe_intermediate_size": 8},
    ],
    ids=["more than all", "none", "too many", "gemma4"],
)  # fmt: skip
def test_routers_choose_some_of_the_experts(config: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=r"tokens take \d+ of \d+ experts; allowed are 1 to all"):
        decoder_spec(config)


@pytest.mark.parametrize("name", ["linear_num_key_heads", "linear_conv_kernel_dim", "conv_L_cache"])
def test_sizes_of_states_are_above_zero(name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"{name} is 0; allowed are 1 to"):
        check_sizes({"text_config": {name: 0}}, Path("config.json"))
