"""Llama and models with its layers."""

from __future__ import annotations

from typing import Any

from vlmserve.families.family import LanguageFamily, NamedModel
from vlmserve.families.gguf import GGUFText, Metadata
from vlmserve.families.spec import ArchSpec, Config, usual_spec

LLAMA: Config = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "eos_token_id": 2,
}


def _llama(config: Config) -> ArchSpec:
    bias = config.get("attention_bias", False)
    return usual_spec(config, qkv_bias=bias, output_bias=bias, mlp_bias=config.get("mlp_bias", False))


def _gguf_traits(metadata: Metadata) -> dict[str, Any]:
    """Files of Mistral's models have the same architecture. The first model has a window, Mixtral has experts."""
    window = metadata.get("attention.sliding_window")
    if count := metadata.get("expert_count", 0):
        return {
            "model_type": "mixtral",
            "num_local_experts": count,
            "num_experts_per_tok": metadata["expert_used_count"],
            "sliding_window": window or None,
        }
    return {"model_type": "mistral", "sliding_window": window} if window else {}


FAMILIES = (
    LanguageFamily(
        model_type="llama",
        architecture="LlamaForCausalLM",
        defaults=LLAMA,
        build=_llama,
        gguf={"llama": GGUFText(_gguf_traits, interleaved=True, has_experts=True)},
        models="Llama 1 to 3.3, Vicuna, Yi, SmolLM 1 and 2",
        short_names=(
            NamedModel("smollm2:135m", "HuggingFaceTB/SmolLM2-135M-Instruct", 134515008, 28311552),
            NamedModel("smollm2:360m", "HuggingFaceTB/SmolLM2-360M-Instruct", 361821120, 47185920),
            NamedModel("smollm2:1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", 1711376384, 100663296),
            NamedModel("llama3.2:1b", "meta-llama/Llama-3.2-1B-Instruct", 1235814400, 262668288),
            NamedModel("llama3.2:3b", "meta-llama/Llama-3.2-3B-Instruct", 3212749824, 394002432),
            NamedModel("llama3.1:8b", "meta-llama/Llama-3.1-8B-Instruct", 8030261248, 525336576, 525336576),
        ),
    ),
)
