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
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForImageTextToText,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
)
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from benchmarks.skipped_layers import SHAPES
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
_LARGE: dict[str, Any] = {
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "use_bidirectional_attention": "vision",
}
_LARGE_VISION: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "standardize": True,
}
VOCABULARY = 262144
PUBLISHED: dict[str, dict[str, Any]] = {
    **{
        name: {
            "model_type": "gemma4",
            "text_config": {**shape, "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY},
            "vision_config": {"use_clipped_linears": True},
        }
        for name, shape in SHAPES.items()
    },
    "gemma4:12b": {
        "model_type": "gemma4_unified",
        "text_config": {
            "hidden_size": 3840,
            "num_hidden_layers": 48,
            "intermediate_size": 15360,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
        },
        "vision_config": {},
    },
    "gemma4:26b": {
        "model_type": "gemma4",
        "text_config": {
            **_LARGE,
            "hidden_size": 2816,
            "num_hidden_layers": 30,
            "intermediate_size": 2112,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
        "vision_config": _LARGE_VISION,
    },
    "gemma4:31b": {
        "model_type": "gemma4",
        "text_config": {
            **_LARGE,
            "hidden_size": 5376,
            "num_hidden_layers": 60,
            "intermediate_size": 21504,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
        },
        "vision_config": _LARGE_VISION,
    },
}
"""Sizes of published models by short name. Other fields are their families' defaults."""
_PROCESSED = "pixel_values", "image_position_ids", "num_soft_tokens_per_image"
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


UNIFIED_VISION: dict[str, Any] = {
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "mm_embed_dim": 32,
    "output_proj_dims": 32,
    "mm_posemb_size": 80,
    "initializer_range": 0.2,
}


def make_unified(folder: Path) -> Path:
    """A checkpoint of a model without a tower in `folder`."""
    absent = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
    text = {name: value for name, value in {**TEXT, **DECODER, **LARGE}.items() if name not in absent}
    ids = _write_texts(folder)
    config = Gemma4UnifiedConfig(
        text_config={**text, "vocab_size": ids.pop("vocab_size")}, vision_config=UNIFIED_VISION, **ids
    )
    save_model(folder, Gemma4UnifiedForConditionalGeneration, config)
    change_tensors(folder, lambda name, tensor: (_published(name), tensor + 0.1 if "patch_ln" in name else tensor))
    settings = {"image_processor_type": "Gemma4UnifiedImageProcessor", **IMAGES}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def _published(name: str) -> str:
    """A tensor's name in published files of models without a tower."""
    name = name.replace("embed_vision.pa", "vision_embedder.pa").replace("embed_vision.po", "vision_embedder.po")
    return name.replace("multimodal_embedder.", "")


def make_gemma4(folder: Path, *, vision: dict[str, Any] | None = None, **text: Any) -> Path:
    """A checkpoint in `folder`. vision, text: fields of the config's sections."""
    ids = _write_texts(folder)
    size = ids.pop("vocab_size")
    sizes = {"vocab_size": size, "vocab_size_per_layer_input": size}
    config = Gemma4Config(
        text_config={**TEXT, **DECODER, **sizes, **text}, vision_config={**VISION, **(vision or {})}, **ids
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


def _write_texts(folder: Path) -> dict[str, int]:
    """Tokenizer and chat template in `folder`. Returns the ids of tokens as configs name them, and the vocabulary's
    size."""
    tokenizer = write_tokenizer(folder, takes_images=False)
    special = ["<|turn>", "<turn|>", *NAMED.values()]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, "extra_special_tokens": NAMED}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    ids = {f"{name}_id": tokenizer.token_to_id(token) for name, token in NAMED.items()}
    return {"vocab_size": tokenizer.get_vocab_size() + 5, **ids}


def image_inputs(images: Sequence[Image.Image], *, unified: bool = False, **settings: Any) -> dict[str, torch.Tensor]:
    """What transformers' model takes of images. unified: the model has no tower."""
    processed = Gemma4ImageProcessorPil(**{**IMAGES, **settings})(list(images), return_tensors="pt")
    if unified:
        merged = [_merged(*one) for one in zip(*(processed[name] for name in _PROCESSED), strict=True)]
        pixels, positions = zip(*merged, strict=True)
        return {
            "pixel_values": pad_sequence(list(pixels), batch_first=True),
            "image_position_ids": pad_sequence(list(positions), batch_first=True, padding_value=-1),
        }
    return {name: processed[name] for name in ("pixel_values", "image_position_ids")}


def _merged(patches: torch.Tensor, places: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches of an image to pixels of its squares, whose channels lie side by side, and the columns and rows of
    these. Transformers' own function needs torchvision."""
    pool, patch = IMAGES["pooling_kernel_size"], IMAGES["patch_size"]
    across = (int(places[:, 0].max()) + 1) // pool
    pixels = patches[: count * pool**2].view(-1, pool, across, pool, patch, patch, 3)
    columns, rows = torch.meshgrid(torch.arange(across), torch.arange(len(pixels)), indexing="xy")
    return pixels.permute(0, 2, 1, 4, 3, 5, 6).reshape(count, -1), torch.stack((columns, rows), -1).view(count, 2)


def open_theirs(folder: Path) -> nn.Module:
    """Transformers' model in float32."""
    model: nn.Module = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return model
