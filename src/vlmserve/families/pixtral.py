"""Pixtral (https://arxiv.org/abs/2410.07073): LLaVA's architecture with another tower."""

from __future__ import annotations

from typing import Any, Final

from vlmserve.families.family import VisionFamily, vision_section

PIXTRAL_IMAGES: Final[dict[str, Any]] = {
    "image_processor": "vlmserve.media.rows:RowProcessor.from_files",
    "image_processor_types": ("Pixtral",),
}
"""Fields of a `VisionFamily` whose images are rows of patches."""

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
        models="Pixtral 12B",
    ),
)
