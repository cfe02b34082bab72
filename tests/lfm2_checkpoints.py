"""Small random checkpoints of LFM2-VL with all the files that a server needs, and transformers' processor for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration, PreTrainedTokenizerFast
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

from tests.checkpoints import TEXT, VISION, write_tokenizer
from tests.saved_models import save_model
from tests.square_images import image_processor

SETTINGS: dict[str, Any] = {
    "encoder_patch_size": 4, "downsample_factor": 2, "tile_size": 16, "min_tiles": 2, "max_tiles": 4,
    "min_image_tokens": 4, "max_image_tokens": 16, "use_thumbnail": True, "do_image_splitting": True,
    "max_pixels_tolerance": 1.0,
}  # fmt: skip
"""Tiles of 2 x 2 squares, each of 8 pixels a side."""
LFM2_TEXT: dict[str, Any] = {
    **{name: value for name, value in TEXT.items() if name != "rms_norm_eps"},
    "model_type": "lfm2",
    "norm_eps": 1e-5,
    "layer_types": ["conv", "full_attention", "conv"],
    "block_multiple_of": 16,
}
MARKS = ("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")


def make_lfm2_vl(
    folder: Path,
    *,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    settings: dict[str, Any] = SETTINGS,
    **overrides: Any,
) -> Path:
    """LFM2-VL in `folder`; text, vision: fields of its configs. settings: of its image processor."""
    tokenizer = write_tokenizer(folder, takes_images=True)
    places = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in (*MARKS, *places)])
    tokenizer.save(str(folder / "tokenizer.json"))
    sizes = {
        "model_type": "siglip2_vision_model", "num_patches": 9, "patch_size": 4, "num_hidden_layers": 3,
        "initializer_range": 0.15, "vision_use_head": False,
    }  # fmt: skip
    tower = {name: value for name, value in VISION.items() if name != "image_size"}
    config = Lfm2VlConfig(
        text_config={**LFM2_TEXT, "vocab_size": tokenizer.get_vocab_size() + 5, **(text or {})},
        vision_config={**tower, **sizes, **(vision or {})},
        image_token_id=tokenizer.token_to_id("<image>"),
        **{"projector_hidden_size": 40, **overrides},
    )
    save_model(folder, Lfm2VlForConditionalGeneration, config, 0, torch.float32, "1GB")
    named = {"image_processor_type": "Lfm2VlImageProcessorFast", **settings}
    (folder / "preprocessor_config.json").write_text(json.dumps(named))
    template = folder / "chat_template.jinja"
    template.write_text("{{ bos_token }}" + template.read_text())
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Lfm2VlProcessor"}))
    return folder


class AnyImageProcessor(Lfm2VlProcessor):
    """With an image processor that is none of transformers' classes."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return argument_name == "image_processor" or super().check_argument_for_proper_class(argument_name, argument)


def load_processor(folder: Path) -> Any:
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    del settings["image_processor_type"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    template = (folder / "chat_template.jinja").read_text()
    return AnyImageProcessor(image_processor(**settings), tokenizer, chat_template=template)
