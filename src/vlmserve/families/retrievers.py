"""Vision-language models with one embedding per token: ColPali (https://arxiv.org/abs/2407.01449) and ColQwen.

Their config.json nests the vision-language model or names the retriever in ``architectures``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vlmserve.families.spec import Config

_QWEN_DOCUMENT = (
    "{% for message in messages %}<|im_start|>user\n{% set said = namespace(text='') %}"
    "{% if message.content is string %}{% set said.text = message.content %}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{% set said.text = said.text + part.text %}{% endif %}{% endfor %}{% endif %}"
    "{{ said.text or 'Describe the image.' }}<|im_end|>{% endfor %}<|endoftext|>"
)
_PALI_DOCUMENT = (
    "{% set said = namespace(text='') %}{% for message in messages %}"
    "{% if message.content is string %}{% set said.text = said.text + message.content %}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}{{ image_token }}{% else %}{% set said.text = said.text + part.text %}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
    "{{ bos_token }}{{ said.text or 'Describe the image.' }}{{ '\n' }}"
)
_NUM_PADS = 10
"""Padding tokens after a query. The model was trained to use their states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retriever:
    """How queries and documents are written, and which layer makes their embeddings."""

    projection: str = "embedding_proj_layer"
    """Name of the linear layer after the final hidden states."""
    query: str
    """The text before a query."""
    begins: bool = False
    """The tokenizer's BOS token comes before it."""
    document_template: str
    """Chat template for documents; the checkpoint's own is for chats."""

    def written_query(self, text: str, special_tokens: Mapping[str, str]) -> str:
        """The prompt of a query. special_tokens: of the tokenizer, by name."""
        begin = special_tokens.get("bos_token", "") if self.begins else ""
        return f"{begin}{self.query}{text}{special_tokens.get('pad_token', '') * _NUM_PADS}\n"


_COLQWEN = Retriever(query="Query: ", document_template=_QWEN_DOCUMENT)
_ORIGINAL = Retriever(projection="custom_text_proj", query="Query: ", document_template=_QWEN_DOCUMENT)
_COLPALI = Retriever(query="Question: ", begins=True, document_template=_PALI_DOCUMENT)
_RETRIEVERS = {
    "ColQwen2ForRetrieval": _COLQWEN,
    "ColQwen2": _ORIGINAL,
    "ColQwen2_5": _ORIGINAL,
    "ColPaliForRetrieval": _COLPALI,
    "ColPali": replace(_COLPALI, projection="custom_text_proj"),
}


def retriever_of(config: Config) -> Retriever | None:
    named = config.get("architectures")
    found = (_RETRIEVERS.get(str(name)) for name in named) if isinstance(named, list) else ()
    return next((retriever for retriever in found if retriever is not None), None)


def without_nesting(config: Config) -> dict[str, Any]:
    """The config.json of the vision-language model in a retriever, with the retriever's ``architectures``; other
    configs unchanged.
    """
    nested = config.get("vlm_config")
    if retriever_of(config) is None or not isinstance(nested, Mapping):
        return dict(config)
    kept = {key: config[key] for key in ("architectures", "dtype", "torch_dtype") if key in config}
    return {**nested, **kept}
