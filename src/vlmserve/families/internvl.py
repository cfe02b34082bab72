"""InternVL 3 (https://arxiv.org/abs/2504.10479) and 3.5 (https://arxiv.org/abs/2508.18265)."""

from __future__ import annotations

from vlmserve.families.family import VisionFamily
from vlmserve.families.gguf import Clip, GGUFTower, clip_scale, clip_sizes
from vlmserve.families.spec import Config, Names

_LAYER = r"(vision_tower\.encoder\.layers\.\d+)"
_NAMES: Names = (
    (r"(vision_tower\.embeddings\.patch_embedding)s\.projection\.", r"\1."),
    (r"(vision_tower\.embeddings)\.cls_token$", r"\1.class_embedding"),
    (r"(vision_tower\.embeddings\.position_embedding)s$", r"\1"),
    (r"(vision_tower\.encoder\.layer)\.(\d+)\.", r"\1s.\2."),
    (rf"{_LAYER}\.attention\.", r"\1.self_attn."),
    (rf"{_LAYER}\.self_attn\.projection_layer\.", r"\1.self_attn.out_proj."),
    (rf"{_LAYER}\.self_attn\.([qk]_norm\.)", r"\1.\2"),
    (rf"{_LAYER}\.layernorm_before\.", r"\1.layer_norm1."),
    (rf"{_LAYER}\.layernorm_after\.", r"\1.layer_norm2."),
)

_GGUF_LAYER = r"vision_tower.encoder.layer.\1"
_GGUF_NAMES: Names = (
    (r"v\.class_embd", "vision_tower.embeddings.cls_token"),
    (r"v\.patch_embd\.(\w+)", r"vision_tower.embeddings.patch_embeddings.projection.\1"),
    (r"v\.position_embd\.weight", "vision_tower.embeddings.position_embeddings"),
    (r"v\.blk\.(\d+)\.ln1\.(\w+)", rf"{_GGUF_LAYER}.layernorm_before.\2"),
    (r"v\.blk\.(\d+)\.ln2\.(\w+)", rf"{_GGUF_LAYER}.layernorm_after.\2"),
    (r"v\.blk\.(\d+)\.ls([12])\.weight", rf"{_GGUF_LAYER}.lambda_\2"),
    (r"v\.blk\.(\d+)\.attn_([qkv])\.(\w+)", rf"{_GGUF_LAYER}.attention.\2_proj.\3"),
    (r"v\.blk\.(\d+)\.attn_([qk])_norm\.weight", rf"{_GGUF_LAYER}.attention.\2_norm.weight"),
    (r"v\.blk\.(\d+)\.attn_out\.(\w+)", rf"{_GGUF_LAYER}.attention.projection_layer.\2"),
    (r"v\.blk\.(\d+)\.ffn_up\.(\w+)", rf"{_GGUF_LAYER}.mlp.fc1.\2"),
    (r"v\.blk\.(\d+)\.ffn_down\.(\w+)", rf"{_GGUF_LAYER}.mlp.fc2.\2"),
    (r"mm\.model\.mlp\.0\.(\w+)", r"multi_modal_projector.layer_norm.\1"),
    (r"mm\.model\.mlp\.1\.(\w+)", r"multi_modal_projector.linear_1.\1"),
    (r"mm\.model\.mlp\.3\.(\w+)", r"multi_modal_projector.linear_2.\1"),
)


def _vision(clip: Clip) -> Config:
    return {
        **clip_sizes(clip),
        "model_type": "internvl_vision",
        "hidden_act": "silu" if clip.header.values.get("clip.use_silu") else "gelu",
        "attention_bias": clip.has("v.blk.0.attn_q.bias"),
        "use_qk_norm": clip.has("v.blk.0.attn_q_norm.weight"),
        "norm_type": "layer_norm" if clip.has("v.blk.0.ln1.bias") else "rms_norm",
    }


def _image_processor(clip: Clip) -> Config:
    side = clip["image_size"]
    least, most = clip.get("preproc_min_tiles", 1), clip.get("preproc_max_tiles", 12)
    size = {"height": side, "width": side}
    return {"image_processor_type": "GotOcr2ImageProcessor", "size": size, "min_patches": least, "max_patches": most}


_TOWER = GGUFTower(
    vision=_vision,
    settings=_image_processor,
    names=_GGUF_NAMES,
    output="mm.model.mlp.3.weight",
    more=lambda clip: {"downsample_ratio": 1 / clip_scale(clip, 2), "projector_hidden_act": "gelu"},
    tokens={"image_token_id": "<IMG_CONTEXT>"},
    swaps=False,
)

FAMILIES = (
    VisionFamily(
        model_type="internvl",
        architecture="InternVLForConditionalGeneration",
        text_type="qwen2",
        tied=True,
        names=_NAMES,
        tower="vlmserve.models.vision.intern:InternVision",
        image_processor="vlmserve.media.grids:GridProcessor.from_files",
        image_processor_types=("GotOcr2",),
        image_token_id=151667,
        gguf={"internvl": _TOWER},
        models="InternVL 3 and 3.5 (-hf)",
    ),
)
