"""MiniCPM-V 4.6 and 4.7: Qwen3.5's decoder, with plain positions (4.6) or positions on a canvas (4.7)."""

from __future__ import annotations

import math
from typing import Any, Final

from vlmserve.errors import ModelLoadError
from vlmserve.families.family import VisionFamily
from vlmserve.families.gguf import Clip, GGUFTower, clip_names, clip_scale, clip_sizes
from vlmserve.families.spec import Config

_MINICPMV: Final[dict[str, Any]] = {
    "text_type": "qwen3_5_text",
    "names": ((r"^model\.merger\.", "merger."),),
    "tower": "vlmserve.models.vision.minicpmv:MiniCPMVision",
    "image_processor": "vlmserve.media.slices:SliceProcessor.from_files",
    "image_token_id": 248056,
}

_MODES = {2: "4x", 4: "16x"}
"""``downsample_mode`` by the patches along each side of an embedding."""
_MERGER = "vision_tower.vit_merger"
_LAST = "merger.mlp.0"


def _mode(clip: Clip) -> str:
    scale = clip_scale(clip, 4)
    if scale not in _MODES:
        raise ModelLoadError(f"{clip.header.path}: clip.vision.projector.scale_factor is {scale}, not 2 or 4")
    return _MODES[scale]


def _vision(clip: Clip) -> Config:
    """A file says the size of slices in place of the tower's own image size."""
    side = math.isqrt(clip.tensor("v.position_embd.weight").shape[0])
    return {
        **clip_sizes(clip),
        "model_type": "minicpmv4_6_vision",
        "image_size": side * clip["patch_size"],
        "hidden_act": "gelu_pytorch_tanh",
    }


def _merging(clip: Clip) -> Config:
    layers = clip.array("wa_layer_indexes") or [6]
    return {"insert_layer_id": layers[0], "downsample_mode": _mode(clip)}


def _image_processor(clip: Clip) -> Config:
    return {
        "image_processor_type": "MiniCPMV4_6ImageProcessor",
        "patch_size": clip["patch_size"],
        "scale_resolution": clip["image_size"],
        "downsample_mode": _mode(clip),
    }


_TOWER = GGUFTower(
    vision=_vision,
    settings=_image_processor,
    more=_merging,
    names=(
        *clip_names("vision_tower"),
        (r"v\.vit_merger\.ln1\.(\w+)", rf"{_MERGER}.layer_norm1.\1"),
        (r"v\.vit_merger\.attn_([qkv])\.(\w+)", rf"{_MERGER}.self_attn.\1_proj.\2"),
        (r"v\.vit_merger\.attn_out\.(\w+)", rf"{_MERGER}.self_attn.out_proj.\1"),
        (r"v\.vit_merger\.ds_ln\.(\w+)", rf"{_MERGER}.pre_norm.\1"),
        (r"v\.vit_merger\.ds_ffn_up\.(\w+)", rf"{_MERGER}.linear_1.\1"),
        (r"v\.vit_merger\.ds_ffn_down\.(\w+)", rf"{_MERGER}.linear_2.\1"),
        (r"mm\.input_norm\.(\w+)", rf"{_LAST}.pre_norm.\1"),
        (r"mm\.up\.(\w+)", rf"{_LAST}.linear_1.\1"),
        (r"mm\.down\.(\w+)", rf"{_LAST}.linear_2.\1"),
    ),
    output="mm.down.weight",
    text_types={"qwen35": "qwen3_5_text"},
    tokens={"image_token_id": "<|image_pad|>"},
    swaps=False,
)

FAMILIES = (
    VisionFamily(
        model_type="minicpmv4_6",
        architecture="MiniCPMV4_6ForConditionalGeneration",
        **_MINICPMV,
        image_processor_types=("MiniCPMV4_6",),
        gguf={"minicpmv4_6": _TOWER},
        models="MiniCPM-V 4.6",
    ),
    VisionFamily(
        model_type="minicpmv4_7",
        architecture="MiniCPMV4_7ForConditionalGeneration",
        **_MINICPMV,
        image_processor_types=("MiniCPMV4_6",),
        models="MiniCPM-V 4.7",
    ),
)
