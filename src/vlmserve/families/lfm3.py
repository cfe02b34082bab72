"""LFM3: gated short convolutions, and attention over all tokens or a window with one output gate a head. LFM3-VL adds
images and videos."""

from __future__ import annotations

from vlmserve.families.family import LanguageFamily, VisionFamily, vision_section
from vlmserve.families.lfm2 import LFM2_NAMES
from vlmserve.families.llama import LLAMA
from vlmserve.families.qwen2_vl import QWEN_TOWER
from vlmserve.families.spec import ArchSpec, Config, HeadNormSpec, Names, NormSpec, require, usual_spec
from vlmserve.layer_specs import ConvolutionSpec, RopeSpec

_ROPES: Config = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
}
_LFM3: Config = {
    **LLAMA,
    "vocab_size": 128000,
    "hidden_size": 2048,
    "intermediate_size": 7680,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "eos_token_id": 124900,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 7,
    "sliding_window": 256,
    "use_sandwich_norm": True,
    "use_attention_gate": True,
    "attention_bias": False,
}
_NAMES: Names = (
    *LFM2_NAMES,
    (r"\.post_operator_norm\.", ".attention_output_norm."),
    (r"\.post_ffn_norm\.", ".mlp_output_norm."),
)
_BLOCK = r"^(?:model\.)?vision_tower\.layers\.(\d+)\."
_VISION_NAMES: Names = (
    (r"^(model\.)?vision_tower\.patch_embed\.", "visual.patch_embed.proj."),
    (r"^(model\.)?vision_tower\.embedding_norm\.", "visual.patch_norm."),
    (rf"{_BLOCK}operator_norm\.", r"visual.blocks.\1.norm1."),
    (rf"{_BLOCK}ffn_norm\.", r"visual.blocks.\1.norm2."),
    (rf"{_BLOCK}feed_forward\.w1\.", r"visual.blocks.\1.mlp.gate_proj."),
    (rf"{_BLOCK}feed_forward\.w2\.", r"visual.blocks.\1.mlp.down_proj."),
    (rf"{_BLOCK}feed_forward\.w3\.", r"visual.blocks.\1.mlp.up_proj."),
    (rf"{_BLOCK}conv\.in_proj\.", r"visual.blocks.\1.attn.qkv."),
    (rf"{_BLOCK}conv\.spatial_conv\.", r"visual.blocks.\1.attn."),
    (rf"{_BLOCK}(?:conv|self_attn)\.out_proj\.", r"visual.blocks.\1.attn.proj."),
    (rf"{_BLOCK}self_attn\.", r"visual.blocks.\1.attn."),
    (r"^(model\.)?multi_modal_projector\.layer_norm\.", "visual.merger.layer_norm."),
    (r"^(model\.)?multi_modal_projector\.", "visual.merger.projector."),
)


def _lfm3(config: Config) -> ArchSpec:
    require(config, {"conv_bias": (False, "biases of convolutions")})
    if config["use_attention_gate"]:
        require(config, {"attention_bias": (False, "biases of queries beside gates without them")})
    kinds = config.get("layer_types") or [_kind(layer) for layer in range(config["num_hidden_layers"])]
    norm, by_kind = NormSpec(config["norm_eps"]), config.get("rope_parameters") or _ROPES
    ropes = {
        kind: RopeSpec.from_config(config["head_dim"], 1e6, by_kind[kind], config["max_position_embeddings"])
        for kind in {*kinds} - {"conv"}
    }
    convolution = ConvolutionSpec(config["hidden_size"], config["conv_L_cache"])
    return usual_spec(
        config,
        norm=norm,
        norms="sandwich" if config["use_sandwich_norm"] else "pre",
        activation="silu",
        windows=[config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds],
        states=[convolution if kind == "conv" else None for kind in kinds],
        ropes=[ropes.get(kind) for kind in kinds],
        head_norm=HeadNormSpec("head", norm),
        output_gate="heads" if config["use_attention_gate"] else None,
        qkv_bias=config["attention_bias"],
        output_bias=config["attention_bias"],
    )


def _kind(layer: int) -> str:
    if layer % 4 == 2:
        return "full_attention"
    return "sliding_attention" if layer % 4 == 0 and layer > 0 else "conv"


def _vision_config(config: Config) -> Config:
    """Merge in the projector's settings, which config.json keeps at its top level."""
    projector = {name: value for name, value in config.items() if name.startswith("projector_")}
    return {"model_type": "lfm3_vl_vision", **projector, **vision_section(config)}


FAMILIES = (
    LanguageFamily(
        model_type="lfm3",
        architecture="Lfm3ForCausalLM",
        defaults=_LFM3,
        build=_lfm3,
        names=_NAMES,
        models="LFM3",
    ),
    VisionFamily(
        model_type="lfm3_vl",
        architecture="Lfm3VlForConditionalGeneration",
        text_type="lfm3",
        tied=True,
        names=_VISION_NAMES,
        **QWEN_TOWER,
        vision_config=_vision_config,
        image_token_id=125030,
        video_token_id=125029,
        videos=True,
        frame_ends={"vision_start_token_id": 125009, "vision_end_token_id": 125010},
        models="LFM3-VL",
    ),
)
