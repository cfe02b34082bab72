"""GGUF files of small checkpoints, written with the gguf package the way that its conversion scripts write them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "phi": gguf.MODEL_ARCH.PHI2,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "stablelm": gguf.MODEL_ARCH.STABLELM,
    "gpt_bigcode": gguf.MODEL_ARCH.STARCODER,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
    "glm": gguf.MODEL_ARCH.CHATGLM,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
}
"""By Hugging Face's model types."""
_MTP_NAMES = {
    "mtp.fc.weight": "eh_proj",
    "mtp.norm.weight": "shared_head_norm",
    "mtp.pre_fc_norm_embedding.weight": "enorm",
    "mtp.pre_fc_norm_hidden.weight": "hnorm",
}


def write_gguf(
    folder: Path,
    path: Path,
    *,
    types: Mapping[str, str] | str = "F32",
    metadata: Mapping[str, Any] | None = None,
    architecture: gguf.MODEL_ARCH | None = None,
    part_tensors: int = 0,
) -> Path:
    """The checkpoint in `folder` as a GGUF file, tokenizer and template included.

    types: of all matrices, or by parts of their names in the file; others are F32. Where these lose something, the
    checkpoint gets what is left, so that both are the same model. metadata: set, or left out if None, in the end.
    architecture: instead of the one that the checkpoint's model type has. part_tensors: of each of several files, the
    first of which is returned; 0: there is one.
    """
    config = AutoConfig.from_pretrained(folder).to_dict()
    architecture = architecture or ARCHITECTURES[config["model_type"]]
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture], split_max_tensors=part_tensors)
    tensors = load_file(folder / "model.safetensors")
    if "mtp.fc.weight" in tensors:
        config["num_nextn_predict_layers"] = 1
    values = {
        **_metadata(config, writer.arch),
        **_tokenizer(folder, len(tensors[_embeddings(tensors)])),
        **(metadata or {}),
    }
    for key, value in values.items():
        if value is not None:
            add(writer, key, value)
    names = gguf.get_tensor_name_map(architecture, _metadata(config, writer.arch)[f"{writer.arch}.block_count"])
    for name, tensor in _as_stored(tensors, config):
        extra = f"model.layers.{config.get('num_hidden_layers')}."
        in_layer = name.replace("mtp.layers.0.", extra).replace(".dt_bias", ".dt_proj.bias")
        stored = names.get_name(in_layer, try_suffixes=(".weight", ".bias"))
        if name in _MTP_NAMES:
            stored = f"blk.{config['num_hidden_layers']}.nextn.{_MTP_NAMES[name]}.weight"
        for scale, scaled in (("router.scale", "router.proj"), ("router.per_expert_scale", "experts.down_proj")):
            if name.endswith(scale):
                stored = f"{names.get_name(name.replace(scale, scaled))}.scale"
        if name.endswith("layer_scalar"):
            stored = f"{stored}.weight"
        assert stored is not None, name
        chosen = types if isinstance(types, str) else next((types[part] for part in types if part in stored), "F32")
        is_matrix = (tensor.ndim == 2 or "_exps." in stored) and not stored.endswith(("norm.weight", "gate_inp.weight"))
        kind = GGMLQuantizationType[chosen if is_matrix else "F32"]
        axis, order = _value_order(name, tensor.shape, config)
        raw = encode(tensor.index_select(axis, order), kind)
        kept = torch.from_numpy(dequantize(raw, kind)).view(tensor.shape)
        tensor.copy_(kept.index_select(axis, order.argsort()))
        _add_tensor(writer, stored, _rearranged(raw, stored, config), kind)
    for name, factors in _rope_factors(config).items():
        _add_tensor(writer, name, factors, GGMLQuantizationType.F32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return writer.format_shard_names(path)[0]


def encode(tensor: Tensor, kind: GGMLQuantizationType) -> np.ndarray:
    """A tensor's blocks; of types that the package does not quantize to, random ones of about the same size."""
    values = tensor.float().numpy()
    try:
        return quantize(values, kind)
    except NotImplementedError:
        blocks = random_blocks(tensor.flatten(0, -2).shape, kind, seed=tensor.numel())
        return blocks.reshape(*tensor.shape[:-1], -1)


def random_blocks(shape: tuple[int, ...], kind: GGMLQuantizationType, seed: int = 0) -> np.ndarray:
    """Blocks in which nothing but the 16-bit scales is more likely than something else."""
    random = np.random.default_rng(seed)
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (shape[0], shape[1] // size, num_bytes), dtype=np.uint8)
    # Where 16-bit scales lie, and how large they are: signed scales of 8 and 6 bits need small ones.
    places = {
        "IQ4_NL": [(0, 1e-3)],
        "IQ4_XS": [(0, 1e-4)],
        "Q6_K": [(208, 1e-4)],
        "Q3_K": [(108, 6e-4)],
        "Q2_K": [(80, 2e-3), (82, 2e-3)],
    }
    for place, most in places.get(kind.name, [(0, 6e-4), (2, 4e-3)]):
        scales = (random.uniform(0.3, 1, blocks.shape[:2]) * most).astype(np.float16)
        blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    """Metadata, in the type that the conversion scripts choose for such values."""
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def _add_tensor(writer: GGUFWriter, name: str, raw: np.ndarray, kind: GGMLQuantizationType) -> None:
    writer.add_tensor(name, np.ascontiguousarray(raw), raw_dtype=None if kind.name in ("F32", "F16") else kind)


def _embeddings(tensors: Mapping[str, Tensor]) -> str:
    return next(name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight")))


def _metadata(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """What the conversion scripts of llama.cpp write for a config."""
    heads = config.get("num_attention_heads") or config["n_head"]
    width = config.get("hidden_size") or config["n_embd"]
    positions = config.get("max_position_embeddings") or config["n_positions"]
    rope = config.get("rope_parameters") or {}
    rope_of_all = rope.get("full_attention", rope)
    head_size = config.get("head_dim") or width // heads
    values: dict[str, Any] = {
        "block_count": (config.get("num_hidden_layers") or config["n_layer"])
        + config.get("num_nextn_predict_layers", 0),
        "nextn_predict_layers": config.get("num_nextn_predict_layers"),
        "context_length": positions,
        "embedding_length": width,
        "feed_forward_length": config.get("intermediate_size") or config["n_inner"],
        "attention.head_count": heads,
        "attention.head_count_kv": 1 if "multi_query" in config else config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": next(
            (config[name] for name in ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon") if name in config), None
        ),
        "rope.freq_base": rope_of_all.get("rope_theta"),
    }
    if (experts := config.get("num_experts") or config.get("num_local_experts")) and "num_experts_per_tok" in config:
        values |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
        values["expert_feed_forward_length"] = config.get("moe_intermediate_size")
        values["expert_shared_feed_forward_length"] = config.get("shared_expert_intermediate_size")
    if config.get("head_dim"):
        values |= {"attention.key_length": head_size, "attention.value_length": head_size}
    if architecture in ("llama", "mistral3", "smollm3", "phi2", "phi3", "stablelm", "chatglm", "glm4"):
        values["rope.dimension_count"] = int(head_size * rope_of_all.get("partial_rotary_factor", 1.0))
    if architecture in ("llama", "starcoder2") or architecture.startswith(("phi3", "gemma")):
        values["attention.sliding_window"] = config.get("sliding_window") or (0 if architecture == "phi3" else None)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        values[name] = config.get(name)
    if "query_pre_attn_scalar" in config:
        values["attention.scale"] = config["query_pre_attn_scalar"] ** -0.5
    if architecture == "gemma3":
        values["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config["layer_types"]]
        values["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
    if architecture == "gemma4":
        values |= _gemma4(config)
    if architecture == "stablelm":
        values["use_parallel_residual"] = config["use_parallel_residual"]
    kind = rope_of_all.get("rope_type")
    if kind in ("linear", "yarn"):
        values |= {"rope.scaling.type": kind, "rope.scaling.factor": rope_of_all["factor"]}
    if kind in ("yarn", "longrope"):
        values["rope.scaling.original_context_length"] = rope_of_all["original_max_position_embeddings"]
    if architecture == "lfm2":
        kv_heads = config["num_key_value_heads"]
        values["attention.head_count_kv"] = [kv_heads * (kind != "conv") for kind in config["layer_types"]]
        values["attention.layer_norm_rms_epsilon"] = config["norm_eps"]
        values["shortconv.l_cache"] = config["conv_L_cache"]
        factor, multiple = config["block_ffn_dim_multiplier"], config["block_multiple_of"]
        adjusted = int(factor * int(2 * config["intermediate_size"] / 3))
        values["feed_forward_length"] = -(-adjusted // multiple) * multiple
    if architecture in ("qwen35", "qwen35moe"):
        values |= {
            "rope.dimension_count": int(head_size * rope["partial_rotary_factor"]),
            "rope.dimension_sections": [*rope["mrope_section"], 0],
            "full_attention_interval": config["layer_types"].index("full_attention") + 1,
            "ssm.conv_kernel": config["linear_conv_kernel_dim"],
            "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"],
            "ssm.time_step_rank": config["linear_num_value_heads"],
            "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
        }
    if config["model_type"] == "ministral3":
        values["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        values["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
        values |= {f"rope.scaling.yarn_{name}": rope.get(name) for name in ("beta_fast", "beta_slow")}
    if kind == "longrope":
        original = rope_of_all["original_max_position_embeddings"]
        values["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(positions / original) / math.log(original))
    return {f"{architecture}.{key}": value for key, value in values.items()}


def _gemma4(config: dict[str, Any]) -> dict[str, Any]:
    layers, shared, rope = config["num_hidden_layers"], config["num_kv_shared_layers"], config["rope_parameters"]
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    of_full = config["per_layer_config"][str(slides.index(False))]
    full = of_full.get("num_key_value_heads", config["num_key_value_heads"])
    wide = config["intermediate_size"] * (2 if config["use_double_wide_mlp"] else 1)
    sizes = {"": of_full["head_dim"], "_swa": config["head_dim"]}
    return {
        "feed_forward_length": [config["intermediate_size"]] * (layers - shared) + [wide] * shared,
        "attention.head_count_kv": [config["num_key_value_heads"] if slide else full for slide in slides],
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": shared,
        **{f"attention.{part}_length{end}": size for end, size in sizes.items() for part in ("key", "value")},
        **{f"rope.dimension_count{end}": size for end, size in sizes.items()},
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "expert_used_count": config["top_k_experts"] if config["enable_moe_block"] else None,
        "expert_count": config["num_experts"] if config["enable_moe_block"] else None,
        "expert_feed_forward_length": config["moe_intermediate_size"] if config["enable_moe_block"] else None,
    }


def _rope_factors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    rope = config.get("rope_parameters") or {}
    if config["model_type"] == "gemma4_text":
        pairs = next(iter(config["per_layer_config"].values()))["head_dim"] // 2
        rotated = int(pairs * rope["full_attention"]["partial_rotary_factor"])
        return {"rope_freqs.weight": np.array([1] * rotated + [1e30] * (pairs - rotated), np.float32)}
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{length}.weight": np.array(rope[f"{length}_factor"], np.float32)
            for length in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high, original = (
        rope[name] for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    turns = original / (2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size))
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - kept) / rope["factor"] + kept)).astype(np.float32)}


def _as_stored(tensors: Mapping[str, Tensor], config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """All tensors by name, StableLM's norms of each head as one, gates and ups of experts by themselves."""
    for name, tensor in tensors.items():
        if name.endswith(".experts.gate_up_proj") and config["model_type"] == "gemma4_text":
            yield f"{name}.weight", tensor
        elif name.endswith(".experts.gate_up_proj"):
            for part, rows in zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True):
                yield name.replace("gate_up_proj", f"{part}.weight"), rows
        elif name.endswith(".experts.down_proj"):
            yield f"{name}.weight", tensor
        elif ".norms." not in name:
            yield name, tensor
        elif ".norms.0." in name:
            heads = sum(other.startswith(name.split(".0.weight")[0]) for other in tensors)
            stacked = torch.stack([tensors[name.replace(".0.weight", f".{head}.weight")] for head in range(heads)])
            yield name.replace(".norms.0.", "."), stacked


def _value_order(name: str, shape: torch.Size, config: dict[str, Any]) -> tuple[int, Tensor]:
    """An axis of a tensor, and the order of what lies along it in the file: value heads of a delta rule are tiled."""
    part = name.partition(".linear_attn.")[2].removesuffix(".weight")
    axis = 1 if part == "out_proj" else 0
    if part in ("", "norm"):
        return axis, torch.arange(shape[axis])
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    before = 2 * keys * config["linear_key_head_dim"] if part in ("in_proj_qkv", "conv1d") else 0
    places = torch.arange(before, shape[axis]).view(keys, values // keys, -1)
    return axis, torch.cat((torch.arange(before), places.transpose(0, 1).flatten()))


def _rearranged(raw: np.ndarray, name: str, config: dict[str, Any]) -> np.ndarray:
    """Rows of a tensor in the order that files have, and norms with the offset that they have."""
    if name.endswith("shortconv.conv.weight"):
        return raw.squeeze(1)
    kind = config["model_type"]
    shifted = kind.startswith(("gemma", "qwen3_5")) and not kind.startswith("gemma4")
    if shifted and name.endswith("norm.weight") and "ssm_norm" not in name:
        return raw + np.float32(1)
    if name.endswith("ssm_a"):
        return -np.exp(raw)
    if "ssm_conv1d" in name:
        return raw.squeeze(1)
    if config["model_type"] in ("llama", "mistral", "mixtral", "ministral3", "smollm3") and (
        ".attn_q." in name or ".attn_k." in name
    ):
        heads = config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"]
        halves = raw.reshape(heads, 2, len(raw) // heads // 2, *raw.shape[1:])
        return halves.swapaxes(1, 2).reshape(raw.shape)
    rope = config.get("rope_parameters") or {}
    if config["model_type"] == "glm4" and "mrope_section" in rope and (".attn_q." in name or ".attn_k." in name):
        heads = raw.reshape(-1, config["head_dim"], *raw.shape[1:])
        rotated = int(config["head_dim"] * rope["partial_rotary_factor"])
        halves = heads[:, :rotated:2], heads[:, 1:rotated:2], heads[:, rotated:]
        return np.concatenate(halves, 1).reshape(raw.shape)
    return raw


def _tokenizer(folder: Path, vocab_size: int) -> dict[str, Any]:
    """A byte-level tokenizer of which the first three tokens are unknown, beginning and end."""
    state = json.loads((folder / "tokenizer.json").read_text())
    added = {token["id"]: token["content"] for token in state["added_tokens"]}
    ids = {id_: token for token, id_ in state["model"]["vocab"].items()} | added
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [ids.get(id_, f"[PAD{id_}]") for id_ in range(vocab_size)],
        "tokenizer.ggml.token_type": [
            CONTROL if id_ in added else NORMAL if id_ in ids else 5 for id_ in range(vocab_size)
        ],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    }
