"""GLM-4 and GLM-4.5 in Hugging Face layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vlmserve.families.family import LanguageFamily
from vlmserve.families.gguf import GGUFText, Metadata, with_sections
from vlmserve.families.llama import LLAMA
from vlmserve.families.spec import ArchSpec, Config, ExpertsSpec, HeadNormSpec, Names, NormSpec, require, usual_spec

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
GLM_MOE: Config = {
    **LLAMA,
    "vocab_size": 151552,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "use_qk_norm": False,
    "eos_token_id": None,
}
GLM_MOE_NAMES: Names = (
    (r"\.mlp\.gate\.weight$", ".mlp.router.linear.weight"),
    (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.router.bias"),
    (r"\.mlp\.shared_experts\.", ".mlp.shared."),
)


def _glm(config: Config, **differences: str) -> ArchSpec:
    return usual_spec(config, rope_part=0.5, interleaved=True, qkv_bias=config["attention_bias"], **differences)


def glm_moe(config: Config, **differences: Any) -> ArchSpec:
    """Some dense layers, then mixtures of experts. differences: as in `usual_spec`."""
    groups = "experts are chosen in groups"
    require({"n_group": 1, "topk_group": 1, **config}, {"n_group": (1, groups), "topk_group": (1, groups)})
    experts = ExpertsSpec(
        count=config["n_routed_experts"],
        top_k=config["num_experts_per_tok"],
        inner_size=config["moe_intermediate_size"],
        scores="sigmoid",
        renormalized=config["norm_topk_prob"],
        correction=True,
        scale=config["routed_scaling_factor"],
        shared_size=config["moe_intermediate_size"] * config["n_shared_experts"],
    )
    spec = usual_spec(config, rope_part=0.5, qkv_bias=config["attention_bias"], **differences)
    layers = range(config["num_hidden_layers"])
    return replace(spec, experts=tuple(None if n < config["first_k_dense_replace"] else experts for n in layers))


def _glm4_moe(config: Config) -> ArchSpec:
    norm = HeadNormSpec("head", NormSpec(config["rms_norm_eps"])) if config["use_qk_norm"] else None
    return glm_moe(config, head_norm=norm)


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
    LanguageFamily(
        model_type="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        defaults=GLM_MOE,
        build=_glm4_moe,
        names=GLM_MOE_NAMES,
        models="GLM-4.5 and 4.6 with experts",
    ),
)
