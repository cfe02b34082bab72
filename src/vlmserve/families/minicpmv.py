"""MiniCPM-V 4.6: Qwen3.5's decoder with plain positions."""

from __future__ import annotations

from typing import Any, Final

from vlmserve.families.family import VisionFamily

_MINICPMV: Final[dict[str, Any]] = {
    "text_type": "qwen3_5_text",
    "names": ((r"^model\.merger\.", "merger."),),
    "tower": "vlmserve.models.vision.minicpmv:MiniCPMVision",
    "image_processor": "vlmserve.media.slices:SliceProcessor.from_files",
    "image_token_id": 248056,
}

FAMILIES = (
    VisionFamily(
        model_type="minicpmv4_6",
        architecture="MiniCPMV4_6ForConditionalGeneration",
        **_MINICPMV,
        image_processor_types=("MiniCPMV4_6",),
        models="MiniCPM-V 4.6",
    ),
)
