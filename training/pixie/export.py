"""Write pixie as a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from transformers import CLIPVisionConfig, GenerationConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from transformers import PreTrainedTokenizerFast as FastTokenizer

from training.pixie.tokenizer import BOS, CHAT_TEMPLATE, EOS, IMAGE, PAD, SPECIAL_TOKENS, VOCAB_SIZE, train_tokenizer

IMAGE_SIZE: Final = 108
PATCH_SIZE: Final = 12
IMAGE_TOKENS: Final = (IMAGE_SIZE // PATCH_SIZE) ** 2
CONTEXT: Final = 4096

_IMAGE_PROCESSOR: Final[dict[str, Any]] = {
    "image_processor_type": "CLIPImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
    "resample": 3,
    "do_center_crop": False,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_PROCESSOR: Final[dict[str, Any]] = {
    "processor_class": "LlavaProcessor",
    "image_token": SPECIAL_TOKENS[IMAGE],
    "num_additional_image_tokens": 1,
    "patch_size": PATCH_SIZE,
    "vision_feature_select_strategy": "default",
}


def pixie_config() -> LlavaConfig:
    """Return the architecture: a 6 x 192 CLIP ViT, a two-layer projector, a 4 x 256 Llama with 8 heads on 4."""
    vision = CLIPVisionConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=6,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        projection_dim=192,
        hidden_act="gelu",
    )
    text = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        tie_word_embeddings=True,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        projector_hidden_act="gelu",
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=IMAGE_TOKENS,
        tie_word_embeddings=True,
    )
    config.bos_token_id, config.eos_token_id, config.pad_token_id = BOS, EOS, PAD
    return config


def new_model() -> LlavaForConditionalGeneration:
    """Return the model with random weights, in float32."""
    model = LlavaForConditionalGeneration(pixie_config())
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, do_sample=False)
    return model


def load_llava(folder: Path) -> LlavaForConditionalGeneration:
    """Return an exported model, frozen, in float32."""
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    model.requires_grad_(False).eval()
    return model


def export_tokenizer(folder: Path, trained: Tokenizer, template: str = CHAT_TEMPLATE) -> FastTokenizer:
    """Write the tokenizer's files and the chat template; return it as transformers reads it."""
    tokenizer = FastTokenizer(
        tokenizer_object=trained,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": SPECIAL_TOKENS[IMAGE]},
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def export(
    folder: Path, state_dict: Mapping[str, torch.Tensor] | None = None, tokenizer: Tokenizer | None = None
) -> None:
    """Write the whole checkpoint, in bfloat16.

    ``tokenizer`` is the one that the weights were trained with; None trains one.

    ``state_dict`` has the keys of transformers' ``LlavaForConditionalGeneration``; ``lm_head.weight``, tied to the
    embeddings, may be missing. None writes random weights. Raises RuntimeError for missing or unknown keys.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = new_model()
    if state_dict is not None:
        missing, unknown = model.load_state_dict(dict(state_dict), strict=False)
        missing = [key for key in missing if key != "lm_head.weight" and not key.endswith("position_ids")]
        if missing or unknown:
            raise RuntimeError(f"the weights do not fit: missing {missing}, unknown {unknown}")
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    export_tokenizer(folder, tokenizer or train_tokenizer())
    for name, content in (("preprocessor_config", _IMAGE_PROCESSOR), ("processor_config", _PROCESSOR)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
