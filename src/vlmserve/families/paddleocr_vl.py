"""PaddleOCR-VL (https://arxiv.org/abs/2510.14528): ERNIE 4.5 with M-RoPE, and a SigLIP tower for any size."""

from __future__ import annotations

import math

from vlmserve.families.family import LanguageFamily, NamedModel, VisionFamily
from vlmserve.families.gguf import Clip, GGUFText, GGUFTower, Metadata, clip_names, clip_sizes
from vlmserve.families.gguf import with_sections as gguf_sections
from vlmserve.families.llama import LLAMA
from vlmserve.families.qwen2_vl import QWEN_TOWER, qwen_images
from vlmserve.families.spec import ArchSpec, Config, Names, usual_spec, with_sections

_TEXT: Config = {
    **LLAMA,
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
    "use_bias": False,
}
# Checkpoints also hold a head and another position embedding table, which nothing uses.
_NAMES: Names = (
    (r"^(mlp_AR|model\.projector)\.", "visual.merger."),
    (r"^visual\.merger\.pre_norm\.", "visual.merger.ln_q."),
    (r"^visual\.merger\.linear_1\.", "visual.merger.mlp.0."),
    (r"^visual\.merger\.linear_2\.", "visual.merger.mlp.2."),
    (r"^(model\.)?visual\.vision_model\.", "visual."),
    (r"^visual\.embeddings\.patch_embedding\.", "visual.patch_embed.proj."),
    (r"^visual\.embeddings\.position_embedding\.", "visual.pos_embed."),
    (r"^visual\.post_layernorm\.", "visual.merger.post_layernorm."),
    (r"^visual\.encoder\.layers\.(\d+)\.layer_norm", r"visual.blocks.\1.norm"),
    (r"^visual\.encoder\.layers\.(\d+)\.self_attn\.out_proj\.", r"visual.blocks.\1.attn.proj."),
    (r"^visual\.encoder\.layers\.(\d+)\.self_attn\.", r"visual.blocks.\1.attn."),
    (r"^visual\.encoder\.layers\.", "visual.blocks."),
)


def _paddleocr_vl(config: Config) -> ArchSpec:
    bias = config["use_bias"]
    return usual_spec(with_sections(config, [16, 24, 24]), qkv_bias=bias, output_bias=bias, mlp_bias=bias)


def _gguf_traits(metadata: Metadata) -> Config:
    """Without its tower, it is Llama."""
    return {"model_type": "llama", **gguf_sections(metadata), "use_bias": metadata.has("attn_q.bias")}


_GGUF_NAMES: Names = (
    *clip_names("visual.vision_model"),
    (r"mm\.input_norm\.(\w+)", r"mlp_AR.pre_norm.\1"),
    (r"mm\.([12])\.(\w+)", r"mlp_AR.linear_\1.\2"),
)


def _vision(clip: Clip) -> Config:
    """The file's ``image_size`` is a maximum, not the size of the position embedding table."""
    side = math.isqrt(clip.tensor("v.position_embd.weight").shape[0])
    return {
        **clip_sizes(clip),
        "model_type": "paddleocr_vl_vision",
        "image_size": side * clip["patch_size"],
        "spatial_merge_size": clip.get("spatial_merge_size", 2),
        "hidden_act": "gelu_pytorch_tanh",
    }


def _image_processor(clip: Clip) -> Config:
    own = qwen_images(147384, 2822400)(clip)
    return {**own, "image_processor_type": "PaddleOCRVLImageProcessor", "temporal_patch_size": 1}


_TOWER = GGUFTower(
    vision=_vision,
    settings=_image_processor,
    names=_GGUF_NAMES,
    output="mm.2.weight",
    text_types={"paddleocr": "paddleocr_vl_text"},
    tokens={
        "image_token_id": "<|IMAGE_PLACEHOLDER|>",
        "vision_start_token_id": "<|IMAGE_START|>",
        "vision_end_token_id": "<|IMAGE_END|>",
    },
    swaps=False,
)

FAMILIES = (
    LanguageFamily(
        model_type="paddleocr_vl_text",
        defaults=_TEXT,
        build=_paddleocr_vl,
        gguf={"paddleocr": GGUFText(_gguf_traits, has_sections=True)},
    ),
    VisionFamily(
        model_type="paddleocr_vl",
        architecture="PaddleOCRVLForConditionalGeneration",
        text_type="paddleocr_vl_text",
        names=_NAMES,
        tied=True,
        **QWEN_TOWER,
        image_processor_types=("PaddleOCRVL",),
        image_token_id=100295,
        gguf={"paddleocr": _TOWER},
        models="PaddleOCR-VL",
        short_names=(NamedModel("paddleocr-vl:0.9b", "PaddlePaddle/PaddleOCR-VL", 943350384, 105906176, 582602352),),
    ),
)
