"""What a decoder family needs to be told apart: one `ArchSpec`, read from a Hugging Face config by the family's row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.kernels.attention import AttentionSpec
from vlmserve.layers.rope import RopeSpec

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchSpec:
    """The shape of one decoder. Sizes in elements; `attention` has one entry a layer."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention: tuple[AttentionSpec, ...]
    rope: RopeSpec
    activation: str
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied_embeddings: bool
    max_position: int


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the table: what configs leave out, and how the completed config becomes a spec."""

    defaults: Config
    build: Callable[[str, Config], ArchSpec]


def decoder_spec(config: Config) -> ArchSpec:
    """The spec of a text config, as it stands in config.json or in its ``text_config``.

    Raises UnsupportedModelError for a family or option that is not implemented, ModelLoadError for impossible sizes.
    """
    name = config.get("model_type", "llama")
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"language model type {name!r} is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[name]
    return family.build(name, {**family.defaults, **config})


def _llama_like(family: str, config: Config, **differences: Any) -> ArchSpec:
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    num_kv_heads = config["num_key_value_heads"] or num_heads
    if num_heads % num_kv_heads or not (config["head_dim"] or hidden_size % num_heads == 0):
        raise ModelLoadError(
            f"config.json: {num_heads} attention heads do not fit {num_kv_heads} key-value heads or width {hidden_size}"
        )
    head_size = config["head_dim"] or hidden_size // num_heads
    max_position = config["max_position_embeddings"]
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope = RopeSpec.from_config(head_size, config["rope_theta"], scaling, max_position)
    windows = differences.pop("windows", [None] * config["num_hidden_layers"])
    values: dict[str, Any] = {
        "qkv_bias": config.get("attention_bias", False),
        "output_bias": config.get("attention_bias", False),
        "mlp_bias": config.get("mlp_bias", False),
    }
    return ArchSpec(
        family=family,
        vocab_size=config["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=config["intermediate_size"],
        attention=tuple(
            AttentionSpec(num_heads, num_kv_heads, head_size, head_size**-0.5, window) for window in windows
        ),
        rope=rope,
        activation=config["hidden_act"],
        norm_eps=config["rms_norm_eps"],
        tied_embeddings=bool(config["tie_word_embeddings"]),
        # Linear scaling stretches the trained context, which such configs still state unstretched.
        max_position=int(max_position * rope.factor) if rope.scaling == "linear" else max_position,
        **{**values, **differences},
    )


def _mistral(family: str, config: Config) -> ArchSpec:
    windows = [config["sliding_window"]] * config["num_hidden_layers"]
    return _llama_like(family, config, windows=windows, qkv_bias=False, output_bias=False, mlp_bias=False)


def _qwen2(family: str, config: Config) -> ArchSpec:
    window = config["sliding_window"] if config["use_sliding_window"] else None
    layers = range(config["num_hidden_layers"])
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer >= config["max_window_layers"] else "full_attention" for layer in layers
    ]
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    return _llama_like(family, config, windows=windows, qkv_bias=True, output_bias=False, mlp_bias=False)


_LLAMA: Config = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(_LLAMA, _llama_like),
    "mistral": Family(
        {
            **_LLAMA,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
            "sliding_window": 4096,
        },
        _mistral,
    ),
    "qwen2": Family(
        {
            **_LLAMA,
            "vocab_size": 151936,
            "intermediate_size": 22016,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "eos_token_id": None,
        },
        _qwen2,
    ),
}
