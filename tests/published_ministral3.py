"""The files of mistralai/Ministral-3-3B-Instruct-2512-BF16 as its repository and transformers document them, without
weights: what its configurations say, its special tokens at their ids, a chat template of its form, and the header of
its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.published import write_files, write_tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "initializer_range": 0.02,
        "intermediate_size": 9216,
        "max_position_embeddings": 262144,
        "model_type": "ministral3",
        "num_attention_heads": 32,
        "num_hidden_layers": 26,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
            "type": "yarn",
        },
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 131072,
    },
    "tie_word_embeddings": True,
    "transformers_version": "5.0.0.dev0",
    "vision_config": {
        "attention_dropout": 0.0,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "image_size": 1540,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "model_type": "pixtral",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "vision_feature_layer": -1,
}
FILES: dict[str, dict[str, Any]] = {
    "config.json": CONFIG,
    "processor_config.json": {
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
        "image_processor": {
            "crop_size": None,
            "data_format": "channels_first",
            "do_center_crop": None,
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_processor_type": "PixtralImageProcessorFast",
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "patch_size": 14,
            "resample": 3,
            "rescale_factor": 0.00392156862745098,
            "size": {"longest_edge": 1540},
        },
        "image_token": "[IMG]",
        "patch_size": 14,
        "processor_class": "PixtralProcessor",
        "spatial_merge_size": 2,
    },
    "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "max_length": 262144, "pad_token_id": 11},
}
SPECIAL = """<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]
[TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT]
[TOOL_CONTENT]""".split()
NUM_SPECIAL = 1000

TEMPLATE = """
{{- bos_token }}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}[SYSTEM_PROMPT]{{ message.content }}[/SYSTEM_PROMPT]
    {%- elif message.role == 'user' -%}[INST]
        {%- if message.content is string -%}{{ message.content }}{%- else -%}
            {%- for part in message.content -%}
                {%- if part.type == 'text' -%}{{ part.text }}{%- elif part.type == 'image' -%}[IMG]{%- endif -%}
            {%- endfor -%}
        {%- endif -%}[/INST]
    {%- else -%}{{ message.content }}{{ eos_token }}{%- endif -%}
{%- endfor -%}
"""
"""Writes what the published template writes of text and images, without its default system prompt and tools."""

_TOWER_LAYER = {
    "attention_norm.weight": (1024,), "ffn_norm.weight": (1024,),
    **{f"attention.{name}_proj.weight": (1024, 1024) for name in "qkvo"},
    "feed_forward.gate_proj.weight": (4096, 1024), "feed_forward.up_proj.weight": (4096, 1024),
    "feed_forward.down_proj.weight": (1024, 4096),
}  # fmt: skip
_LAYER = {
    "input_layernorm.weight": (3072,), "post_attention_layernorm.weight": (3072,),
    "self_attn.q_proj.weight": (4096, 3072), "self_attn.k_proj.weight": (1024, 3072),
    "self_attn.v_proj.weight": (1024, 3072), "self_attn.o_proj.weight": (3072, 4096),
    "mlp.gate_proj.weight": (9216, 3072), "mlp.up_proj.weight": (9216, 3072), "mlp.down_proj.weight": (3072, 9216),
}  # fmt: skip


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    """Of all tensors, by the names in the file."""
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.ln_pre.weight": (1024,),
        "vision_tower.patch_conv.weight": (1024, 3, 14, 14),
        "multi_modal_projector.norm.weight": (1024,),
        "multi_modal_projector.patch_merger.merging_layer.weight": (1024, 4096),
        "multi_modal_projector.linear_1.weight": (3072, 1024),
        "multi_modal_projector.linear_2.weight": (3072, 3072),
        "language_model.model.embed_tokens.weight": (131072, 3072),
        "language_model.model.norm.weight": (3072,),
    }
    for index in range(24):
        shapes |= {f"vision_tower.transformer.layers.{index}.{name}": shape for name, shape in _TOWER_LAYER.items()}
    for index in range(26):
        shapes |= {f"language_model.model.layers.{index}.{name}": shape for name, shape in _LAYER.items()}
    return shapes


def write_published(folder: Path) -> Path:
    """All files in `folder`. The vocabulary has other words than the published one, the file of weights a hole for
    data."""
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer_config = {
        "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>",
        "model_max_length": 262144, "processor_class": "PixtralProcessor", "tokenizer_class": "TokenizersBackend",
    }  # fmt: skip
    named = [*SPECIAL, *(f"<SPECIAL_{number}>" for number in range(len(SPECIAL), NUM_SPECIAL))]
    write_tokenizer(folder, dict(enumerate(named)), set(named), tokenizer_config, size=131072)
    return write_files(folder, FILES, tensor_shapes())
