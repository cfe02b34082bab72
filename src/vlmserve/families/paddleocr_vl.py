"""PaddleOCR-VL (https://arxiv.org/abs/2510.14528): ERNIE 4.5 with M-RoPE, and a SigLIP tower for any size."""

from __future__ import annotations

from vlmserve.families.family import LanguageFamily, Names, VisionFamily
from vlmserve.families.llama import LLAMA
from vlmserve.families.qwen2_vl import QWEN_TOWER
from vlmserve.families.spec import ArchSpec, Config, usual_spec, with_sections

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


FAMILIES = (
    LanguageFamily(model_type="paddleocr_vl_text", defaults=_TEXT, build=_paddleocr_vl),
    VisionFamily(
        model_type="paddleocr_vl",
        architecture="PaddleOCRVLForConditionalGeneration",
        text_type="paddleocr_vl_text",
        names=_NAMES,
        tied=True,
        **QWEN_TOWER,
        image_processor_types=("PaddleOCRVL",),
        image_token_id=100295,
        models="PaddleOCR-VL",
    ),
)
