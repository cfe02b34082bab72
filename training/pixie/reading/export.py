"""Write the model that reads as a Hugging Face folder: Qwen3-VL without merging of patches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GenerationConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from training.pixie.export import CONTEXT, export_tokenizer
from training.pixie.reading.decoder import (
    DECODER_INNER,
    DECODER_LAYERS,
    DECODER_WIDTH,
    HEAD,
    KEY_HEADS,
    NORM_EPS,
    QUERY_HEADS,
    SECTIONS,
    THETA,
    decoder_names,
)
from training.pixie.reading.rows import LEAST_PIXELS
from training.pixie.reading.weights import tower_names, vision_config
from training.pixie.tokenizer import BOS, CHAT_TEMPLATE, EOS, IMAGE, PAD, SPECIAL_TOKENS, VOCAB_SIZE
from vlmserve.pixie.documents import LARGEST_SIDE, PATCH

TEMPLATE: Final = CHAT_TEMPLATE.replace(
    "'<image>'", "'\\n<image>' if loop.previtem and loop.previtem['type'] == 'image' else '<image>'"
)
"""Two images are never beside each other: transformers would take them for one."""
_IMAGE_PROCESSOR: Final[dict[str, Any]] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"shortest_edge": LEAST_PIXELS, "longest_edge": LARGEST_SIDE**2},
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": 1,
}
_PROCESSOR: Final[dict[str, Any]] = {"processor_class": "Qwen3VLProcessor", "image_token": SPECIAL_TOKENS[IMAGE]}


def reading_config() -> Qwen3VLConfig:
    """Return the architecture."""
    return Qwen3VLConfig(
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": DECODER_WIDTH,
            "intermediate_size": DECODER_INNER,
            "num_hidden_layers": DECODER_LAYERS,
            "num_attention_heads": QUERY_HEADS,
            "num_key_value_heads": KEY_HEADS,
            "head_dim": HEAD,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": NORM_EPS,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": THETA,
                "mrope_section": list(SECTIONS),
                "mrope_interleaved": True,
            },
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
            "tie_word_embeddings": True,
        },
        vision_config=vision_config(DECODER_WIDTH),
        image_token_id=IMAGE,
        # No prompt has videos.
        **dict.fromkeys(("video_token_id", "vision_start_token_id", "vision_end_token_id"), PAD),
        tie_word_embeddings=True,
    )


def export_reading(
    folder: Path, tower: Mapping[str, Tensor], decoder: Mapping[str, Tensor], tokenizer: Tokenizer
) -> None:
    """Write the whole checkpoint, in bfloat16. Raises RuntimeError for missing or unknown weights."""
    folder.mkdir(parents=True, exist_ok=True)
    model = Qwen3VLForConditionalGeneration(reading_config())
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, do_sample=False)
    named = {f"model.visual.{name}": tensor for name, tensor in tower_names(tower).items()} | decoder_names(decoder)
    missing, unknown = model.load_state_dict(named, strict=False)
    if unknown or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"the weights do not fit: missing {missing}, unknown {unknown}")
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    export_tokenizer(folder, tokenizer, TEMPLATE)
    for name, content in (("preprocessor_config", _IMAGE_PROCESSOR), ("processor_config", _PROCESSOR)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
