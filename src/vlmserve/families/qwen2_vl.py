"""Qwen2-VL (https://arxiv.org/abs/2409.12191) and Qwen2.5-VL (https://arxiv.org/abs/2502.13923)."""

from __future__ import annotations

from typing import Any, Final

from vlmserve.families.family import LanguageFamily, VisionFamily
from vlmserve.families.qwen2 import QWEN, qwen2
from vlmserve.families.spec import Config

QWEN_TOWER: Final[dict[str, Any]] = {
    "tower": "vlmserve.models.vision.qwen:QwenVisionTower.from_config",
    "tower_name": "visual",
    "image_processor": "vlmserve.media.any_size:AnySizeProcessor.from_files",
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
        models="Qwen2-VL",
    ),
    VisionFamily(
        model_type="qwen2_5_vl",
        architecture="Qwen2_5_VLForConditionalGeneration",
        text_type="qwen2_5_vl_text",
        **QWEN_TOWER,
        **QWEN_TOKENS,
        models="Qwen2.5-VL",
    ),
)
