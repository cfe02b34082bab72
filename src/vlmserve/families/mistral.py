"""Mistral, Ministral 3, and Mistral Small 3, which merges squares of patches of Pixtral's tower."""

from __future__ import annotations

from dataclasses import replace

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.families.family import LanguageFamily, NamedModel, VisionFamily
from vlmserve.families.gguf import GGUFText, Metadata, rope_scaling
from vlmserve.families.llama import LLAMA
from vlmserve.families.pixtral import PIXTRAL_IMAGES
from vlmserve.families.spec import ArchSpec, Config, ExpertsSpec, QueryGrowth, rope_parameters, same_window, usual_spec

_MISTRAL: Config = {
    **LLAMA,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096 * 32,
    "sliding_window": 4096,
}
_MINISTRAL3: Config = {
    **_MISTRAL,
    "vocab_size": 131072,
    "num_hidden_layers": 34,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
    "sliding_window": None,
}
_MIXTRAL: Config = {
    **_MISTRAL,
    "max_position_embeddings": 4096 * 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}


def _mistral(config: Config) -> ArchSpec:
    return usual_spec(config, windows=same_window(config))


def _ministral3(config: Config) -> ArchSpec:
    spec = _mistral(config)
    beta = rope_parameters(config).get("llama_4_scaling_beta")
    rope = spec.ropes[0]
    assert rope is not None
    return spec if beta is None else replace(spec, query_growth=QueryGrowth(rope.original_context, beta))


def _mixtral(config: Config) -> ArchSpec:
    experts = ExpertsSpec(
        count=config["num_local_experts"], top_k=config["num_experts_per_tok"], inner_size=config["intermediate_size"]
    )
    return replace(_mistral(config), experts=(experts,) * config["num_hidden_layers"])


def _gguf_traits(metadata: Metadata) -> Config:
    """A file without query scaling is Mistral Small 3, whose layers are Llama's."""
    growth = metadata.get("attention.temperature_scale")
    if not growth:
        return {"model_type": "llama"}
    scaling = rope_scaling(metadata)
    if scaling is None:
        raise ModelLoadError(f"{metadata.header.path} lacks mistral3.rope.scaling.type, which tells where queries grow")
    original = scaling["original_max_position_embeddings"]
    if metadata.get("attention.temperature_length", original) != original:
        raise UnsupportedModelError(
            f"{metadata.header.path}: queries that grow from another length on than {original} are not supported"
        )
    return {"rope_scaling": {**scaling, "llama_4_scaling_beta": growth}}


FAMILIES = (
    LanguageFamily(
        model_type="mistral",
        architecture="MistralForCausalLM",
        defaults=_MISTRAL,
        build=_mistral,
        models="Mistral, Zephyr",
        short_names=(NamedModel("mistral:7b", "mistralai/Mistral-7B-Instruct-v0.3", 7248023552, 134217728, 134217728),),
    ),
    LanguageFamily(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        defaults=_MIXTRAL,
        build=_mixtral,
        names=(
            (r"\.block_sparse_moe\.", ".mlp."),
            (r"\.mlp\.gate\.", ".mlp.router.linear."),
            (r"\.w1\.", ".gate_proj."),
            (r"\.w2\.", ".down_proj."),
            (r"\.w3\.", ".up_proj."),
        ),
        models="Mixtral",
    ),
    LanguageFamily(
        model_type="ministral3",
        architecture="Ministral3ForCausalLM",
        defaults=_MINISTRAL3,
        build=_ministral3,
        gguf={"mistral3": GGUFText(_gguf_traits, interleaved=True)},
        models="Ministral 3, language model only",
    ),
    VisionFamily(
        model_type="mistral3",
        architecture="Mistral3ForConditionalGeneration",
        text_type="mistral",
        tower="vlmserve.models.vision.pixtral:PixtralVision.merging",
        image_token_id=10,
        **PIXTRAL_IMAGES,
        tied=True,
        models="Mistral Small 3.1 and 3.2, Ministral 3",
    ),
)
