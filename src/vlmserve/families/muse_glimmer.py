"""Muse Glimmer 30B: gated attention whose full layers have no positions, and a windowed tower."""

from __future__ import annotations

from vlmserve.families.family import LanguageFamily, NamedModel, VisionFamily, vision_section
from vlmserve.families.gemma import SANDWICH_NAMES
from vlmserve.families.llama import LLAMA
from vlmserve.families.qwen2_vl import QWEN_TOWER
from vlmserve.families.spec import (
    ArchSpec,
    Config,
    HeadNormSpec,
    Names,
    NormSpec,
    layer_windows,
    require,
    usual_rope,
    usual_spec,
)

_TEXT: Config = {
    **LLAMA,
    "vocab_size": 202048,
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_activation": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "sliding_window": 2048,
    "final_logit_softcapping": 20.0,
    "qk_scale_factor": 3.87,
    "output_multiplier": 26**-0.5,
    "post_norm_eps": 1e-8,
    "layer_rope_theta": None,
    "eos_token_id": 200001,
}


def _muse_glimmer(config: Config) -> ArchSpec:
    require(config, {"attention_bias": (False, "biases of attention beside its gates")})
    layers, eps = config["num_hidden_layers"], config["rms_norm_eps"]
    bases = config["layer_rope_theta"] or [(layers - 1 - layer) % 4 for layer in range(layers)]
    rope = usual_rope(config, config["head_dim"])
    return usual_spec(
        config,
        windows=layer_windows(config, lambda layer: (layers - 1 - layer) % 4 != 0),
        ropes=[rope if base else None for base in bases],
        scale=config["qk_scale_factor"] * config["head_dim"] ** -0.5,
        norm=NormSpec(eps, offset=1.0),
        output_norm=NormSpec(config["post_norm_eps"], offset=1.0),
        final_norm=NormSpec(eps),
        norms="sandwich",
        head_norm=HeadNormSpec("head", NormSpec(eps), weights=False),
        token_norm_eps=eps,
        activation=config["hidden_activation"],
        output_gate="projected",
        logit_scale=config["output_multiplier"],
        logit_cap=config["final_logit_softcapping"],
        max_position=config["max_position_embeddings"],
    )


def _vision(config: Config) -> Config:
    """With what the adapter takes from other parts of config.json."""
    text = config.get("text_config")
    return {
        "model_type": "muse_glimmer_vision",
        **vision_section(config),
        "projector_hidden_size": config.get("projector_hidden_size", 4096),
        "projector_hidden_act": config.get("projector_hidden_act", "gelu"),
        "output_eps": {**_TEXT, **(text or {})}["rms_norm_eps"],
    }


_TOWER = r"^(?:model\.)?vision_tower\."
_NAMES: Names = (
    (_TOWER + r"patch_embedder\.patch_embedding\.", "visual.patch_embed.proj."),
    (_TOWER + r"patch_embedder\.position_embedding_table\.", "visual.pos_embed."),
    (_TOWER + r"ln_pre\.", "visual.patch_norm."),
    (_TOWER + r"ln_post\.", "visual.merger.post_layernorm."),
    (_TOWER + r"layers\.", "visual.blocks."),
    (r"^(?:model\.)?vision_(?:adapter\.(fc\d)|(projection))\.", r"visual.merger.\1\2."),
)

FAMILIES = (
    LanguageFamily(model_type="muse_glimmer_text", defaults=_TEXT, build=_muse_glimmer, names=SANDWICH_NAMES),
    VisionFamily(
        model_type="muse_glimmer",
        architecture="MuseGlimmerForConditionalGeneration",
        text_type="muse_glimmer_text",
        names=_NAMES,
        **{
            **QWEN_TOWER,
            "image_processor": "vlmserve.media.muse_glimmer:MuseGlimmerProcessor.from_files",
        },
        image_processor_types=("MuseGlimmer",),
        vision_config=_vision,
        image_token_id=200092,
        models="Muse Glimmer 30B",
        short_names=(
            NamedModel("muse-glimmer:30b", "meta-models/Muse-Glimmer-30B", 29776626688, 1344831488, 3266677248),
        ),
    ),
)
