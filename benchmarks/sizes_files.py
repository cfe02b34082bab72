"""Checkpoints with random weights, written tensor by tensor: safetensors by transformers' names, and GGUF files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.random_models import RandomModel

BLOCK = 2**22
"""Random values that are made once, and written again and again."""
MIXTURES = {"Q4_K_M": ("Q4_K", "Q6_K", "Q5_K"), "Q5_K_M": ("Q5_K", "Q6_K", "Q6_K")}
"""Types of most matrices, of those that get more bits, and of queries, keys and values in one."""
ARCHITECTURES = {
    "llama": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen3_5_text": "qwen35",
    "gemma3_text": "gemma3",
}
"""Names in GGUF of the model types that `write_gguf` knows."""
SUPERBLOCK = 256
"""Weights of an output in a block of a K-quant."""
SMALLER_BLOCKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What llama.cpp writes where superblocks do not divide the inputs."""
_FLOATS = ("ssm_conv1d.weight", "ffn_gate_inp.weight")
"""Matrices that llama.cpp leaves in float32."""
_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where blocks have float16 numbers; others have one at their beginning."""


def write_checkpoint(
    folder: Path,
    model_class: str,
    text: Mapping[str, Any],
    vision: Mapping[str, Any] | None,
    tokens: RandomModel,
    with_weights: bool = True,
) -> None:
    """A bfloat16 checkpoint in Hugging Face layout with pixie's tokenizer.

    tokens: of a model with images. with_weights: else it has no more than the shapes, which `write_gguf` needs.
    """
    import transformers

    folder.mkdir(parents=True)

    def save(folder: Path, ids: Mapping[str, int]) -> None:
        fields: dict[str, Any] = dict(text)
        if vision is not None:
            rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": _sections(text["head_dim"])}
            layers = [vision["depth"] // 4, vision["depth"] // 2, vision["depth"] - 1]
            fields = {
                "text_config": {**text, "rope_parameters": rope, "tie_word_embeddings": True},
                "vision_config": {**vision, "deepstack_visual_indexes": layers},
                "tie_word_embeddings": True,
                "image_token_id": ids["<|image_pad|>"],
                "video_token_id": ids["<|video_pad|>"],
                "vision_start_token_id": ids["<|vision_start|>"],
                "vision_end_token_id": ids["<|vision_end|>"],
            }
        config = getattr(transformers, model_class).config_class(**fields)
        config.architectures = [model_class]
        config.dtype = torch.bfloat16
        config.save_pretrained(folder)
        with torch.device("meta"):
            model = getattr(transformers, model_class)(config)
        tied = "lm_head.weight" if config.tie_word_embeddings else None
        shapes = {key: tuple(value.shape) for key, value in model.state_dict().items() if key != tied}
        _write_safetensors(folder / "model.safetensors", shapes, with_weights)

    RandomModel(save, tokens.tokens, tokens.image, tokens.settings, tokens.processor).write(folder)


def write_gguf(path: Path, checkpoint: Path, kind: str) -> Path:
    """A GGUF file of the shape of a text checkpoint, its matrices in blocks of a type or of a mixture (`MIXTURES`)."""
    import gguf

    config = json.loads((checkpoint / "config.json").read_text())
    name, num_layers = ARCHITECTURES[config["model_type"]], config["num_hidden_layers"]
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    writer = gguf.GGUFWriter(path, name)
    _add_metadata(writer, config)
    _add_tokenizer(writer, checkpoint, config["vocab_size"])
    infos = []
    names = gguf.get_tensor_name_map(architecture, num_layers)
    for key, shape in _stored_shapes(checkpoint / "model.safetensors"):
        stored = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert stored is not None, key
        of_tensor = "F32" if len(shape) == 1 or stored.endswith(_FLOATS) else _type_of(stored, kind, num_layers)
        if shape[-1] % SUPERBLOCK:
            of_tensor = SMALLER_BLOCKS.get(of_tensor, of_tensor)
        raw_type = gguf.GGMLQuantizationType[of_tensor]
        count, block_bytes = gguf.GGML_QUANT_SIZES[raw_type]
        size = math.prod(shape) // count * block_bytes
        writer.add_tensor_info(stored, shape, np.dtype(np.float32), size, raw_dtype=raw_type)
        infos.append((stored, shape, of_tensor, size))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    blocks = {of_tensor: _quantized_blocks(of_tensor) for _, _, of_tensor, _ in infos if of_tensor != "F32"}
    for stored, shape, of_tensor, size in infos:
        if of_tensor == "F32":
            writer.write_tensor_data(_floats(stored, shape))
        else:
            writer.write_tensor_data(np.resize(blocks[of_tensor], size))
    writer.close()
    return path


def _stored_shapes(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of a checkpoint as GGUF files have them: gates and ups of experts by themselves, no empty axis."""
    for name, (shape, _) in _entries(path).items():
        if name.endswith(".experts.gate_up_proj"):
            for part in ("gate_proj", "up_proj"):
                yield name.replace("gate_up_proj", f"{part}.weight"), (shape[0], shape[1] // 2, shape[2])
        elif name.endswith(".experts.down_proj"):
            yield f"{name}.weight", shape
        elif name.endswith(".conv1d.weight"):
            yield name, (shape[0], shape[2])
        else:
            yield name.replace(".dt_bias", ".dt_proj.bias"), shape


def _floats(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Ones for norms, decays of a delta rule between none and half, and small random values for the rest."""
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    random = np.random.default_rng(len(name))
    if name.endswith("ssm_a"):
        return -random.uniform(0.01, 1, shape).astype(np.float32)
    scale = 0.5 if "ssm" in name else 0.05
    return (random.standard_normal(shape) * scale).astype(np.float32)


def _type_of(name: str, kind: str, num_layers: int) -> str:
    """The type of a matrix, as llama.cpp chooses it: a mixture has more bits for the head and for some layers."""
    if kind not in MIXTURES:
        return kind
    most, more, joint = MIXTURES[kind]
    if name.startswith(("token_embd", "output")):
        return "Q6_K"
    if "attn_qkv" in name:
        return joint
    layer = int(name.split(".")[1])
    outer = layer < num_layers // 8 or layer >= 7 * num_layers // 8
    return more if ("attn_v" in name or "ffn_down" in name) and (outer or layer % 3 == 2) else most


def _sections(head_dim: int) -> list[int]:
    """Frequencies for frames, rows and columns, shared as in Qwen3-VL: 24, 20 and 20 of 64."""
    others = head_dim // 2 * 20 // 64
    return [head_dim // 2 - 2 * others, others, others]


def _quantized_blocks(kind: str) -> np.ndarray:
    """Some blocks of random values, each with small float16 scales."""
    import gguf

    random = np.random.default_rng(0)
    if kind == "BF16":
        values = (random.standard_normal(BLOCK) * 0.02).astype(np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (2**20 // size, num_bytes), dtype=np.uint8)
    for place in _SCALES.get(kind, (0,)):
        scales = random.uniform(0.5, 1, (len(blocks), 1)) * (2e-3 if size == 32 else 4e-5)
        blocks[:, place : place + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(-1)


def _add_metadata(writer: Any, config: Mapping[str, Any]) -> None:
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    part = config.get("rope_parameters", {}).get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(head * part))
    writer.add_rope_freq_base(10000.0)
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(config["vocab_size"])
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "linear_num_key_heads" in config:
        writer.add_rope_dimension_sections([*_sections(int(head * part)), 0])
        writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])


def _add_tokenizer(writer: Any, checkpoint: Path, size: int) -> None:
    model = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    tokens += [f"<unused{number}>" for number in range(len(tokens), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template((checkpoint / "chat_template.jinja").read_text())


def _entries(path: Path) -> dict[str, tuple[tuple[int, ...], int]]:
    """Shape and bytes of each tensor of a safetensors file."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {
        name: (tuple(entry["shape"]), entry["data_offsets"][1] - entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _write_safetensors(path: Path, shapes: Mapping[str, tuple[int, ...]], with_weights: bool) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    torch.manual_seed(0)
    block = (torch.randn(BLOCK) * 0.02).bfloat16().view(torch.int16).numpy().tobytes()
    one = torch.ones(1, dtype=torch.bfloat16).view(torch.int16).numpy().tobytes()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items() if with_weights else ():
            is_norm = "norm" in name and name.endswith("weight")
            for piece in _repeated(one * 1024 if is_norm else block, 2 * math.prod(shape)):
                file.write(piece)


def _repeated(block: bytes, size: int) -> Iterator[memoryview]:
    """So many bytes of a block, over and over."""
    view = memoryview(block)
    while size > 0:
        yield view[:size]
        size -= len(block)
