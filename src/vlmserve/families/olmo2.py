"""OLMo 2 (https://arxiv.org/abs/2501.00656)."""

from __future__ import annotations

from vlmserve.errors import UnsupportedModelError
from vlmserve.families.family import LanguageFamily
from vlmserve.families.gguf import GGUFText, Metadata
from vlmserve.families.llama import LLAMA
from vlmserve.families.spec import ArchSpec, Config, HeadNormSpec, Names, NormSpec, usual_spec

_OLMO2: Config = {**LLAMA, "vocab_size": 50304, "rms_norm_eps": 1e-5, "eos_token_id": 50279}
_NAMES: Names = (
    (r"\.post_attention_layernorm\.", ".attention_output_norm."),
    (r"\.post_feedforward_layernorm\.", ".mlp_output_norm."),
)


def _olmo2(config: Config) -> ArchSpec:
    return usual_spec(
        config,
        norms="output",
        head_norm=HeadNormSpec("row", NormSpec(config["rms_norm_eps"])),
        qkv_bias=config["attention_bias"],
        output_bias=config["attention_bias"],
    )


def _olmo2_traits(metadata: Metadata) -> Config:
    if metadata.get("attention.sliding_window"):
        raise UnsupportedModelError(f"{metadata.header.path}: OLMo with windows (OLMo 3) is not supported")
    return {}


FAMILIES = (
    LanguageFamily(
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        defaults=_OLMO2,
        build=_olmo2,
        names=_NAMES,
        gguf={"olmo2": GGUFText(_olmo2_traits)},
        models="OLMo 2",
    ),
)
