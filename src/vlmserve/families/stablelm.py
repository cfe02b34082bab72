from __future__ import annotations

from vlmserve.families.family import LanguageFamily
from vlmserve.families.gguf import GGUFText, Metadata
from vlmserve.families.llama import LLAMA
from vlmserve.families.spec import ArchSpec, Config, HeadNormSpec, NormSpec, usual_spec

_STABLELM: Config = {
    **LLAMA,
    "vocab_size": 50304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5,
    "use_qkv_bias": False,
    "qk_layernorm": False,
    "use_parallel_residual": False,
    "eos_token_id": 0,
}


def _stablelm(config: Config) -> ArchSpec:
    norm = NormSpec(config["layer_norm_eps"], layer=True)
    return usual_spec(
        config,
        norm=norm,
        head_norm=HeadNormSpec("each head", norm) if config["qk_layernorm"] else None,
        rope_part=0.25,
        parallel=config["use_parallel_residual"],
        qkv_bias=config["use_qkv_bias"],
    )


def _stablelm_traits(metadata: Metadata) -> Config:
    return {
        "layer_norm_eps": metadata["attention.layer_norm_epsilon"],
        "use_qkv_bias": metadata.has("attn_q.bias"),
        "qk_layernorm": metadata.has("attn_q_norm.weight"),
        "use_parallel_residual": not metadata.has("ffn_norm.weight"),
    }


FAMILIES = (
    LanguageFamily(
        model_type="stablelm",
        architecture="StableLmForCausalLM",
        defaults=_STABLELM,
        build=_stablelm,
        names=((r"\.([qk])_layernorm\.norms\.", r".\1_norm."),),
        gguf={"stablelm": GGUFText(_stablelm_traits)},
        models="StableLM 1 and 2",
    ),
)
