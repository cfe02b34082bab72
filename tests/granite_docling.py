"""A small random checkpoint of Granite Docling with all the files that a server needs, and transformers' processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import (
    GraniteDoclingConfig,
    GraniteDoclingForConditionalGeneration,
    PreTrainedTokenizerFast,
)
from transformers.models.granite_docling.image_processing_pil_granite_docling import GraniteDoclingImageProcessorPil
from transformers.models.granite_docling.processing_granite_docling import GraniteDoclingProcessor

from tests.checkpoints import TEXT, VISION, write_tokenizer
from tests.saved_models import save_model

MULTIPLIERS = {
    "tie_word_embeddings": False, "embedding_multiplier": 0.8, "residual_multiplier": 0.7, "logits_scaling": 0.5,
}  # fmt: skip
"""The published ones make random weights repeat one token."""


def make_granite_docling(
    folder: Path,
    *,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """Tiles of 16 pixels and 2 x 2 embeddings; text, vision: fields of its configs. settings: of images."""
    tokenizer = write_tokenizer(folder, takes_images=True)
    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    words = ["<fake_token_around_image>", "<global-img>", *places]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words])
    tokenizer.save(str(folder / "tokenizer.json"))
    own = {**TEXT, "vocab_size": tokenizer.get_vocab_size() + 5, "pad_token_id": 0, "attention_multiplier": 0.25}
    tower = {
        **VISION, "image_size": 16, "patch_size": 4, "scale_factor": 2, "out_hidden_size": TEXT["hidden_size"],
        "deepstack_visual_indexes": [1, 2], "initializer_range": 0.15,
    }  # fmt: skip
    config = GraniteDoclingConfig(
        text_config={**own, **MULTIPLIERS, **(text or {})},
        vision_config={**tower, **(vision or {})},
        image_token_id=tokenizer.token_to_id("<image>"),
        density_router_hidden_size=24,
        pad_token_id=0,
    )
    save_model(folder, GraniteDoclingForConditionalGeneration, config)
    images = {"image_processor_type": "GraniteDoclingImageProcessor", "size": {"height": 16, "width": 16}}
    (folder / "preprocessor_config.json").write_text(json.dumps({**images, "max_patches": 6, **settings}))
    names = {"processor_class": "GraniteDoclingProcessor", "image_seq_len": 4}
    (folder / "processor_config.json").write_text(json.dumps(names))
    return folder


def load_processor(folder: Path) -> Any:
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    del settings["image_processor_type"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    template = (folder / "chat_template.jinja").read_text()
    images = GraniteDoclingImageProcessorPil(**settings)
    return GraniteDoclingProcessor(images, tokenizer, image_seq_len=4, chat_template=template)
