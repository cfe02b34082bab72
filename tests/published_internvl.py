"""The files of OpenGVLab/InternVL3-1B-hf as its repository documents them, without weights: what its configurations
say, its special tokens at their ids, what its chat template writes, and the header of its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.published import write_files, write_tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["InternVLForConditionalGeneration"],
    "downsample_ratio": 0.5,
    "image_seq_length": 256,
    "image_token_id": 151667,
    "model_type": "internvl",
    "projector_hidden_act": "gelu",
    "text_config": {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": 896,
        "initializer_range": 0.02,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 70,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151674,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.0.dev0",
    "vision_config": {
        "architectures": ["InternVisionModel"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "hidden_size": 1024,
        "image_size": [448, 448],
        "initializer_factor": 0.1,
        "initializer_range": 1e-10,
        "intermediate_size": 4096,
        "layer_norm_eps": 1e-06,
        "layer_scale_init_value": 0.1,
        "model_type": "internvl_vision",
        "norm_type": "layer_norm",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "patch_size": [14, 14],
        "projection_dropout": 0.0,
        "torch_dtype": "bfloat16",
        "use_absolute_position_embeddings": True,
        "use_mask_token": False,
        "use_mean_pooling": True,
        "use_qk_norm": False,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}
FILES: dict[str, dict[str, Any]] = {
    "config.json": CONFIG,
    "preprocessor_config.json": {
        "crop_size": None,
        "crop_to_patches": False,
        "data_format": "channels_first",
        "default_to_square": True,
        "device": None,
        "do_center_crop": None,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.485, 0.456, 0.406],
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "image_std": [0.229, 0.224, 0.225],
        "input_data_format": None,
        "max_patches": 12,
        "min_patches": 1,
        "processor_class": "InternVLProcessor",
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
        "return_tensors": None,
        "size": {"height": 448, "width": 448},
    },
    "processor_config.json": {"image_seq_length": 256, "processor_class": "InternVLProcessor"},
    "generation_config.json": {
        "_from_model_config": True,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "transformers_version": "4.52.0.dev0",
    },
}
NAMED = {
    "context_image_token": "<IMG_CONTEXT>",
    "end_image_token": "</img>",
    "start_image_token": "<img>",
    "video_token": "<video>",
}
SPECIAL = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>
<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>""".split()
PLAIN = """<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|>
<|file_sep|>""".split()
OWN = "<img> </img> <IMG_CONTEXT> <quad> </quad> <ref> </ref> <box> </box> <video>".split()
FIRST_ADDED = 151643

TEMPLATE = """
{%- for message in messages -%}
    {{ '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.content is string -%}{{ message.content }}{%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'image' -%}{{ '<IMG_CONTEXT>\\n' }}
            {%- elif part.type == 'video' -%}{{ '<video>\\n' }}
            {%- elif part.type == 'text' -%}{{ part.text }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""Writes what the published template writes."""

_TOWER_LAYER = {
    "lambda_1": (1024,), "lambda_2": (1024,), "layernorm_before.weight": (1024,), "layernorm_before.bias": (1024,),
    "layernorm_after.weight": (1024,), "layernorm_after.bias": (1024,),
    **{f"attention.{name}.weight": (1024, 1024) for name in ("q_proj", "k_proj", "v_proj", "projection_layer")},
    **{f"attention.{name}.bias": (1024,) for name in ("q_proj", "k_proj", "v_proj", "projection_layer")},
    "mlp.fc1.weight": (4096, 1024), "mlp.fc1.bias": (4096,), "mlp.fc2.weight": (1024, 4096), "mlp.fc2.bias": (1024,),
}  # fmt: skip
_LAYER = {
    "input_layernorm.weight": (896,), "post_attention_layernorm.weight": (896,), "self_attn.q_proj.weight": (896, 896),
    "self_attn.q_proj.bias": (896,), "self_attn.k_proj.weight": (128, 896), "self_attn.k_proj.bias": (128,),
    "self_attn.v_proj.weight": (128, 896), "self_attn.v_proj.bias": (128,), "self_attn.o_proj.weight": (896, 896),
    "mlp.gate_proj.weight": (4864, 896), "mlp.up_proj.weight": (4864, 896), "mlp.down_proj.weight": (896, 4864),
}  # fmt: skip


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    """Of all tensors, by the names in the file."""
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.embeddings.cls_token": (1, 1, 1024),
        "vision_tower.embeddings.position_embeddings": (1, 1025, 1024),
        "vision_tower.embeddings.patch_embeddings.projection.weight": (1024, 3, 14, 14),
        "vision_tower.embeddings.patch_embeddings.projection.bias": (1024,),
        "multi_modal_projector.layer_norm.weight": (4096,),
        "multi_modal_projector.layer_norm.bias": (4096,),
        "multi_modal_projector.linear_1.weight": (896, 4096),
        "multi_modal_projector.linear_1.bias": (896,),
        "multi_modal_projector.linear_2.weight": (896, 896),
        "multi_modal_projector.linear_2.bias": (896,),
        "language_model.model.embed_tokens.weight": (151674, 896),
        "language_model.model.norm.weight": (896,),
        "language_model.lm_head.weight": (151674, 896),
    }
    for index in range(24):
        shapes |= {f"vision_tower.encoder.layer.{index}.{name}": shape for name, shape in _TOWER_LAYER.items()}
        shapes |= {f"language_model.model.layers.{index}.{name}": shape for name, shape in _LAYER.items()}
    return shapes


def write_published(folder: Path) -> Path:
    """All files in `folder`. The vocabulary has other words than the published one, the file of weights a hole for
    data."""
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer_config = {
        "add_bos_token": False, "add_eos_token": False, "add_prefix_space": False, "bos_token": None,
        "eos_token": "<|im_end|>", "errors": "replace", "extra_special_tokens": NAMED, **NAMED,
        "model_max_length": 8192, "pad_token": "<|endoftext|>", "processor_class": "InternVLProcessor",
        "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
    }  # fmt: skip
    added = dict(enumerate([*SPECIAL, *PLAIN, *OWN], FIRST_ADDED))
    write_tokenizer(folder, added, {*SPECIAL, *OWN}, tokenizer_config)
    return write_files(folder, FILES, tensor_shapes())
