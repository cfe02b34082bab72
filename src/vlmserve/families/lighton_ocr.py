"""LightOnOCR: Pixtral's tower with Mistral Small 3's projector, and Qwen 3."""

from __future__ import annotations

from vlmserve.families.family import VisionFamily
from vlmserve.families.pixtral import PIXTRAL_IMAGES

FAMILIES = (
    VisionFamily(
        model_type="lighton_ocr",
        architecture="LightOnOcrForConditionalGeneration",
        other_architectures=("LightOnOCRForConditionalGeneration",),
        text_type="qwen3",
        tied=True,
        tower="vlmserve.models.vision.pixtral:PixtralVision.merging",
        names=(
            (r"^(model\.)?vision_encoder\.", "vision_tower."),
            (r"^(model\.)?vision_projection\.", "multi_modal_projector."),
        ),
        image_token_id=151655,
        **PIXTRAL_IMAGES,
        models="LightOnOCR 1 and 2",
    ),
)
