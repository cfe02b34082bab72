"""Qwen2-VL (https://arxiv.org/abs/2409.12191) and Qwen2.5-VL (https://arxiv.org/abs/2502.13923)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from vlmserve.families.family import LanguageFamily, NamedModel, VisionFamily, vision_section
from vlmserve.families.gguf import Clip, GGUFTower
from vlmserve.families.qwen2 import QWEN, qwen2
from vlmserve.families.spec import Config, Names

QWEN_TOWER: Final[dict[str, Any]] = {
    "tower": "vlmserve.models.vision.qwen:QwenVisionTower.from_config",
    "tower_name": "visual",
    "image_processor": "vlmserve.media.dynamic_resolution:DynamicResolutionProcessor.from_files",
}
"""Fields of a `VisionFamily` with a tower like Qwen2-VL's."""
QWEN_TOKENS: Final[dict[str, Any]] = {"image_token_id": 151655, "video_token_id": 151656, "videos": True}
_TEXT: Config = {
    **QWEN,
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_window_layers": 80,
}

_MERGER: Names = (
    (r"v\.post_ln\.(\w+)", r"visual.merger.ln_q.\1"),
    (r"mm\.([02])\.(\w+)", r"visual.merger.mlp.\1.\2"),
)
GGUF_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def qwen_names(*names: tuple[str, str]) -> Names:
    """Tensor names of towers like Qwen2-VL's. names: additional ones."""
    return (
        (r"v\.patch_embd\.weight(\.1)?", "visual.patch_embed.proj.weight"),
        (r"v\.blk\.(\d+)\.ln([12])\.(\w+)", r"visual.blocks.\1.norm\2.\3"),
        (r"v\.blk\.(\d+)\.attn_(?:qkv|[qkv])\.(\w+)", r"visual.blocks.\1.attn.qkv.\2"),
        (r"v\.blk\.(\d+)\.attn_out\.(\w+)", r"visual.blocks.\1.attn.proj.\2"),
        *names,
    )


def qwen_mlp(up: str, down: str, gate: str = "") -> Names:
    """gate: empty for an MLP without gate."""
    parts = {"up": up, "down": down, **({"gate": gate} if gate else {})}
    return tuple((rf"v\.blk\.(\d+)\.ffn_{old}\.(\w+)", rf"visual.blocks.\1.mlp.{new}.\2") for old, new in parts.items())


def qwen_sizes(clip: Clip) -> Config:
    return {
        "depth": clip["block_count"],
        "num_heads": clip["attention.head_count"],
        "patch_size": clip["patch_size"],
        "spatial_merge_size": clip.get("spatial_merge_size", 2),
        "temporal_patch_size": 2,
    }


def qwen_images(least: int, most: int) -> Callable[[Clip], Config]:
    """least, most: bounds of an image in pixels, unless the file has its own."""

    def settings(clip: Clip) -> Config:
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": clip["patch_size"],
            "merge_size": clip.get("spatial_merge_size", 2),
            "temporal_patch_size": 2,
            "min_pixels": clip.get("image_min_pixels", least),
            "max_pixels": clip.get("image_max_pixels", most),
        }

    return settings


def _qwen2_vision(clip: Clip) -> Config:
    """``hidden_size`` is the decoder's width."""
    width = clip["embedding_length"]
    # Rounded up, so that multiplying by the width gives at least the real size.
    ratio = math.nextafter(clip.intermediate_size / width, math.inf)
    output = clip.tensor("mm.2.weight").shape[0]
    sizes = {"embed_dim": width, "hidden_size": output, "mlp_ratio": ratio}
    return {**qwen_sizes(clip), **sizes, "model_type": "qwen2_vl", "hidden_act": "quick_gelu"}


def _qwen25_vision(clip: Clip) -> Config:
    every, layers = clip["n_wa_pattern"], clip["block_count"]
    return {
        **qwen_sizes(clip),
        "model_type": "qwen2_5_vl",
        "hidden_size": clip["embedding_length"],
        "intermediate_size": clip.intermediate_size,
        "out_hidden_size": clip.tensor("mm.2.weight").shape[0],
        "hidden_act": "silu",
        "window_size": clip.get("window_size", 112),
        "fullatt_block_indexes": list(range(every - 1, layers, every)),
        "tokens_per_second": 2,
    }


_TOWER = GGUFTower(
    vision=_qwen2_vision,
    settings=qwen_images(56 * 56, 28 * 28 * 16384),
    names=qwen_names(*qwen_mlp("fc1", "fc2"), *_MERGER),
    output="mm.2.weight",
    text_types={"qwen2vl": "qwen2_vl_text"},
    tokens=GGUF_TOKENS,
)
_TOWER25 = replace(
    _TOWER,
    vision=_qwen25_vision,
    names=qwen_names(*qwen_mlp("up_proj", "down_proj", "gate_proj"), *_MERGER),
    text_types={"qwen2vl": "qwen2_5_vl_text"},
)

FAMILIES = (
    LanguageFamily(model_type="qwen2_vl_text", defaults=_TEXT, build=qwen2),
    LanguageFamily(model_type="qwen2_5_vl_text", defaults=_TEXT, build=qwen2),
    VisionFamily(
        model_type="qwen2_vl",
        architecture="Qwen2VLForConditionalGeneration",
        text_type="qwen2_vl_text",
        **QWEN_TOWER,
        image_processor_types=("Qwen2",),
        **QWEN_TOKENS,
        gguf={"qwen2vl_merger": _TOWER},
        models="Qwen2-VL",
        short_names=(
            NamedModel("qwen2-vl:2b", "Qwen/Qwen2-VL-2B-Instruct", 2208985600, 233373696, 665271296),
            NamedModel("qwen2-vl:7b", "Qwen/Qwen2-VL-7B-Instruct", 8291375616, 544997376, 1220756480),
            NamedModel("colqwen2:2b", "vidore/colqwen2-v1.0-hf", 2209182336, 233373696, 665468032),
        ),
    ),
    VisionFamily(
        model_type="qwen2_5_vl",
        architecture="Qwen2_5_VLForConditionalGeneration",
        text_type="qwen2_5_vl_text",
        **QWEN_TOWER,
        **QWEN_TOKENS,
        vision_config=lambda config: {"model_type": "qwen2_5_vl", **vision_section(config)},
        gguf={"qwen2.5vl_merger": _TOWER25},
        models="Qwen2.5-VL",
        short_names=(
            NamedModel("qwen2.5-vl:3b", "Qwen/Qwen2.5-VL-3B-Instruct", 3754622976, 311164928, 668684288),
            NamedModel("qwen2.5-vl:7b", "Qwen/Qwen2.5-VL-7B-Instruct", 8292166656, 544997376, 1221547520),
            NamedModel("qwen2.5-vl:32b", "Qwen/Qwen2.5-VL-32B-Instruct", 33452718336, 778567680, 1467409664),
        ),
    ),
)
