"""PaliGemma (https://arxiv.org/abs/2407.07726) and PaliGemma 2 (https://arxiv.org/abs/2412.03555)."""

from __future__ import annotations

from vlmserve.families.family import NamedModel, VisionFamily, vision_section
from vlmserve.families.spec import Config

_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}{{ image_token }}{% endif %}"
    "{% endfor %}{% endfor %}{{ bos_token }}"
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{{ '\n' }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
"""The only form of a question, as Transformers' processor writes it."""
_VISION: Config = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4096,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
}


def paligemma_vision(config: Config) -> Config:
    """``vision_config`` with Transformers' defaults."""
    return {**_VISION, **vision_section(config)}


def _num_patches(config: Config) -> int:
    vision = paligemma_vision(config)
    return int((vision["image_size"] // vision["patch_size"]) ** 2)


FAMILIES = (
    VisionFamily(
        model_type="paligemma",
        architecture="PaliGemmaForConditionalGeneration",
        text_type="gemma",
        # Only the prompt attends in both directions.
        text_fields=lambda config: {"use_bidirectional_attention": None},
        tied=True,
        bidirectional="prompt",
        tower="vlmserve.models.vision.paligemma:PaliGemmaVision",
        vision_config=paligemma_vision,
        image_tokens=_num_patches,
        image_token_id=256000,
        chat_template=lambda config, generation_config: _TEMPLATE,
        models="PaliGemma, PaliGemma 2, ColPali",
        short_names=(NamedModel("colpali:3b", "vidore/colpali-v1.3-hf", 2924613488, 526778368, 415950704),),
    ),
)
