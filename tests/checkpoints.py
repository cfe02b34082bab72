"""Small random checkpoints with all the files that a server needs, made by transformers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLVisionConfig,
    LightOnOcrConfig,
    LightOnOcrForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    Ministral3Config,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3Config,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig

from tests.prompt.tokenizers_for_tests import CHATML_PARTS, CORPUS
from tests.saved_models import save_model

TEXT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 42,
    "patch_size": 14,
}


def make_text_model(
    folder: Path,
    model_class: type[PreTrainedModel] = LlamaForCausalLM,
    config_class: type[PreTrainedConfig] = LlamaConfig,
    *,
    shard_size: str = "1GB",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """A decoder, a tokenizer and a chat template in `folder`; overrides are fields of the config."""
    tokenizer = write_tokenizer(folder, takes_images=False)
    config = config_class(**{**TEXT, "vocab_size": tokenizer.get_vocab_size() + 5, **overrides})
    save_model(folder, model_class, config, seed, dtype, shard_size)
    return folder


make_llama = make_text_model


def make_llava(
    folder: Path,
    *,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    published_names: bool = False,
    shard_size: str = "1GB",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """A LLaVA checkpoint in `folder`; text, vision and overrides are fields of its three configs.

    The placeholder is among the last 8 ids of the vocabulary, which is padded as published checkpoints pad theirs.
    published_names: name tensors as the checkpoints of the llava-hf organization do, else as transformers 5 does.
    """
    tokenizer = write_tokenizer(folder, takes_images=True)
    vision_config = CLIPVisionConfig(**{**VISION, **(vision or {})})
    text_config = LlamaConfig(**{**TEXT, "vocab_size": tokenizer.get_vocab_size() + 5, **(text or {})})
    config = LlavaConfig(
        vision_config=vision_config,
        text_config=text_config,
        image_token_index=tokenizer.token_to_id("<image>"),
        **{"image_seq_length": (vision_config.image_size // vision_config.patch_size) ** 2, **overrides},
    )
    save_model(folder, LlavaForConditionalGeneration, config, seed, dtype, shard_size)
    if published_names:
        rename_tensors(folder, published_name)
    write_image_processor(folder, vision_config, config.vision_feature_select_strategy)
    return folder


def make_llava_next(
    folder: Path,
    *,
    text_class: type[PreTrainedConfig] = LlamaConfig,
    text: dict[str, Any] | None = None,
    published_names: bool = False,
    **overrides: Any,
) -> Path:
    """A LLaVA-NeXT checkpoint in `folder`, of tiles of 16 pixels and 4 x 4 embeddings; else as `make_llava`."""
    tokenizer = write_tokenizer(folder, takes_images=True)
    text_config = text_class(**{**TEXT, "vocab_size": tokenizer.get_vocab_size() + 5, **(text or {})})
    config = LlavaNextConfig(
        vision_config=CLIPVisionConfig(**{**VISION, "image_size": 16, "patch_size": 4}),
        text_config=text_config,
        image_token_index=tokenizer.token_to_id("<image>"),
        **{"image_grid_pinpoints": PINPOINTS, **overrides},
    )
    save_model(folder, LlavaNextForConditionalGeneration, config, 0, torch.float32, "1GB")
    if published_names:
        rename_tensors(folder, published_name)
    write_image_processor(folder, config.vision_config, config.vision_feature_select_strategy)
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    processor |= {
        "image_processor_type": "LlavaNextImageProcessor",
        "image_grid_pinpoints": config.image_grid_pinpoints,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


PINPOINTS = [[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]]


def make_idefics3(
    folder: Path,
    *,
    family: str = "Idefics3",
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    image_processor: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """An Idefics3 or SmolVLM checkpoint in `folder`, of tiles of 16 pixels and 2 x 2 embeddings."""
    tokenizer = write_tokenizer(folder, takes_images=True)
    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    words = ["<fake_token_around_image>", "<global-img>", *places, "<end_of_utterance>"]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words])
    tokenizer.save(str(folder / "tokenizer.json"))
    vision_class, config_class = IDEFICS3_CONFIGS[family]
    sizes = {"num_hidden_layers": 3, "image_size": 16, "patch_size": 4, "initializer_range": 0.15}
    config = config_class(
        vision_config=vision_class(**{**VISION, **sizes, **(vision or {})}),
        text_config=LlamaConfig(**{**TEXT, "vocab_size": tokenizer.get_vocab_size() + 5, **(text or {})}),
        image_token_id=tokenizer.token_to_id("<image>"),
        **{"scale_factor": 2, "pad_token_id": 2, **overrides},
    )
    save_model(folder, getattr(transformers, f"{family}ForConditionalGeneration"), config, 0, torch.float32, "1GB")
    processor = {
        "image_processor_type": f"{family}ImageProcessor",
        "size": {"longest_edge": 48},
        "max_image_size": {"longest_edge": 16},
        **(image_processor or {}),
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    names = {"processor_class": f"{family}Processor", "image_seq_len": 4}
    (folder / "processor_config.json").write_text(json.dumps(names))
    return folder


IDEFICS3_CONFIGS: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedConfig]]] = {
    "Idefics3": (Idefics3VisionConfig, transformers.Idefics3Config),
    "SmolVLM": (SmolVLMVisionConfig, transformers.SmolVLMConfig),
}


INTERNVL_NAMED = {
    "context_image_token": "<image>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "video_token": "<video>",
}


def make_internvl(
    folder: Path,
    *,
    text_class: type[PreTrainedConfig] = Qwen2Config,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    published_names: bool = False,
    **overrides: Any,
) -> Path:
    """An InternVL checkpoint in `folder`, of tiles of 16 pixels and 2 x 2 embeddings; else as `make_llava`."""
    tokenizer = write_tokenizer(folder, takes_images=True)
    special = [AddedToken(token, special=True, normalized=False) for token in list(INTERNVL_NAMED.values())[1:]]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, "extra_special_tokens": INTERNVL_NAMED}))
    sizes = {"image_size": [16, 16], "patch_size": [4, 4], "num_hidden_layers": 3, "initializer_range": 0.15}
    config = InternVLConfig(
        vision_config=InternVLVisionConfig(**{**VISION, "attention_bias": True, **sizes, **(vision or {})}),
        text_config=text_class(**{**TEXT, "vocab_size": tokenizer.get_vocab_size() + 5, **(text or {})}),
        image_token_id=tokenizer.token_to_id("<image>"),
        **{"image_seq_length": 4, "tie_word_embeddings": False, **overrides},
    )
    save_model(folder, InternVLForConditionalGeneration, config)
    if published_names:
        rename_tensors(folder, lambda name: published_name(name).replace("vision_tower.vision_model.", "vision_tower."))
    processor = {
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "size": {"height": 16, "width": 16},
        "crop_to_patches": False,
        "max_patches": 8,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    names = {"processor_class": "InternVLProcessor", "image_seq_length": 4}
    (folder / "processor_config.json").write_text(json.dumps(names))
    return folder


PIXTRAL_ENDS = {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
PIXTRAL_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 48,
    "initializer_range": 0.15,
}  # fmt: skip
MINISTRAL_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 32, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def make_pixtral(
    folder: Path,
    *,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    published_names: bool = False,
    **overrides: Any,
) -> Path:
    """A Pixtral checkpoint in `folder`, of patches of 4 pixels; else as `make_llava`."""
    config = LlavaConfig(
        vision_config=PixtralVisionConfig(**{**PIXTRAL_VISION, "patch_size": 4, **(vision or {})}),
        text_config=MistralConfig(**{**TEXT, "vocab_size": 400, "head_dim": 8, "sliding_window": None, **(text or {})}),
        **{"vision_feature_layer": -1, "vision_feature_select_strategy": "full", **overrides},
    )
    return _save_with_rows(folder, LlavaForConditionalGeneration, config, {"patch_size": 4}, published_names)


def make_mistral3(
    folder: Path,
    *,
    text_class: type[PreTrainedConfig] = Ministral3Config,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    published_names: bool = False,
    **overrides: Any,
) -> Path:
    """A Mistral Small 3 or Ministral 3 checkpoint in `folder`, with embeddings of 2 x 2 patches of 3 pixels; else as
    `make_llava`."""
    rope = {"rope_parameters": MINISTRAL_ROPE} if text_class is Ministral3Config else {"sliding_window": None}
    config = Mistral3Config(
        vision_config=PixtralVisionConfig(**{**PIXTRAL_VISION, "patch_size": 3, **(vision or {})}),
        text_config=text_class(**{**TEXT, "vocab_size": 400, "head_dim": 8, **rope, **(text or {})}),
        **{"tie_word_embeddings": False, **overrides},
    )
    sizes = {"patch_size": 3, "spatial_merge_size": config.spatial_merge_size}
    return _save_with_rows(folder, Mistral3ForConditionalGeneration, config, sizes, published_names)


def make_lighton_ocr(folder: Path) -> Path:
    """A LightOnOCR checkpoint in `folder`, with embeddings of 2 x 2 patches of 3 pixels; else as `make_llava`."""
    config = LightOnOcrConfig(
        vision_config=PixtralVisionConfig(**{**PIXTRAL_VISION, "patch_size": 3}),
        text_config=Qwen3Config(**{**TEXT, "vocab_size": 400, "head_dim": 8}),
        tie_word_embeddings=False,
    )
    sizes = {"patch_size": 3, "spatial_merge_size": 2}
    _save_with_rows(folder, LightOnOcrForConditionalGeneration, config, sizes, published_names=False)
    named = json.loads((folder / "processor_config.json").read_text())
    (folder / "processor_config.json").write_text(json.dumps({**named, "processor_class": "LightOnOcrProcessor"}))
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps({**settings, "patch_size": 6}))
    return folder


def _save_with_rows(
    folder: Path,
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    sizes: dict[str, int],
    published_names: bool,
) -> Path:
    """A checkpoint whose images have a token behind each row, and longest edges of 48 pixels."""
    tokenizer = write_tokenizer(folder, takes_images=True)
    tokenizer.add_special_tokens([AddedToken(end, special=True, normalized=False) for end in PIXTRAL_ENDS.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    config.image_token_index = config.image_token_id = tokenizer.token_to_id("<image>")
    save_model(folder, model_class, config)
    if published_names:
        rename_tensors(folder, lambda name: published_name(name).replace("vision_tower.vision_model.", "vision_tower."))
    settings = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 48}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    named = {"processor_class": "PixtralProcessor", "image_token": "<image>", **PIXTRAL_ENDS}
    (folder / "processor_config.json").write_text(json.dumps({**named, **sizes}))
    return folder


QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_TOKENS = ("im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
QWEN_VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 3, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 3, "patch_size": 4},
    "qwen2_5_vl": {
        "depth": 4, "hidden_size": 32, "intermediate_size": 42, "num_heads": 2, "patch_size": 4, "window_size": 16,
        "fullatt_block_indexes": [1, 3], "tokens_per_second": 2,
    },
    "qwen3_vl": {
        "depth": 4, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "patch_size": 4,
        "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2],
    },
    "qwen3_5": {
        "depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "patch_size": 4,
        "num_position_embeddings": 25,
    },
}  # fmt: skip
QWEN35: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "initializer_range": 0.1,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    },
}
QWEN_CLASSES = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
}
QWEN35_CLASSES = {"qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration)}
QWEN_PIXELS = {"min_pixels": 16 * 16, "max_pixels": 48 * 48}
QWEN3_VIDEO_PIXELS = {"min_pixels": 2000, "max_pixels": 9000}
"""Of all frames of a video together."""


def make_qwen_vl(folder: Path, kind: str) -> Path:
    """A Qwen2-VL, Qwen2.5-VL, Qwen3-VL or Qwen3.5 checkpoint in `folder`, whose embeddings are 8 pixels wide."""
    tokenizer = write_tokenizer(folder, takes_images=False)
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True, normalized=False) for name in QWEN_TOKENS])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(QWEN_TEMPLATE)
    config_class, model_class = (QWEN_CLASSES | QWEN35_CLASSES)[kind]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    width = {"hidden_size" if kind == "qwen2_vl" else "out_hidden_size": TEXT["hidden_size"]}
    config = config_class(
        text_config={
            **TEXT,
            "vocab_size": tokenizer.get_vocab_size() + 5,
            "rope_parameters": rope,
            "max_position_embeddings": 4096,
            **({"head_dim": 8} if kind == "qwen3_vl" else {}),
            **({**QWEN35, "linear_num_value_heads": 4} if kind == "qwen3_5" else {}),
        },
        vision_config={**QWEN_VISION[kind], **width},
        **{f"{name}_token_id": tokenizer.token_to_id(f"<|{name}|>") for name in ("vision_start", "vision_end")},
        image_token_id=tokenizer.token_to_id("<|image_pad|>"),
        video_token_id=tokenizer.token_to_id("<|video_pad|>"),
    )
    # Another seed gives answers that are alike.
    save_model(folder, model_class, config, 3 if kind == "qwen3_vl" else 0, torch.float32, "1GB")
    settings = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, **QWEN_PIXELS}
    (folder / "preprocessor_config.json").write_text(json.dumps({**settings, "temporal_patch_size": 2}))
    if kind in ("qwen3_vl", "qwen3_5"):
        settings = {**settings, **QWEN3_VIDEO_PIXELS, "video_processor_type": "Qwen3VLVideoProcessor"}
        (folder / "video_preprocessor_config.json").write_text(json.dumps({**settings, "temporal_patch_size": 2}))
    return folder


GEMMA3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GEMMA3_NAMED = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
GEMMA3_TEXT: dict[str, Any] = {
    "head_dim": 8,
    "sliding_window": 6,
    "query_pre_attn_scalar": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
GEMMA3_PICTURE_TOKENS = 16


def make_gemma3(folder: Path, *, published_names: bool = False, **overrides: Any) -> Path:
    """A Gemma 3 checkpoint with its vision tower in `folder`; overrides are fields of its text config."""
    tokenizer = write_tokenizer(folder, takes_images=False)
    special = ["<start_of_turn>", "<end_of_turn>", *GEMMA3_NAMED.values()]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, "extra_special_tokens": GEMMA3_NAMED}))
    (folder / "chat_template.jinja").write_text(GEMMA3_TEMPLATE)
    ids = {name: tokenizer.token_to_id(token) for name, token in GEMMA3_NAMED.items()}
    config = Gemma3Config(
        text_config={**TEXT, "vocab_size": tokenizer.get_vocab_size() + 5, **GEMMA3_TEXT, **overrides},
        vision_config={
            **VISION, "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 4, "vision_use_head": False
        },
        mm_tokens_per_image=GEMMA3_PICTURE_TOKENS,
        **{f"{name}_index": token_id for name, token_id in ids.items()},
    )  # fmt: skip
    save_model(folder, Gemma3ForConditionalGeneration, config, 0, torch.float32, "1GB")
    if published_names:
        rename_tensors(folder, published_name)
    settings = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}}
    (folder / "preprocessor_config.json").write_text(json.dumps({**settings, "do_pan_and_scan": None}))
    return folder


def published_name(name: str) -> str:
    """A tensor's name in transformers 5 to the name that published LLaVA checkpoints give it."""
    for new, old in {
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "model.image_newline": "image_newline",
    }.items():
        if name.startswith(new):
            return old + name.removeprefix(new)
    raise ValueError(name)


