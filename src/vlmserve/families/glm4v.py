"""GLM-4.1V (https://arxiv.org/abs/2507.01006), GLM-4.5V and GLM-4.6V: GLM's decoders with M-RoPE, and one tower."""

from __future__ import annotations

from typing import Any, Final

from vlmserve.families.family import LanguageFamily, NamedModel, VisionFamily
from vlmserve.families.glm import GLM4_NAMES, GLM_MOE, GLM_MOE_NAMES, glm_moe
from vlmserve.families.llama import LLAMA
from vlmserve.families.qwen2_vl import QWEN_TOWER
from vlmserve.families.spec import ArchSpec, Config, Names, usual_spec, with_sections

_TEXT: Config = {
    **LLAMA,
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "eos_token_id": None,
}
_MOE_TEXT: Config = {**GLM_MOE, "vocab_size": 151424, "max_position_embeddings": 65536, "attention_bias": True}
_SECTIONS: Final = [8, 12, 12]


def _glm4v(config: Config) -> ArchSpec:
    return usual_spec(with_sections(config, _SECTIONS), interleaved=True, norms="sandwich", qkv_bias=True)


def _glm4v_moe(config: Config) -> ArchSpec:
    return glm_moe(with_sections(config, _SECTIONS))


_NAMES: Names = (
    # Layers after the tower belong to its merger here.
    (r"visual\.(downsample|post_layernorm)\.", r"visual.merger.\1."),
    (r"visual\.post_conv_layernorm\.", "visual.patch_norm."),
    (r"visual\.embeddings\.position_embedding\.", "visual.pos_embed."),
)
_FIELDS: Final[dict[str, Any]] = {"names": _NAMES, **QWEN_TOWER, "image_processor_types": ("Glm4",)}
_NINE: Final = (10292777472, 620756992, 1513255424)
"""Weights of `NamedModel`."""

FAMILIES = (
    LanguageFamily(model_type="glm4v_text", defaults=_TEXT, build=_glm4v, names=GLM4_NAMES),
    LanguageFamily(model_type="glm4v_moe_text", defaults=_MOE_TEXT, build=_glm4v_moe, names=GLM_MOE_NAMES),
    VisionFamily(
        model_type="glm4v",
        architecture="Glm4vForConditionalGeneration",
        text_type="glm4v_text",
        **_FIELDS,
        image_token_id=151343,
        models="GLM-4.1V 9B",
        short_names=(NamedModel("glm4.1v:9b", "zai-org/GLM-4.1V-9B-Thinking", *_NINE),),
    ),
    VisionFamily(
        model_type="glm46v",
        architecture="Glm46VForConditionalGeneration",
        text_type="glm4v_text",
        **_FIELDS,
        image_token_id=151343,
        video_token_id=151344,
        videos=True,
        frame_ends={"image_start_token_id": 151339, "image_end_token_id": 151340},
        frames_are_images=True,
        models="GLM-4.6V-Flash",
        short_names=(NamedModel("glm4.6v-flash:9b", "zai-org/GLM-4.6V-Flash", *_NINE),),
    ),
    VisionFamily(
        model_type="glm4v_moe",
        architecture="Glm4vMoeForConditionalGeneration",
        text_type="glm4v_moe_text",
        **_FIELDS,
        image_token_id=151363,
        models="GLM-4.5V, GLM-4.6V",
        short_names=(NamedModel("glm4.5v:106b", "zai-org/GLM-4.5V", 107710933120, 620756992, 1479438848),),
    ),
)
