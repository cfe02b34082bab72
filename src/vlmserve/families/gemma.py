"""Gemma (https://arxiv.org/abs/2403.08295) and Gemma 2 (https://arxiv.org/abs/2408.00118)."""

from __future__ import annotations

from typing import Any

from vlmserve.errors import UnsupportedModelError
from vlmserve.families.family import LanguageFamily
from vlmserve.families.gguf import GGUFText, Metadata
from vlmserve.families.llama import LLAMA
from vlmserve.families.spec import ArchSpec, Config, Names, NormSpec, layer_windows, usual_spec

_GEMMA: Config = {
    **LLAMA,
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": None,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
GEMMA2: Config = {
    **_GEMMA,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
# Other families call the norm before the MLP post_attention_layernorm.
SANDWICH_NAMES: Names = (
    (r"\.post_attention_layernorm\.", ".attention_output_norm."),
    (r"\.pre_feedforward_layernorm\.", ".mlp_norm."),
    (r"\.post_feedforward_layernorm\.", ".mlp_output_norm."),
)


def gemma(config: Config, **differences: Any) -> ArchSpec:
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError("bidirectional attention (use_bidirectional_attention) is not supported")
    return usual_spec(
        config,
        norm=NormSpec(config["rms_norm_eps"], offset=1.0),
        activation=config.get("hidden_activation") or config.get("hidden_act") or "gelu_pytorch_tanh",
        embedding_scale=config["hidden_size"] ** 0.5,
        qkv_bias=config["attention_bias"],
        output_bias=config["attention_bias"],
        **differences,
    )


def gemma2(config: Config, windows: list[int | None], **differences: Any) -> ArchSpec:
    return gemma(
        config,
        windows=windows,
        scale=config["query_pre_attn_scalar"] ** -0.5,
        soft_cap=config["attn_logit_softcapping"],
        logit_cap=config["final_logit_softcapping"],
        norms="sandwich",
        **differences,
    )


def gemma2_traits(metadata: Metadata, *, largest: int) -> Config:
    """largest: number of layers of the one model whose attention scale does not follow from the head size."""
    return {
        "attention_bias": False,
        "query_pre_attn_scalar": _query_scalar(metadata, largest=largest),
        "sliding_window": metadata.get("attention.sliding_window"),
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping"),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
    }


def _query_scalar(metadata: Metadata, *, largest: int) -> float:
    """Attention scores are divided by the square root of this number, which files omit."""
    if (scale := metadata.get("attention.scale")) is not None:
        return float(scale) ** -2
    if metadata["block_count"] == largest:
        return float(metadata["embedding_length"] / metadata["attention.head_count"])
    return float(metadata["attention.key_length"])


def _gemma2_traits(metadata: Metadata) -> Config:
    metadata["attention.sliding_window"]
    return gemma2_traits(metadata, largest=46)


FAMILIES = (
    LanguageFamily(
        model_type="gemma",
        architecture="GemmaForCausalLM",
        defaults=_GEMMA,
        build=gemma,
        gguf={"gemma": GGUFText(lambda metadata: {"attention_bias": False}, norm_offset=1.0)},
        models="Gemma",
    ),
    LanguageFamily(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        defaults=GEMMA2,
        build=lambda config: gemma2(config, layer_windows(config, lambda layer: layer % 2 == 0)),
        names=SANDWICH_NAMES,
        gguf={"gemma2": GGUFText(_gemma2_traits, norm_offset=1.0)},
        models="Gemma 2",
    ),
)
