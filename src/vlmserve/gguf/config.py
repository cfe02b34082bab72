"""Converts a GGUF file's metadata to a config.json."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.families.family import LanguageFamily
from vlmserve.families.gguf import GGUFText, Metadata, rope_scaling
from vlmserve.families.registry import LANGUAGE_FAMILIES, gguf_family
from vlmserve.gguf_header import Header

Config = dict[str, Any]

# Tokens that end a turn; some files do not mark them.
END_TOKENS = frozenset("<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|endoftext|> <|end_of_text|> <end_of_turn>".split())
CONTROL = 3
"""Token type of control tokens."""

_PLAIN_TYPES = {0: "float32", 1: "float16", 30: "bfloat16"}


def text_family(header: Header) -> tuple[LanguageFamily, GGUFText]:
    """Raises UnsupportedModelError for an unknown architecture."""
    if (found := gguf_family(header.architecture)) is None:
        supported = sorted(name for family in LANGUAGE_FAMILIES.values() for name in family.gguf)
        raise UnsupportedModelError(
            f"{header.path}: GGUF architecture {header.architecture!r} is not supported; "
            f"supported are {', '.join(supported)}"
        )
    return found


def read_config(header: Header) -> Config:
    """Raises ModelLoadError for missing or invalid values, UnsupportedModelError for an unsupported architecture or
    option.
    """
    try:
        return _config(header)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise ModelLoadError(f"{header.path} does not describe a model: {error!r}") from error


def _config(header: Header) -> Config:
    family, text = text_family(header)
    metadata = Metadata(header)
    _check_options(metadata, text)
    if "token_embd.weight" not in header.tensors:
        raise ModelLoadError(f"{header.path} lacks token_embd.weight: it is not a complete language model")
    if metadata.get("attention.layer_norm_epsilon") is None:
        metadata["attention.layer_norm_rms_epsilon"]
    of_layer = metadata.of_first_layer if text.layers_differ else metadata.get
    heads = metadata["attention.head_count"]
    head_size = metadata.get("attention.key_length") or metadata["embedding_length"] // heads
    rotary_dim = metadata.get("rope.dimension_count", head_size)
    return {
        "model_type": family.model_type,
        "dtype": _dtype(header),
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": metadata["embedding_length"],
        "intermediate_size": of_layer("feed_forward_length") or metadata["expert_feed_forward_length"],
        "num_hidden_layers": metadata.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": of_layer("attention.head_count_kv", heads),
        "head_dim": head_size,
        "max_position_embeddings": metadata["context_length"],
        "rms_norm_eps": metadata.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.get("rope.freq_base", 1e4),
        # Rounded up: the product with the head size must reach the real size.
        "partial_rotary_factor": math.nextafter(rotary_dim / head_size, math.inf) if rotary_dim < head_size else 1.0,
        "rope_scaling": rope_scaling(metadata),
        "tie_word_embeddings": not metadata.has("output.weight"),
        "attention_bias": metadata.has("attn_q.bias") or metadata.has("attn_qkv.bias"),
        "mlp_bias": metadata.has("ffn_down.bias"),
        "eos_token_id": sorted(end_token_ids(header)),
        **text.traits(metadata),
    }


@lru_cache(maxsize=4)
def end_token_ids(header: Header) -> frozenset[int]:
    """Tokens that the file names, and control tokens with a known text."""
    named = (header.values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    types = header.array("tokenizer.ggml.token_type")
    tokens = header.texts("tokenizer.ggml.tokens", {id_ for id_, kind in enumerate(types) if kind == CONTROL})
    known = (id_ for id_, token in tokens.items() if token in END_TOKENS)
    return frozenset([*(int(id_) for id_ in named if id_ is not None), *known])


def sampling_settings(header: Header) -> Config:
    keys = {
        "temperature": "temp",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "repetition_penalty": "penalty_repeat",
        "repeat_last_n": "penalty_last_n",
    }
    values = {name: header.values.get(f"general.sampling.{key}") for name, key in keys.items()}
    return {name: value for name, value in values.items() if value is not None}


def _check_options(metadata: Metadata, text: GGUFText) -> None:
    if metadata.get("expert_count", 0):
        _check_experts(metadata, text)
    if metadata.sections and not text.has_sections:
        raise UnsupportedModelError(f"{metadata.header.path}: positions by rows and columns are not supported in GGUF")
    if metadata.get("attention.value_length") != metadata.get("attention.key_length"):
        raise UnsupportedModelError(f"{metadata.header.path}: values that are not as long as keys are not supported")


def _check_experts(metadata: Metadata, text: GGUFText) -> None:
    """Files omit what their architecture always does, and write softmax as 1."""
    if not text.has_experts:
        raise UnsupportedModelError(
            f"{metadata.header.path}: experts (expert_count) in architecture {metadata.header.architecture!r} are not "
            "supported"
        )
    for key, usual in (("expert_gating_func", 1), ("expert_weights_scale", 1.0), ("expert_group_count", 1)):
        if (value := metadata.get(key)) not in (None, 0, usual):
            raise UnsupportedModelError(f"{metadata.header.path}: {key} {value} is not supported; {usual} is")


def _dtype(header: Header) -> str:
    """The largest tensor's type; bfloat16 if it is quantized."""
    largest = max(header.tensors.values(), key=lambda info: math.prod(info.shape))
    return _PLAIN_TYPES.get(largest.type, "bfloat16")
