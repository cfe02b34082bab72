"""A small random checkpoint of Muse Glimmer with all the files that a server needs, and transformers' processor."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken, processors
from transformers import MuseGlimmerConfig, MuseGlimmerForConditionalGeneration, PreTrainedTokenizerFast
from transformers.models.muse_glimmer.processing_muse_glimmer import MuseGlimmerProcessor

from tests.checkpoints import TEXT, write_tokenizer
from tests.saved_models import save_model
from tests.square_images import processor_class, with_pillow

TEMPLATE = (
    "<|begin_of_text|>{% for message in messages %}<|{{ message.role }}|>{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}<|patch|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TOKENS = (
    "<|begin_of_text|>", "<|user|>", "<|assistant|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|video|>",
)  # fmt: skip
MOST_TOKENS = 36
"""Of an image."""


def make_muse_glimmer(
    folder: Path, *, text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None
) -> Path:
    """Embeddings of images are 8 pixels wide, and windows of the tower 4 patches; text, vision: fields of its
    configs."""
    tokenizer = write_tokenizer(folder, takes_images=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _TOKENS])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    own = {
        **TEXT, "vocab_size": tokenizer.get_vocab_size() + 5, "num_hidden_layers": 5, "head_dim": 16,
        "sliding_window": 9, "output_multiplier": 0.5, "final_logit_softcapping": 5.0,
    }  # fmt: skip
    tower = {
        "num_hidden_layers": 3, "layer_types": ["window_attention", "full_attention", "window_attention"],
        "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 2, "patch_size": 4, "pos_emb_height": 4,
        "pos_emb_width": 4, "initializer_range": 0.15, "merge_size": 2, **(vision or {}),
    }  # fmt: skip
    config = MuseGlimmerConfig(
        text_config={**own, **(text or {})},
        vision_config=tower,
        image_token_id=tokenizer.token_to_id("<|patch|>"),
        video_token_id=tokenizer.token_to_id("<|video|>"),
        out_hidden_size=tower["merge_size"] ** 2 * 32,
        projector_hidden_size=56,
    )
    save_model(folder, MuseGlimmerForConditionalGeneration, config)
    settings = {"patch_size": 4, "max_image_tokens": MOST_TOKENS, "image_processor_type": "MuseGlimmerImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def rows_of(pixels: torch.Tensor, patch_size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels of an image as transformers' processor arranges them, row by row and twice, and their grid."""
    patches = pixels[0].unfold(1, patch_size, patch_size).unfold(2, patch_size, patch_size).permute(1, 2, 0, 3, 4)
    return patches.flatten(0, 1).flatten(1).repeat(1, 2), torch.tensor([(1, *patches.shape[:2])])


def image_processor(**settings: Any) -> Any:
    """transformers' processor with Pillow's resizing."""
    lanczos = partial(with_pillow, resample=Image.Resampling.LANCZOS)
    return processor_class("muse_glimmer", "MuseGlimmerImageProcessor", lanczos)(**settings)


class ImagesOnly(MuseGlimmerProcessor):
    """Without its part for videos, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return None


def load_processor(folder: Path) -> Any:
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    del settings["image_processor_type"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return ImagesOnly(image_processor(**settings), None, tokenizer, chat_template=TEMPLATE)
