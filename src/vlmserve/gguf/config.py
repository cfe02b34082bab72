"""A GGUF file's metadata as the config.json of the same model, for the table of families. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.gguf.header import Header

Config = dict[str, Any]

# Tokens that end a turn or a text, which not every file names as such.
END_TOKENS = frozenset("<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|endoftext|> <|end_of_text|> <end_of_turn>".split())
CONTROL = 3
"""The type of a token that no text is read as."""

_PLAIN_TYPES = {0: "float32", 1: "float16", 30: "bfloat16"}


class Metadata:
    """An architecture's values, without the prefix that they share. Raises ModelLoadError for one that is missing."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self._prefix = f"{header.architecture}."

    def get(self, key: str, default: Any = None) -> Any:
        """A value. Raises UnsupportedModelError for one that differs between layers."""
        if self._prefix + key not in self.header.arrays:
            return self.header.values.get(self._prefix + key, default)
        each = set(self.array(key))
        if len(each) != 1:
            raise UnsupportedModelError(f"{self.header.path}: layers differ in {key}, which is not supported")
        return each.pop()

    def array(self, key: str) -> list[Any]:
        return self.header.array(self._prefix + key)

    def __getitem__(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise ModelLoadError(f"{self.header.path} lacks {self._prefix}{key}")
        return value

    @property
    def num_layers(self) -> int:
        """Without those behind them that predict further tokens, which are not used."""
        layers, further = self["block_count"], self.get("nextn_predict_layers", 0)
        if not isinstance(layers, int) or not isinstance(further, int):
            raise ModelLoadError(f"{self.header.path}: {layers!r} layers, {further!r} of them for further tokens")
        return layers - further

    @property
    def sections(self) -> list[int]:
        """How many pairs of a head rotate by frames, by rows and by columns; a fourth section is for other models."""
        return self.array("rope.dimension_sections")[:3]

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name, in the first layer if it is not one of the whole model."""
        return name in self.header.tensors or f"blk.0.{name}" in self.header.tensors


@dataclass(frozen=True, slots=True)
class Architecture:
    """How files of one architecture differ from Hugging Face's checkpoints of the same models.

    model_type: the family's. traits: what config.json has beside what all have. interleaved: rows of queries and keys
    are in the order in which neighbours pair. halved: where positions have sections, rows of queries and keys are in
    the order in which each pairs with one of the other half, and neighbours pair in checkpoints. norm_offset: was added
    to the weights of norms. merged_gate: ``ffn_up`` is gates and ups. has_sections: positions have rows and columns,
    which are all the same in text.
    """

    model_type: str
    traits: Callable[[Metadata], Config] = lambda metadata: {}
    interleaved: bool = False
    halved: bool = False
    norm_offset: float = 0.0
    merged_gate: bool = False
    has_sections: bool = False


def architecture_of(header: Header) -> Architecture:
    """Raises UnsupportedModelError for an architecture that is not implemented."""
    name = header.architecture
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{header.path}: GGUF architecture {name!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def read_config(header: Header) -> Config:
    """What config.json would say.

    Raises ModelLoadError for missing values and those that make no sense, UnsupportedModelError for an architecture or
    option that is not implemented.
    """
    try:
        return _config(header)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise ModelLoadError(f"{header.path} does not describe a model: {error!r}") from error


def _config(header: Header) -> Config:
    architecture = architecture_of(header)
    metadata = Metadata(header)
    _check_options(metadata, architecture)
    if "token_embd.weight" not in header.tensors:
        raise ModelLoadError(f"{header.path} lacks token_embd.weight: it is not a complete language model")
    if metadata.get("attention.layer_norm_epsilon") is None:
        metadata["attention.layer_norm_rms_epsilon"]
    heads = metadata["attention.head_count"]
    head_size = metadata.get("attention.key_length") or metadata["embedding_length"] // heads
    rotary_dim = metadata.get("rope.dimension_count", head_size)
    return {
        "model_type": architecture.model_type,
        "dtype": _dtype(header),
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": metadata["embedding_length"],
        "intermediate_size": metadata["feed_forward_length"],
        "num_hidden_layers": metadata.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv", heads),
        "head_dim": head_size,
        "max_position_embeddings": metadata["context_length"],
        "rms_norm_eps": metadata.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.get("rope.freq_base", 1e4),
        # Rounded up, so that the product with the head's size is not less.
        "partial_rotary_factor": math.nextafter(rotary_dim / head_size, math.inf) if rotary_dim < head_size else 1.0,
        "rope_scaling": _rope_scaling(metadata),
        "tie_word_embeddings": not metadata.has("output.weight"),
        "attention_bias": metadata.has("attn_q.bias") or metadata.has("attn_qkv.bias"),
        "mlp_bias": metadata.has("ffn_down.bias"),
        "eos_token_id": sorted(end_token_ids(header)),
        **architecture.traits(metadata),
    }


def end_token_ids(header: Header) -> frozenset[int]:
    """Tokens that end an answer: those that the file names, and control tokens whose text says so."""
    named = (header.values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    types = header.array("tokenizer.ggml.token_type")
    tokens = header.array("tokenizer.ggml.tokens") if types else []
    known = (
        id_
        for id_, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == CONTROL and token in END_TOKENS
    )
    return frozenset([*(int(id_) for id_ in named if id_ is not None), *known])


def sampling_settings(header: Header) -> Config:
    """What generation_config.json would say about sampling."""
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


def _check_options(metadata: Metadata, architecture: Architecture) -> None:
    if metadata.get("expert_count", 0):
        raise UnsupportedModelError(f"{metadata.header.path}: mixtures of experts (expert_count) are not supported")
    if metadata.sections and not architecture.has_sections:
        raise UnsupportedModelError(f"{metadata.header.path}: positions by rows and columns are not supported in GGUF")
    if metadata.get("attention.value_length") != metadata.get("attention.key_length"):
        raise UnsupportedModelError(f"{metadata.header.path}: values that are not as long as keys are not supported")


def _dtype(header: Header) -> str:
    """The type that the largest tensor has, bfloat16 if it is quantized."""
    largest = max(header.tensors.values(), key=lambda info: math.prod(info.shape))
    return _PLAIN_TYPES.get(largest.type, "bfloat16")


def _rope_scaling(metadata: Metadata) -> Config | None:
    header = metadata.header
    if "rope_freqs.weight" in header.tensors:
        return {"rope_type": "factors", "factors": header.vector("rope_freqs.weight")}
    original = metadata.get("rope.scaling.original_context_length") or metadata["context_length"]
    if "rope_factors_long.weight" in header.tensors:
        return {
            "rope_type": "longrope",
            "long_factor": header.vector("rope_factors_long.weight"),
            "short_factor": header.vector("rope_factors_short.weight"),
            "attention_factor": metadata.get("rope.scaling.attn_factor"),
            "original_max_position_embeddings": original,
        }
    kind = metadata.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": metadata["rope.scaling.factor"]}
    # Of a kind that is not known, the spec says so.
    return {
        "rope_type": kind,
        "factor": metadata.get("rope.scaling.factor"),
        "original_max_position_embeddings": original,
        "attention_factor": metadata.get("rope.scaling.yarn_attn_factor"),
        "beta_fast": metadata.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": metadata.get("rope.scaling.yarn_beta_slow"),
        **_yarn_scales(metadata),
    }


def _yarn_scales(metadata: Metadata) -> Config:
    """Mistral's files say by how much attention grows with the context, relative to a growth of 1."""
    relative = metadata.get("rope.scaling.yarn_log_multiplier")
    return {} if relative is None else {"mscale": 1.0, "mscale_all_dim": relative}


def _llama(metadata: Metadata) -> Config:
    """Mistral's models are Llama's here, but for the window that the first of them has."""
    window = metadata.get("attention.sliding_window")
    return {"model_type": "mistral", "sliding_window": window} if window else {}


def _mistral3(metadata: Metadata) -> Config:
    """Ministral 3's queries grow with their positions; Mistral Small 3 is Llama, but for its heads' size."""
    growth = metadata.get("attention.temperature_scale")
    if not growth:
        return {}
    scaling = _rope_scaling(metadata)
    if scaling is None:
        raise ModelLoadError(f"{metadata.header.path} lacks mistral3.rope.scaling.type, which tells where queries grow")
    original = scaling["original_max_position_embeddings"]
    if metadata.get("attention.temperature_length", original) != original:
        raise UnsupportedModelError(
            f"{metadata.header.path}: queries that grow from another length on than {original} are not supported"
        )
    return {"model_type": "ministral3", "rope_scaling": {**scaling, "llama_4_scaling_beta": growth}}


def _sectioned(metadata: Metadata) -> Config:
    scaling = _rope_scaling(metadata) or {"rope_type": "default"}
    return {"rope_scaling": {**scaling, "mrope_section": metadata.sections}}


def _glm4(metadata: Metadata) -> Config:
    """Those with sections are decoders of models that take images."""
    return _sectioned(metadata) if metadata.sections else {}


def _paddleocr(metadata: Metadata) -> Config:
    return {**_sectioned(metadata), "use_bias": metadata.has("attn_q.bias")}


def _phi(metadata: Metadata) -> Config:
    return {"layer_norm_eps": metadata["attention.layer_norm_epsilon"]}


def _phi3(metadata: Metadata) -> Config:
    return {
        "sliding_window": metadata.get("attention.sliding_window") or None,
        "original_max_position_embeddings": metadata.get("rope.scaling.original_context_length")
        or metadata["context_length"],
    }


def _stablelm(metadata: Metadata) -> Config:
    return {
        "layer_norm_eps": metadata["attention.layer_norm_epsilon"],
        "use_qkv_bias": metadata.has("attn_q.bias"),
        "qk_layernorm": metadata.has("attn_q_norm.weight"),
        "use_parallel_residual": not metadata.has("ffn_norm.weight"),
    }


def _starcoder(metadata: Metadata) -> Config:
    return {
        "n_embd": metadata["embedding_length"],
        "n_head": metadata["attention.head_count"],
        "n_layer": metadata["block_count"],
        "n_inner": metadata["feed_forward_length"],
        "n_positions": metadata["context_length"],
        "layer_norm_epsilon": metadata["attention.layer_norm_epsilon"],
        "multi_query": metadata.get("attention.head_count_kv") == 1,
    }


def _starcoder2(metadata: Metadata) -> Config:
    return {
        "norm_epsilon": metadata["attention.layer_norm_epsilon"],
        "use_bias": metadata.has("attn_q.bias"),
        "sliding_window": metadata.get("attention.sliding_window") or None,
    }


def _olmo2(metadata: Metadata) -> Config:
    if metadata.get("attention.sliding_window"):
        raise UnsupportedModelError(f"{metadata.header.path}: OLMo with windows (OLMo 3) is not supported")
    return {}


def _gemma(metadata: Metadata) -> Config:
    return {"attention_bias": False}


def _gemma2(metadata: Metadata) -> Config:
    return {
        **_gemma(metadata),
        "query_pre_attn_scalar": _query_scalar(metadata, largest=46),
        "sliding_window": metadata["attention.sliding_window"],
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping"),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
    }


def _gemma3(metadata: Metadata) -> Config:
    layers, window = metadata["block_count"], metadata.get("attention.sliding_window")
    slides = metadata.array("attention.sliding_window_pattern")
    if not slides:
        every = metadata.get("attention.sliding_window_pattern", 6)
        slides = [(layer + 1) % every != 0 for layer in range(layers)]
    return {
        **_gemma(metadata),
        "query_pre_attn_scalar": _query_scalar(metadata, largest=62),
        "sliding_window": window,
        "layer_types": ["sliding_attention" if window and slide else "full_attention" for slide in slides],
        "rope_theta": metadata.get("rope.freq_base", 1e6),
        "rope_local_base_freq": metadata.get("rope.freq_base_swa", 1e4),
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping"),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
    }


def _query_scalar(metadata: Metadata, *, largest: int) -> float:
    """Scores are divided by its root. Files do not state it; it is a head's size but in the model of most layers."""
    if (scale := metadata.get("attention.scale")) is not None:
        return float(scale) ** -2
    if metadata["block_count"] == largest:
        return float(metadata["embedding_length"] / metadata["attention.head_count"])
    return float(metadata["attention.key_length"])


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _llama, interleaved=True),
    "mistral3": Architecture("llama", _mistral3, interleaved=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    # Without images, which are in a file of their own, they are Qwen 2, Qwen 3 and Llama.
    "qwen2vl": Architecture("qwen2", _sectioned, has_sections=True),
    "qwen3vl": Architecture("qwen3", _sectioned, has_sections=True),
    "paddleocr": Architecture("llama", _paddleocr, has_sections=True),
    "phi2": Architecture("phi", _phi),
    "phi3": Architecture("phi3", _phi3, merged_gate=True),
    "stablelm": Architecture("stablelm", _stablelm),
    "starcoder": Architecture("gpt_bigcode", _starcoder),
    "starcoder2": Architecture("starcoder2", _starcoder2),
    "chatglm": Architecture("glm", merged_gate=True),
    "glm4": Architecture("glm4", _glm4, halved=True, merged_gate=True, has_sections=True),
    "gemma": Architecture("gemma", _gemma, norm_offset=1.0),
    "gemma2": Architecture("gemma2", _gemma2, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", _gemma3, norm_offset=1.0),
    "smollm3": Architecture("smollm3", interleaved=True),
    "olmo2": Architecture("olmo2", _olmo2),
}
