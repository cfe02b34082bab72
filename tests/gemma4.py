"""Small Gemma 4 checkpoints with images, and transformers' pixels of these."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken
from torch import nn
from transformers import Gemma4Config, Gemma4ForConditionalGeneration
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from tests.checkpoints import TEXT, change_tensors, write_tokenizer
from tests.saved_models import save_model

NAMED = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|turn>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
DECODER: dict[str, Any] = {
    "head_dim": 8,
    "global_head_dim": 16,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 12,
    "sliding_window": 5,
    "final_logit_softcapping": 5.0,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "pad_token_id": 0,
}
LARGE: dict[str, Any] = {
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "use_bidirectional_attention": "vision",
    "sliding_window": 30,
}
"""Fields of large models: values are keys, and images attend to themselves in both directions within the window."""
IMAGES: dict[str, Any] = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 160,
    "initializer_range": 0.2,
}


def make_gemma4(folder: Path, *, vision: dict[str, Any] | None = None, **text: Any) -> Path:
    """A checkpoint in `folder`. vision, text: fields of the config's sections."""
    tokenizer = write_tokenizer(folder, takes_images=False)
    special = ["<|turn>", "<turn|>", *NAMED.values()]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, "extra_special_tokens": NAMED}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    size = tokenizer.get_vocab_size() + 5
    sizes = {"vocab_size": size, "vocab_size_per_layer_input": size}
    config = Gemma4Config(
        text_config={**TEXT, **DECODER, **sizes, **text},
        vision_config={**VISION, **(vision or {})},
        **{f"{name}_id": tokenizer.token_to_id(token) for name, token in NAMED.items()},
    )
    save_model(folder, Gemma4ForConditionalGeneration, config)
    if (vision or {}).get("use_clipped_linears"):
        bounds = {"min": -0.6, "max": 0.5}
        change_tensors(
            folder,
            lambda name, tensor: (
                (name, tensor.new_tensor(bounds[name[-3:]]))
                if name.endswith(("put_min", "put_max"))
                else (name, tensor)
            ),
        )
    settings = {"image_processor_type": "Gemma4ImageProcessor", **IMAGES}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def image_inputs(images: Sequence[Image.Image], **settings: Any) -> dict[str, torch.Tensor]:
    """What transformers' model takes of images."""
    processed = Gemma4ImageProcessorPil(**{**IMAGES, **settings})(list(images), return_tensors="pt")
    return {name: processed[name] for name in ("pixel_values", "image_position_ids")}


def open_theirs(folder: Path) -> nn.Module:
    """Transformers' model in float32."""
    model: nn.Module = Gemma4ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    return model
