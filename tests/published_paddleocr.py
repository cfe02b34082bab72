"""The files of PaddlePaddle/PaddleOCR-VL as its repository and copies of it document them, without weights: what its
configurations say, its special tokens at their ids, what its chat template writes, and the header of its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.published import write_files, write_tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["PaddleOCRVLForConditionalGeneration"],
    "attention_probs_dropout_prob": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_paddleocr_vl.PaddleOCRVLConfig",
        "AutoModel": "modeling_paddleocr_vl.PaddleOCRVLForConditionalGeneration",
        "AutoModelForCausalLM": "modeling_paddleocr_vl.PaddleOCRVLForConditionalGeneration",
    },
    "compression_ratio": 1.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_dropout_prob": 0.0,
    "hidden_size": 1024,
    "ignored_index": -100,
    "image_token_id": 100295,
    "intermediate_size": 3072,
    "max_position_embeddings": 131072,
    "max_sequence_length": None,
    "model_type": "paddleocr_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 18,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_is_neox_style": True,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
    "rope_theta": 500000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.55.0",
    "use_bias": False,
    "use_cache": False,
    "use_flash_attention": False,
    "use_3d_rope": True,
    "video_token_id": 101307,
    "vision_config": {
        "architectures": ["PaddleOCRVisionModel"],
        "attention_dropout": 0.0,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "image_size": 384,
        "intermediate_size": 4304,
        "layer_norm_eps": 1e-06,
        "model_type": "paddleocr_vl",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 27,
        "pad_token_id": 0,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
    },
    "vision_start_token_id": 101305,
    "vocab_size": 103424,
}
FILES: dict[str, dict[str, Any]] = {
    "config.json": CONFIG,
    "generation_config.json": {"eos_token_id": 2, "pad_token_id": 0, "use_cache": False},
    "preprocessor_config.json": {
        "auto_map": {
            "AutoImageProcessor": "image_processing_paddleocr_vl.PaddleOCRVLImageProcessor",
            "AutoProcessor": "processing_paddleocr_vl.PaddleOCRVLProcessor",
        },
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "PaddleOCRVLImageProcessor",
        "image_std": [0.5, 0.5, 0.5],
        "max_pixels": 2822400,
        "merge_size": 2,
        "min_pixels": 147384,
        "patch_size": 14,
        "processor_class": "PaddleOCRVLProcessor",
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
        "size": {"max_pixels": 2822400, "min_pixels": 147384},
        "temporal_patch_size": 1,
    },
}
IMAGE, IMAGE_START, IMAGE_END = 100295, 101305, 101306
_NAMED = {
    100272: "<|end_of_sentence|>", 100273: "<|begin_of_sentence|>", 100274: "<mask:1>", IMAGE: "<|IMAGE_PLACEHOLDER|>",
    IMAGE_START: "<|IMAGE_START|>", IMAGE_END: "<|IMAGE_END|>", 101307: "<|video_pad|>",
}  # fmt: skip

TEMPLATE = """
{%- if not image_token is defined -%}
    {%- set image_token = "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>" -%}
{%- endif -%}
{{- cls_token if cls_token is defined else "<|begin_of_sentence|>" -}}
{%- for message in messages -%}
    {{- {"user": "User: ", "assistant": "Assistant:\\n"}.get(message.role, "") -}}
    {%- for part in message.content if part.type == "image" -%}{{ image_token }}{%- endfor -%}
    {%- for part in message.content if part.type == "text" -%}{{ part.text }}{%- endfor -%}
    {{- "</s>" if message.role == "assistant" else "\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "Assistant:\\n" -}}{%- endif -%}
"""
"""Writes what the published template writes, which has the placeholder of an image with the tokens around it as a
default."""

_TOWER_LAYER = {
    **{f"layer_norm{number}.{kind}": (1152,) for number in (1, 2) for kind in ("weight", "bias")},
    **{f"self_attn.{name}.weight": (1152, 1152) for name in ("q_proj", "k_proj", "v_proj", "out_proj")},
    **{f"self_attn.{name}.bias": (1152,) for name in ("q_proj", "k_proj", "v_proj", "out_proj")},
    "mlp.fc1.weight": (4304, 1152), "mlp.fc1.bias": (4304,), "mlp.fc2.weight": (1152, 4304), "mlp.fc2.bias": (1152,),
}  # fmt: skip
_HEAD = {
    "probe": (1, 1, 1152), "attention.in_proj_weight": (3456, 1152), "attention.in_proj_bias": (3456,),
    "attention.out_proj.weight": (1152, 1152), "attention.out_proj.bias": (1152,), "layernorm.weight": (1152,),
    "layernorm.bias": (1152,), "mlp.fc1.weight": (4304, 1152), "mlp.fc1.bias": (4304,), "mlp.fc2.weight": (1152, 4304),
    "mlp.fc2.bias": (1152,),
}  # fmt: skip
"""Of the tower, which nothing uses."""
_LAYER = {
    "input_layernorm.weight": (1024,), "post_attention_layernorm.weight": (1024,),
    "self_attn.q_proj.weight": (2048, 1024), "self_attn.k_proj.weight": (256, 1024),
    "self_attn.v_proj.weight": (256, 1024), "self_attn.o_proj.weight": (1024, 2048),
    "mlp.gate_proj.weight": (3072, 1024), "mlp.up_proj.weight": (3072, 1024), "mlp.down_proj.weight": (1024, 3072),
}  # fmt: skip


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    """Of all tensors, by the names in the file."""
    tower = "visual.vision_model."
    shapes: dict[str, tuple[int, ...]] = {
        f"{tower}embeddings.patch_embedding.weight": (1152, 3, 14, 14),
        f"{tower}embeddings.patch_embedding.bias": (1152,),
        f"{tower}embeddings.position_embedding.weight": (729, 1152),
        f"{tower}embeddings.packing_position_embedding.weight": (32768, 1152),
        f"{tower}post_layernorm.weight": (1152,),
        f"{tower}post_layernorm.bias": (1152,),
        "mlp_AR.pre_norm.weight": (1152,),
        "mlp_AR.pre_norm.bias": (1152,),
        "mlp_AR.linear_1.weight": (4608, 4608),
        "mlp_AR.linear_1.bias": (4608,),
        "mlp_AR.linear_2.weight": (1024, 4608),
        "mlp_AR.linear_2.bias": (1024,),
        "model.embed_tokens.weight": (103424, 1024),
        "model.norm.weight": (1024,),
        "lm_head.weight": (103424, 1024),
        **{f"{tower}head.{name}": shape for name, shape in _HEAD.items()},
    }
    for index in range(27):
        shapes |= {f"{tower}encoder.layers.{index}.{name}": shape for name, shape in _TOWER_LAYER.items()}
    for index in range(18):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in _LAYER.items()}
    return shapes


def write_published(folder: Path) -> Path:
    """All files in `folder`. The vocabulary has other words than the published one, the file of weights a hole for
    data."""
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer_config = {
        "bos_token": "<s>", "clean_up_tokenization_spaces": False, "cls_token": "<|begin_of_sentence|>",
        "eos_token": "</s>", "mask_token": "<mask:1>", "model_max_length": 131072, "pad_token": "<unk>",
        "sep_token": "<|end_of_sentence|>", "processor_class": "PaddleOCRVLProcessor",
        "tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>",
    }  # fmt: skip
    added = {id_: _NAMED.get(id_, f"<|another {id_}|>") for id_ in range(min(_NAMED), max(_NAMED) + 1)}
    write_tokenizer(folder, added, set(_NAMED.values()), tokenizer_config)
    return write_files(folder, FILES, tensor_shapes())