def rename_tensors(folder: Path, rename: Callable[[str], str | None]) -> None:
    """Rename tensors of a single-file checkpoint; None removes one."""
    change_tensors(folder, lambda name, tensor: (new, tensor) if (new := rename(name)) else None)


def change_tensors(folder: Path, change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor] | None]) -> None:
    """Rewrite a single-file checkpoint, tensor by tensor; None removes one."""
    path = folder / "model.safetensors"
    changed = [pair for name, tensor in load_file(path).items() if (pair := change(name, tensor)) is not None]
    save_file(dict(changed), path, metadata={"format": "pt"})


def change_config(folder: Path, **fields: Any) -> None:
    """Set fields of config.json; None removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def write_tokenizer(folder: Path, *, takes_images: bool) -> Tokenizer:
    """A byte-level tokenizer with its chat template; if the model takes images, its last token is ``<image>``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_str(_trained_tokenizer())
    if takes_images:
        tokenizer.add_special_tokens([AddedToken("<image>", special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **named}))
    (folder / "chat_template.jinja").write_text(CHATML_PARTS.replace("<|im_start|>", "").replace("<|im_end|>", "</s>"))
    return tokenizer


@functools.cache
def _trained_tokenizer() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer.to_str()


def write_image_processor(folder: Path, vision: CLIPVisionConfig, strategy: str) -> None:
    """The files that tell images' size and how many placeholders they take."""
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": vision.image_size},
        "crop_size": {"height": vision.image_size, "width": vision.image_size},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    sizes = {
        "processor_class": "LlavaProcessor",
        "patch_size": vision.patch_size,
        "vision_feature_select_strategy": strategy,
        "num_additional_image_tokens": 1,
    }
    (folder / "processor_config.json").write_text(json.dumps(sizes))
