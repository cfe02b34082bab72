"""The files of zai-org/GLM-OCR as its repository documents them, without weights: what its configurations say, its
special tokens at their ids, what its chat template writes, and the header of its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.published import write_files, write_tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["GlmOcrForConditionalGeneration"],
    "model_type": "glm_ocr",
    "text_config": {
        "model_type": "glm_ocr_text",
        "pad_token_id": 59246,
        "vocab_size": 59392,
        "eos_token_id": [59246, 59253],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "initializer_range": 0.02,
        "intermediate_size": 4608,
        "max_position_embeddings": 131072,
        "num_attention_heads": 16,
        "num_hidden_layers": 16,
        "num_nextn_predict_layers": 1,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [16, 24, 24],
            "partial_rotary_factor": 1.0,
            "rope_theta": 10000,
        },
        "tie_word_embeddings": False,
        "use_cache": True,
    },
    "vision_config": {
        "model_type": "glm_ocr_vision",
        "hidden_size": 1024,
        "depth": 24,
        "num_heads": 16,
        "attention_bias": True,
        "intermediate_size": 4096,
        "hidden_act": "silu",
        "hidden_dropout_prob": 0.0,
        "initializer_range": 0.02,
        "image_size": 336,
        "patch_size": 14,
        "out_hidden_size": 1536,
        "rms_norm_eps": 1e-05,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "image_start_token_id": 59256,
    "image_end_token_id": 59257,
    "video_start_token_id": 59258,
    "video_end_token_id": 59259,
    "image_token_id": 59280,
    "video_token_id": 59281,
    "tie_word_embeddings": False,
    "transformers_version": "5.0.1dev0",
}
FILES: dict[str, dict[str, Any]] = {
    "config.json": CONFIG,
    "preprocessor_config.json": {
        "size": {"shortest_edge": 12544, "longest_edge": 9633792},
        "do_rescale": True,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Glm46VImageProcessor",
        "processor_class": "Glm46VProcessor",
    },
}
SPECIAL = """<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> <|observation|>
<|begin_of_image|> <|end_of_image|> <|begin_of_video|> <|end_of_video|> <|begin_of_audio|> <|end_of_audio|>
<|begin_of_transcription|> <|end_of_transcription|> <|code_prefix|> <|code_middle|> <|code_suffix|> <think> </think>
<tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key> <arg_value> </arg_value> /nothink
<|begin_of_box|> <|end_of_box|> <|image|> <|video|>""".split()
PLAIN = {"<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>",
         "</arg_key>", "<arg_value>", "</arg_value>", "/nothink", "<|begin_of_box|>", "<|end_of_box|>"}  # fmt: skip
FIRST_ADDED = 59246

TEMPLATE = """[gMASK]<sop>
{%- for message in messages -%}
    {{ '<|' + message.role + '|>\\n' -}}
    {%- if message.content is string -%}{{ message.content }}{%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'image' -%}<|begin_of_image|><|image|><|end_of_image|>
            {%- elif part.type == 'text' -%}{{ part.text }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}
"""
"""Writes of images and texts what the published template writes."""

_TOWER_LAYER = {
    "norm1.weight": (1024,), "norm2.weight": (1024,), "attn.qkv.weight": (3072, 1024), "attn.qkv.bias": (3072,),
    "attn.proj.weight": (1024, 1024), "attn.proj.bias": (1024,), "attn.q_norm.weight": (64,),
    "attn.k_norm.weight": (64,), "mlp.gate_proj.weight": (4096, 1024), "mlp.gate_proj.bias": (4096,),
    "mlp.up_proj.weight": (4096, 1024), "mlp.up_proj.bias": (4096,), "mlp.down_proj.weight": (1024, 4096),
    "mlp.down_proj.bias": (1024,),
}  # fmt: skip
_NORMS = ("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")
_LAYER = {
    **{f"{name}.weight": (1536,) for name in _NORMS},
    "self_attn.q_proj.weight": (2048, 1536), "self_attn.k_proj.weight": (1024, 1536),
    "self_attn.v_proj.weight": (1024, 1536), "self_attn.o_proj.weight": (1536, 2048),
    "mlp.gate_up_proj.weight": (9216, 1536), "mlp.down_proj.weight": (1536, 4608),
}  # fmt: skip
_PREDICTION = {
    **_LAYER, "embed_tokens.weight": (59392, 1536), "enorm.weight": (1536,), "hnorm.weight": (1536,),
    "eh_proj.weight": (1536, 3072), "shared_head.norm.weight": (1536,), "shared_head.head.weight": (59392, 1536),
}  # fmt: skip
"""Of the layer that predicts further tokens."""


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    """Of all tensors, by the names in the file."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.visual.patch_embed.proj.weight": (1024, 3, 2, 14, 14),
        "model.visual.patch_embed.proj.bias": (1024,),
        "model.visual.post_layernorm.weight": (1024,),
        "model.visual.downsample.weight": (1536, 1024, 2, 2),
        "model.visual.downsample.bias": (1536,),
        "model.visual.merger.proj.weight": (1536, 1536),
        "model.visual.merger.post_projection_norm.weight": (1536,),
        "model.visual.merger.post_projection_norm.bias": (1536,),
        "model.visual.merger.gate_proj.weight": (4608, 1536),
        "model.visual.merger.up_proj.weight": (4608, 1536),
        "model.visual.merger.down_proj.weight": (1536, 4608),
        "model.language_model.embed_tokens.weight": (59392, 1536),
        "model.language_model.norm.weight": (1536,),
        "lm_head.weight": (59392, 1536),
    }
    for index in range(24):
        shapes |= {f"model.visual.blocks.{index}.{name}": shape for name, shape in _TOWER_LAYER.items()}
    for index in range(17):
        layer = _LAYER if index < 16 else _PREDICTION
        shapes |= {f"model.language_model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def write_published(folder: Path) -> Path:
    """All files in `folder`. The vocabulary has other words than the published one, the file of weights a hole for
    data."""
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer_config = {
        "backend": "tokenizers", "clean_up_tokenization_spaces": False, "eos_token": "<|endoftext|>",
        "extra_special_tokens": SPECIAL, "is_local": False, "model_max_length": 655380, "pad_token": "<|endoftext|>",
        "padding_side": "left", "processor_class": "Glm46VProcessor", "tokenizer_class": "TokenizersBackend",
    }  # fmt: skip
    write_tokenizer(folder, dict(enumerate(SPECIAL, FIRST_ADDED)), {*SPECIAL} - PLAIN, tokenizer_config)
    return write_files(folder, FILES, tensor_shapes())
