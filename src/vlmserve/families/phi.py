"""Phi 1 to 4."""

from __future__ import annotations

from vlmserve.families.family import LanguageFamily, NamedModel
from vlmserve.families.gguf import GGUFText, Metadata
from vlmserve.families.llama import LLAMA
from vlmserve.families.spec import GPT, ArchSpec, Config, HeadNormSpec, Names, NormSpec, same_window, usual_spec

PHI_MLP_NAMES: Names = ((r"\.mlp\.fc1\.", ".mlp.up_proj."), (r"\.mlp\.fc2\.", ".mlp.down_proj."))
_NAMES: Names = (
    *PHI_MLP_NAMES,
    (r"\.([qk])_layernorm\.", r".\1_norm."),
    (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
    (r"^final_layernorm\.", "norm."),
)
_PHI: Config = {
    **LLAMA,
    "vocab_size": 51200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-5,
    "qk_layernorm": False,
}
_PHI3: Config = {
    **LLAMA,
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "eos_token_id": 32000,
}


def _phi(config: Config) -> ArchSpec:
    norm = NormSpec(config["layer_norm_eps"], layer=True)
    return usual_spec(
        config,
        norm=norm,
        head_norm=HeadNormSpec("head", norm, bias=True) if config["qk_layernorm"] else None,
        rope_part=0.5,
        parallel=True,
        **GPT,
        head_bias=True,
    )


def _phi3(config: Config) -> ArchSpec:
    return usual_spec(config, windows=same_window(config))


def _phi_traits(metadata: Metadata) -> Config:
    return {"layer_norm_eps": metadata["attention.layer_norm_epsilon"]}


def _phi3_traits(metadata: Metadata) -> Config:
    return {
        "sliding_window": metadata.get("attention.sliding_window") or None,
        "original_max_position_embeddings": metadata.get("rope.scaling.original_context_length")
        or metadata["context_length"],
    }


FAMILIES = (
    LanguageFamily(
        model_type="phi",
        architecture="PhiForCausalLM",
        defaults=_PHI,
        build=_phi,
        names=_NAMES,
        gguf={"phi2": GGUFText(_phi_traits)},
        models="Phi 1, 1.5 and 2",
    ),
    LanguageFamily(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        defaults=_PHI3,
        build=_phi3,
        gguf={"phi3": GGUFText(_phi3_traits, merged_gate=True, strips_space=True)},
        models="Phi 3, 3.5 and 4",
        short_names=(NamedModel("phi4-mini:3.8b", "microsoft/Phi-4-mini-instruct", 3836021760, 614596608),),
    ),
)
