"""GLM-4 in Hugging Face layout."""

from __future__ import annotations

from vlmserve.families.family import LanguageFamily
from vlmserve.families.gguf import GGUFText, Metadata, with_sections
from vlmserve.families.llama import LLAMA
from vlmserve.families.spec import ArchSpec, Config, Names, usual_spec

GLM4_NAMES: Names = (
    (r"\.post_self_attn_layernorm\.", ".attention_output_norm."),
    (r"\.post_mlp_layernorm\.", ".mlp_output_norm."),
)
_GLM: Config = {
    **LLAMA,
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
}


def _glm(config: Config, **differences: str) -> ArchSpec:
    return usual_spec(config, rope_part=0.5, interleaved=True, qkv_bias=config["attention_bias"], **differences)


def _glm4_traits(metadata: Metadata) -> Config:
    """Files of vision-language models have sections."""
    return with_sections(metadata) if metadata.sections else {}


FAMILIES = (
    LanguageFamily(
        model_type="glm",
        architecture="GlmForCausalLM",
        defaults=_GLM,
        build=_glm,
        gguf={"chatglm": GGUFText(merged_gate=True)},
        models="GLM-4 9B (-hf)",
    ),
    LanguageFamily(
        model_type="glm4",
        architecture="Glm4ForCausalLM",
        defaults=_GLM,
        build=lambda config: _glm(config, norms="sandwich"),
        names=GLM4_NAMES,
        gguf={"glm4": GGUFText(_glm4_traits, halved=True, merged_gate=True, has_sections=True)},
        models="GLM-4-0414",
    ),
)
