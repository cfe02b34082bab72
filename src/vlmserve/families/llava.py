"""LLaVA (https://arxiv.org/abs/2304.08485, https://arxiv.org/abs/2310.03744) and LLaVA-NeXT
(https://arxiv.org/abs/2407.07895)."""

from __future__ import annotations

from vlmserve.families.family import VisionFamily
from vlmserve.families.spec import Config

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role != 'system' %}{{ message.role | upper }}: {% endif %}"
    "{% for part in message.content %}{% if part.type == 'image' %}{{ image_token + '\n' }}{% endif %}{% endfor %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }} {% endif %}{% endfor %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
"""LLaVA-1.5's conversation format."""


def _template(config: Config, generation_config: Config) -> str:
    return TEMPLATE


FAMILIES = (
    VisionFamily(
        model_type="llava",
        architecture="LlavaForConditionalGeneration",
        text_type="llama",
        tower="vlmserve.models.vision.llava:LlavaVision",
        image_processor="vlmserve.media.processor:FixedSizeProcessor.from_files",
        image_token_id=32000,
        chat_template=_template,
        models="LLaVA 1.5, pixie",
    ),
    VisionFamily(
        model_type="llava_next",
        architecture="LlavaNextForConditionalGeneration",
        text_type="llama",
        tower="vlmserve.models.vision.llava:LlavaNextVision",
        image_processor="vlmserve.media.tiles:AnyResolutionProcessor.from_files",
        image_processor_types=("LlavaNextImageProcessor",),
        image_token_id=32000,
        chat_template=_template,
        models="LLaVA 1.6 (Vicuna, Mistral)",
    ),
)
