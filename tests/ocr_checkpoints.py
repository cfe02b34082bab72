"""Small random checkpoints of GLM-OCR, GLM-V and PaddleOCR-VL with all the files that a server needs, and transformers'
processors for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, processors
from transformers import (
    PaddleOCRVLConfig,
    PaddleOCRVLForConditionalGeneration,
    PreTrainedTokenizerFast,
)
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor

from tests.checkpoints import TEXT, rename_tensors, write_tokenizer
from tests.models.test_qwen_vision import flat_patches, patches
from tests.saved_models import save_model

BOUNDS = (16 * 16, 48 * 48)
"""Pixels of an image at least and at most."""
GLM_TEMPLATE = (
    "[gMASK]<sop>{% for message in messages %}<|{{ message.role }}|>\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|begin_of_image|><|image|><|end_of_image|>"
    "{% elif part.type == 'video' %}<|begin_of_video|><|video|><|end_of_video|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_GLM_TOKENS = (
    "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>",
    "<|end_of_video|>", "<|image|>", "<|video|>",
)  # fmt: skip


def make_glm_ocr(folder: Path, *, text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None) -> Path:
    """GLM-OCR in `folder`, whose embeddings are 8 pixels wide, with tensors of a layer that predicts further tokens;
    text, vision: fields of its configs."""
    own = {"head_dim": 16, "num_nextn_predict_layers": 1, **(text or {})}
    make_glm(folder, "GlmOcr", text=own, vision={"intermediate_size": 40, **(vision or {})})
    path = folder / "model.safetensors"
    further = f"model.language_model.layers.{TEXT['num_hidden_layers']}."
    unused = {f"{further}eh_proj.weight": torch.randn(48, 96), f"{further}input_layernorm.weight": torch.ones(48)}
    save_file({**load_file(path), **unused}, path, metadata={"format": "pt"})
    return folder


GLM4V_TEXTS: dict[str, dict[str, Any]] = {
    "Glm4v": {"num_attention_heads": 3, "num_key_value_heads": 1},
    "Glm46V": {"num_attention_heads": 3, "num_key_value_heads": 1, "pad_token_id": 0},
    "Glm4vMoe": {
        "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
    },
}  # fmt: skip


def make_glm4v(folder: Path, kind: str) -> Path:
    """GLM-4.1V, 4.5V or 4.6V; kind: a key of `GLM4V_TEXTS`. Half of each head is rotated."""
    rope = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    tower = {"intermediate_size": 56, "image_size": 22}
    return make_glm(folder, kind, text={"rope_parameters": rope, **GLM4V_TEXTS[kind]}, vision=tower)


def make_glm(folder: Path, kind: str, *, text: dict[str, Any], vision: dict[str, Any]) -> Path:
    """A model whose embeddings are 8 pixels wide. kind: of its classes; text, vision: fields of its configs."""
    tokenizer = _with_tokens(folder, _GLM_TOKENS)
    (folder / "chat_template.jinja").write_text(GLM_TEMPLATE)
    tokens = {
        "image": "image", "video": "video", "image_start": "begin_of_image", "image_end": "end_of_image",
        "video_start": "begin_of_video", "video_end": "end_of_video",
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "partial_rotary_factor": 1.0}
    own = {**TEXT, "vocab_size": tokenizer.get_vocab_size() + 5, "rope_parameters": rope}
    tower = {
        "depth": 3, "hidden_size": 32, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": TEXT["hidden_size"], "initializer_range": 0.15,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(
        text_config={**own, **text},
        vision_config={**tower, **vision},
        **{f"{name}_token_id": tokenizer.token_to_id(f"<|{token}|>") for name, token in tokens.items()},
    )
    save_model(folder, getattr(transformers, f"{kind}ForConditionalGeneration"), config)
    settings = {
        "image_processor_type": "Glm46VImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 2 * BOUNDS[0], "longest_edge": 2 * BOUNDS[1]},
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps({**settings, "processor_class": "Glm46VProcessor"}))
    return folder


PADDLE_TEMPLATE = (
    "<|begin_of_sentence|>{% for message in messages %}{{ 'User: ' if message.role == 'user' else 'Assistant:\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\n' if message.role == 'user' else '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:\n{% endif %}"
)
_PADDLE_TOKENS = ("<|begin_of_sentence|>", "<|IMAGE_START|>", "<|IMAGE_END|>", "<|IMAGE_PLACEHOLDER|>", "<|video_pad|>")


def make_paddleocr(
    folder: Path,
    *,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    published_names: bool = False,
) -> Path:
    """PaddleOCR-VL in `folder`, whose embeddings are 8 pixels wide. published_names: tensors and the text model's
    fields are called and nested as in the published checkpoint, else as in transformers 5."""
    tokenizer = _with_tokens(folder, _PADDLE_TOKENS)
    (folder / "chat_template.jinja").write_text(PADDLE_TEMPLATE)
    named = json.loads((folder / "tokenizer_config.json").read_text())
    named["extra_special_tokens"] = {"image_token": "<|IMAGE_PLACEHOLDER|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    own = {**TEXT, "vocab_size": tokenizer.get_vocab_size() + 5, "head_dim": 16, "rope_parameters": rope}
    tower = {
        "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 2, "patch_size": 4,
        "image_size": 22, "initializer_range": 0.15,
    }  # fmt: skip
    config = PaddleOCRVLConfig(
        text_config={**own, **(text or {})},
        vision_config={**tower, **(vision or {})},
        image_token_id=tokenizer.token_to_id("<|IMAGE_PLACEHOLDER|>"),
        video_token_id=tokenizer.token_to_id("<|video_pad|>"),
        vision_start_token_id=tokenizer.token_to_id("<|IMAGE_START|>"),
        vision_end_token_id=tokenizer.token_to_id("<|IMAGE_END|>"),
        tie_word_embeddings=False,
    )
    save_model(folder, PaddleOCRVLForConditionalGeneration, config)
    if published_names:
        rename_tensors(folder, published_paddle_name)
        saved = json.loads((folder / "config.json").read_text())
        own_fields = saved.pop("text_config")
        own_fields.pop("model_type")
        parameters = own_fields.pop("rope_parameters")
        flat = {"rope_theta": parameters.pop("rope_theta"), "rope_scaling": {**parameters, "type": "default"}}
        (folder / "config.json").write_text(json.dumps({**own_fields, **flat, **saved}))
    settings = {
        "image_processor_type": "PaddleOCRVLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 1,
        "min_pixels": BOUNDS[0], "max_pixels": BOUNDS[1], "image_mean": [0.5] * 3, "image_std": [0.4] * 3,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(
        json.dumps({**settings, "processor_class": "PaddleOCRVLProcessor"})
    )
    return folder


def published_paddle_name(name: str) -> str:
    for new, old in {
        "model.projector.": "mlp_AR.",
        "model.visual.": "visual.",
        "model.language_model.": "model.",
    }.items():
        if name.startswith(new):
            return old + name.removeprefix(new)
    return name


def rows_of(pixels: torch.Tensor, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels as transformers' processors of these models arrange them, and their grid."""
    if config.model_type == "paddleocr_vl_vision":
        return flat_patches(pixels, config.patch_size)
    return patches(pixels, config)


def _with_tokens(folder: Path, tokens: tuple[str, ...]) -> Tokenizer:
    tokenizer = write_tokenizer(folder, takes_images=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


class GlmImages(Glm46VProcessor):
    """Without its part for videos, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return argument and super().check_argument_for_proper_class(argument_name, argument)


def load_processor(folder: Path) -> Any:
    """transformers' processor."""
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    name = settings.pop("image_processor_type")
    del settings["processor_class"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if name.startswith("PaddleOCRVL"):
        images = PaddleOCRVLImageProcessorPil(**settings)
        return PaddleOCRVLProcessor(images, tokenizer, chat_template=PADDLE_TEMPLATE)
    return GlmImages(Glm46VImageProcessorPil(**settings), tokenizer, chat_template=GLM_TEMPLATE)
