"""The files of Qwen/Qwen3-VL-2B-Instruct as its model card and repository document them, without weights: what its
configurations say, its special tokens at their ids, what its chat template writes, and the header of its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.published import write_files, write_tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": True,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 151656,
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}
_PIXELS = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
}
FILES: dict[str, dict[str, Any]] = {
    "config.json": CONFIG,
    "preprocessor_config.json": {
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        **_PIXELS,
        "image_processor_type": "Qwen2VLImageProcessorFast",
    },
    "video_preprocessor_config.json": {
        "size": {"longest_edge": 25165824, "shortest_edge": 4096},
        **_PIXELS,
        "video_processor_type": "Qwen3VLVideoProcessor",
    },
    "generation_config.json": {
        "bos_token_id": 151643,
        "pad_token_id": 151643,
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "top_p": 0.8,
        "top_k": 20,
        "temperature": 0.7,
        "repetition_penalty": 1.0,
        "transformers_version": "4.56.0",
    },
}
ADDED = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>
<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> <tool_call>
</tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response>
</tool_response> <think> </think>""".split()
"""From id 151643 on; up to ``<|video_pad|>`` they are special."""
NUM_SPECIAL, FIRST_ADDED = 14, 151643

TEMPLATE = """
{%- macro show(content) -%}
    {%- if content is string -%}{{ content }}{%- else -%}
        {%- for part in content -%}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
                <|vision_start|><|image_pad|><|vision_end|>
            {%- elif part.type == 'video' or 'video' in part -%}
                <|vision_start|><|video_pad|><|vision_end|>
            {%- elif 'text' in part -%}{{ part.text }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set system = show(messages[0].content) if messages[0].role == 'system' else none -%}
{%- if tools -%}
    {{ '<|im_start|>system\\n' }}{% if system is not none %}{{ system + '\\n\\n' }}{% endif -%}
    {{ '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' -}}
    {{ 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' -}}
    {%- for tool in tools -%}{{ '\\n' + (tool | tojson) }}{%- endfor -%}
    {{ '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' -}}
    {{ '<tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": ' -}}
    {{ '<args-json-object>}\\n</tool_call><|im_end|>\\n' -}}
{%- elif system is not none -%}
    {{ '<|im_start|>system\\n' + system + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {{ '<|im_start|>user\\n' + show(message.content) + '<|im_end|>\\n' -}}
    {%- elif message.role == 'assistant' -%}
        {{ '<|im_start|>assistant\\n' + show(message.content) -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = call.function or call -%}
            {%- set arguments = function.arguments -%}
            {%- if message.content or not loop.first -%}{{ '\\n' }}{%- endif -%}
            {{ '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
            {{ (arguments if arguments is string else arguments | tojson) + '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{ '<|im_end|>\\n' -}}
    {%- elif message.role == 'tool' -%}
        {%- if loop.first or loop.previtem.role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
        {{ '\\n<tool_response>\\n' + show(message.content) + '\\n</tool_response>' -}}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""Writes what the published template writes."""

_MERGER = {"linear_fc1.weight": (4096, 4096), "linear_fc1.bias": (4096,), "linear_fc2.weight": (2048, 4096),
           "linear_fc2.bias": (2048,)}  # fmt: skip
_BLOCK = {
    "norm1.weight": (1024,), "norm1.bias": (1024,), "norm2.weight": (1024,), "norm2.bias": (1024,),
    "attn.qkv.weight": (3072, 1024), "attn.qkv.bias": (3072,), "attn.proj.weight": (1024, 1024),
    "attn.proj.bias": (1024,), "mlp.linear_fc1.weight": (4096, 1024), "mlp.linear_fc1.bias": (4096,),
    "mlp.linear_fc2.weight": (1024, 4096), "mlp.linear_fc2.bias": (1024,),
}  # fmt: skip
_LAYER = {
    "input_layernorm.weight": (2048,), "post_attention_layernorm.weight": (2048,),
    "self_attn.q_proj.weight": (2048, 2048), "self_attn.k_proj.weight": (1024, 2048),
    "self_attn.v_proj.weight": (1024, 2048), "self_attn.o_proj.weight": (2048, 2048),
    "self_attn.q_norm.weight": (128,), "self_attn.k_norm.weight": (128,), "mlp.gate_proj.weight": (6144, 2048),
    "mlp.up_proj.weight": (6144, 2048), "mlp.down_proj.weight": (2048, 6144),
}  # fmt: skip


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    """Of all tensors, by the names in the file."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.visual.patch_embed.proj.weight": (1024, 3, 2, 16, 16),
        "model.visual.patch_embed.proj.bias": (1024,),
        "model.visual.pos_embed.weight": (2304, 1024),
        "model.language_model.embed_tokens.weight": (151936, 2048),
        "model.language_model.norm.weight": (2048,),
    }
    mergers = {"merger": 1024, **{f"deepstack_merger_list.{index}": 4096 for index in range(3)}}
    for merger, normed in mergers.items():
        own = {**_MERGER, "norm.weight": (normed,), "norm.bias": (normed,)}
        shapes |= {f"model.visual.{merger}.{name}": shape for name, shape in own.items()}
    for index in range(24):
        shapes |= {f"model.visual.blocks.{index}.{name}": shape for name, shape in _BLOCK.items()}
    for index in range(28):
        shapes |= {f"model.language_model.layers.{index}.{name}": shape for name, shape in _LAYER.items()}
    return shapes


def write_published(folder: Path) -> Path:
    """All files in `folder`. The vocabulary has other words than the published one, the file of weights a hole for
    data."""
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer_config = {
        "add_bos_token": False, "add_prefix_space": False, "bos_token": None, "eos_token": "<|im_end|>",
        "errors": "replace", "model_max_length": 262144, "pad_token": "<|endoftext|>", "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
        "additional_special_tokens": ADDED[1:NUM_SPECIAL], "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    write_tokenizer(folder, dict(enumerate(ADDED, FIRST_ADDED)), set(ADDED[:NUM_SPECIAL]), tokenizer_config)
    return write_files(folder, FILES, tensor_shapes())
