"""InternVL 3 (https://arxiv.org/abs/2504.10479) and 3.5 (https://arxiv.org/abs/2508.18265)."""

from __future__ import annotations

from vlmserve.families.family import Names, VisionFamily

_LAYER = r"(vision_tower\.encoder\.layers\.\d+)"
_NAMES: Names = (
    (r"(vision_tower\.embeddings\.patch_embedding)s\.projection\.", r"\1."),
    (r"(vision_tower\.encoder\.layer)\.(\d+)\.", r"\1s.\2."),
    (rf"{_LAYER}\.attention\.", r"\1.self_attn."),
    (rf"{_LAYER}\.self_attn\.projection_layer\.", r"\1.self_attn.out_proj."),
    (rf"{_LAYER}\.self_attn\.([qk]_norm\.)", r"\1.\2"),
    (rf"{_LAYER}\.layernorm_before\.", r"\1.layer_norm1."),
    (rf"{_LAYER}\.layernorm_after\.", r"\1.layer_norm2."),
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
        models="InternVL 3 and 3.5 (-hf)",
    ),
)
