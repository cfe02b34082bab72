"""Idefics3 (https://arxiv.org/abs/2408.12637) and SmolVLM (https://arxiv.org/abs/2504.05299)."""

from __future__ import annotations

from typing import Any, Final

from vlmserve.families.family import NamedModel, VisionFamily
from vlmserve.families.gguf import Clip, GGUFTower, clip_names, clip_scale, siglip_vision
from vlmserve.families.spec import Config


def _image_processor(clip: Clip) -> Config:
    """Images are resized to four tiles a side unless the file has another size."""
    tile = clip["image_size"]
    longest = {"longest_edge": clip.get("preproc_image_size", 4 * tile)}
    return {"image_processor_type": "Idefics3ImageProcessor", "size": longest, "max_image_size": {"longest_edge": tile}}


_TOWER = GGUFTower(
    vision=siglip_vision("idefics3_vision"),
    settings=_image_processor,
    names=(*clip_names("vision_model"), (r"mm\.model\.fc\.weight", "connector.modality_projection.proj.weight")),
    output="mm.model.fc.weight",
    more=lambda clip: {"scale_factor": clip_scale(clip, 2)},
)
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
        gguf={"idefics3": _TOWER},
        models="Idefics 3, SmolVLM 1",
    ),
    VisionFamily(
        model_type="smolvlm",
        architecture="SmolVLMForConditionalGeneration",
        **_IDEFICS3,
        videos=True,
        models="SmolVLM 1 and 2",
        short_names=(
            NamedModel("smolvlm2:256m", "HuggingFaceTB/SmolVLM2-256M-Video-Instruct", 256484928, 28385280, 121896192),
            NamedModel("smolvlm2:500m", "HuggingFaceTB/SmolVLM2-500M-Video-Instruct", 507482304, 47308800, 145538304),
            NamedModel("smolvlm2:2.2b", "HuggingFaceTB/SmolVLM2-2.2B-Instruct", 2246784880, 100925440, 535146352),
        ),
    ),
)
