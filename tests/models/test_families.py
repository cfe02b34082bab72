"""Every decoder family against transformers' own class, in float32, each with every trait that its configs can have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.checkpoints import MINISTRAL_ROPE, QWEN35, make_text_model
from tests.models.test_decoder import assert_equal, load, paged_run, token_sequences, transformers_logits

pytestmark = pytest.mark.usefixtures("kernels")

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.0, 2.0, 4.0, 7.0],
    "original_max_position_embeddings": 64,
    "factor": 8.0,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LFM3 = {
    "num_hidden_layers": 5,
    "head_dim": 16,
    "sliding_window": 9,
    "norm_eps": 1e-5,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
SHARING = ["sliding_attention", "full_attention"] * 3
GEMMA4: dict[str, Any] = {
    "head_dim": 8,
    "global_head_dim": 16,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 400,
    "sliding_window": 5,
    "final_logit_softcapping": 5.0,
    "layer_types": SHARING,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with yarn": ("Llama", {"rope_parameters": YARN}),
    "llama with truncated yarn": ("Llama", {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 8}}),
    "llama with dynamic rope": ("Llama", {"rope_parameters": DYNAMIC}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "ministral3": ("Ministral3", {"head_dim": 8, "rope_parameters": MINISTRAL_ROPE}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 with biases": ("Qwen3", {"head_dim": 8, "attention_bias": True}),
    "phi": ("Phi", {"num_key_value_heads": 6, "partial_rotary_factor": 0.5, "rms_norm_eps": None}),
    "phi with normed heads": ("Phi", {"qk_layernorm": True, "num_key_value_heads": 2}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "phi3 with a window": ("Phi3", {"pad_token_id": 0, "sliding_window": 9}),
    "phi3 with longrope, short": ("Phi3", {"pad_token_id": 0, "rope_parameters": LONGROPE}),
    "stablelm": ("StableLm", {"num_key_value_heads": 6}),
    "stablelm 2": ("StableLm", {"use_qkv_bias": True, "use_parallel_residual": True, "qk_layernorm": True}),
    "starcoder2": ("Starcoder2", {}),
    "starcoder2 with a window": ("Starcoder2", {"sliding_window": 6, "use_bias": False}),
    "gpt_bigcode": ("GPTBigCode", {"n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 512, "n_inner": 80}),
    "glm": ("Glm", {"head_dim": 8, "pad_token_id": 0}),
    "glm4": ("Glm4", {"head_dim": 16, "pad_token_id": 0}),
    "gemma": ("Gemma", {"head_dim": 8, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 20}),
    "gemma3": ("Gemma3", {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 20, "layer_types": SLIDING}),
    "gemma4": ("Gemma4", GEMMA4),
    "gemma4 without sharing": ("Gemma4", {**GEMMA4, "num_kv_shared_layers": 0}),
    "gemma4 with keys as values": (
        "Gemma4",
        {
            **GEMMA4,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "smollm3": ("SmolLM3", {"pad_token_id": 0, "no_rope_layers": [1, 1, 0]}),
    "olmo2": ("Olmo2", {}),
    "olmo2 with biases": ("Olmo2", {"attention_bias": True}),
}
ONLY_POSITIONS = (
    "llama with yarn", "llama with truncated yarn", "llama with dynamic rope", "phi3 with a window",
    "phi3 with longrope, short", "mistral", "ministral3", "smollm3", "starcoder2 with a window",
)  # fmt: skip
"""Where positions turn otherwise, or attention goes less far, than in others that have the same layers."""

HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5", QWEN35),
    "qwen3.5 with shared keys": (
        "Qwen3_5",
        {
            **QWEN35,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 16,  # native kernels take multiples of 16
            "linear_value_head_dim": 16,
            "attention_bias": True,
        },
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-5, "block_multiple_of": 16}),
    "lfm3": ("Lfm3", LFM3),
    "lfm3 without gates": (
        "Lfm3",
        {**LFM3, "use_attention_gate": False, "use_sandwich_norm": False, "attention_bias": True, "head_dim": 8},
    ),
}
"""Families with layers that have states."""
QWEN3_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 8}
GLM_MOE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "routed_scaling_factor": 1.5,
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),
    "qwen3_moe": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3_moe with dense layers": ("Qwen3Moe", {**QWEN3_MOE, "mlp_only_layers": [0], "attention_bias": True}),
    "glm4_moe": (
        "Glm4Moe",
        {**GLM_MOE, "use_qk_norm": True, "attention_bias": True, "pad_token_id": 0, "n_shared_experts": 2},
    ),
    "gemma4 with experts": (
        "Gemma4",
        {
            **GEMMA4,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
    ),
    "qwen3.5 with experts": (
        "Qwen3_5Moe",
        {
            **QWEN35,
            **QWEN3_MOE,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "shared_expert_intermediate_size": 32,
        },
    ),
}
"""Families with experts."""


def make(folder: Path, name: str) -> Path:
    family, overrides = (FAMILIES | HYBRIDS | MIXTURES)[name]
    kind = "TextConfig" if family in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe") else "Config"
    config_class = getattr(transformers, family + kind)
    return make_text_model(folder, getattr(transformers, family + "ForCausalLM"), config_class, **overrides)


@pytest.mark.parametrize("name", [*FAMILIES, *HYBRIDS, *MIXTURES])
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path, name)
    sequences = token_sequences(300, [40, 1, 23])
    loaded = load(folder)
    expected = transformers_logits(folder, sequences)
    assert_equal(paged_run(loaded, sequences).finish([9, 9, 9]), expected)
    mixed = paged_run(loaded, sequences)
    mixed.step([33, 0, 5])
    mixed.step([1, 1, 1])
    assert_equal(mixed.finish([1, 1, 11]), expected)
