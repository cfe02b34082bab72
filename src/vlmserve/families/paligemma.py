"""PaliGemma (https://arxiv.org/abs/2407.07726), which the Transformers backend runs."""

from __future__ import annotations

from vlmserve.families.family import Family

_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}{{ image_token }}{% endif %}"
    "{% endfor %}{% endfor %}{{ bos_token }}"
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{{ '\n' }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
"""The only form of a question, as Transformers' processor writes it."""

FAMILIES = (Family(model_type="paligemma", chat_template=lambda config, generation_config: _TEMPLATE),)
