"""Pixtral (https://arxiv.org/abs/2410.07073): LLaVA's architecture with another tower."""

from __future__ import annotations

from typing import Any, Final

from vlmserve.families.family import VisionFamily, vision_section
from vlmserve.families.gguf import Clip, GGUFTower, clip_sizes
from vlmserve.families.spec import Config, Names

PIXTRAL_IMAGES: Final[dict[str, Any]] = {
    "image_processor": "vlmserve.media.rows:RowProcessor.from_files",
    "image_processor_types": ("Pixtral",),
}
"""Fields of a `VisionFamily` whose images are rows of patches."""

_LAYER = r"vision_tower.transformer.layers.\1"
_NAMES: Names = (
    (r"v\.patch_embd\.weight", "vision_tower.patch_conv.weight"),
    (r"v\.pre_ln\.weight", "vision_tower.ln_pre.weight"),
    (r"v\.blk\.(\d+)\.ln1\.weight", f"{_LAYER}.attention_norm.weight"),
    (r"v\.blk\.(\d+)\.ln2\.weight", f"{_LAYER}.ffn_norm.weight"),
    (r"v\.blk\.(\d+)\.attn_([qkv])\.weight", rf"{_LAYER}.attention.\2_proj.weight"),
    (r"v\.blk\.(\d+)\.attn_out\.weight", f"{_LAYER}.attention.o_proj.weight"),
    (r"v\.blk\.(\d+)\.ffn_(gate|up|down)\.weight", rf"{_LAYER}.feed_forward.\2_proj.weight"),
    (r"mm\.([12])\.(\w+)", r"multi_modal_projector.linear_\1.\2"),
    (r"mm\.input_norm\.weight", "multi_modal_projector.norm.weight"),
    (r"mm\.patch_merger\.weight", "multi_modal_projector.patch_merger.merging_layer.weight"),
    # It is a row of the language model's embedding table.
    (r"v\.token_embd\.img_break(\.weight)?", ""),
)


def _vision(clip: Clip) -> Config:
    act = "silu" if clip.header.values.get("clip.use_silu") else "gelu"
    return {**clip_sizes(clip), "model_type": "pixtral", "hidden_act": act}


def _more(clip: Clip) -> Config:
    """Mistral Small 3 merges patches, Pixtral 12B does not."""
    common = {"vision_feature_layer": -1, "multimodal_projector_bias": clip.has("mm.1.bias")}
    if not clip.has("mm.patch_merger.weight"):
        return {**common, "vision_feature_select_strategy": "full"}
    return {**common, "model_type": "mistral3", "spatial_merge_size": clip.get("spatial_merge_size", 2)}


def _image_processor(clip: Clip) -> Config:
    return {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": clip["image_size"]}}


_TOWER = GGUFTower(
    vision=_vision,
    settings=_image_processor,
    names=_NAMES,
    output="mm.2.weight",
    more=_more,
    tokens={"image_token_id": "[IMG]"},
    interleaved=True,
    swaps=False,
)

FAMILIES = (
    VisionFamily(
        name="pixtral",
        model_type="llava",
        architecture="LlavaForConditionalGeneration",
        matches=lambda config: vision_section(config).get("model_type") == "pixtral",
        text_type="llama",
        tower="vlmserve.models.vision.pixtral:PixtralVision",
        image_token_id=32000,
        **PIXTRAL_IMAGES,
        gguf={"pixtral": _TOWER},
        models="Pixtral 12B",
    ),
)
