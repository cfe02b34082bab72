"""Idefics3 (https://arxiv.org/abs/2408.12637) and SmolVLM (https://arxiv.org/abs/2504.05299)."""

from __future__ import annotations

from typing import Any, Final

from vlmserve.families.family import VisionFamily

_IDEFICS3: Final[dict[str, Any]] = {
    "text_type": "llama",
    "tower": "vlmserve.models.vision.idefics3:Idefics3Vision",
    "image_processor": "vlmserve.media.tiles:SplitProcessor.from_files",
    "image_token_id": 128257,
}

FAMILIES = (
    VisionFamily(
        model_type="idefics3",
        architecture="Idefics3ForConditionalGeneration",
        **_IDEFICS3,
        image_processor_types=("Idefics3", "SmolVLM"),
        models="Idefics 3, SmolVLM 1",
    ),
    VisionFamily(
        model_type="smolvlm",
        architecture="SmolVLMForConditionalGeneration",
        **_IDEFICS3,
        videos=True,
        models="SmolVLM 1 and 2",
    ),
)
