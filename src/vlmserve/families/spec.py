"""The shape of a decoder, and how to read it from a config.json with the usual names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.layer_specs import AttentionSpec, Mixer, RopeSpec, StateSpec
from vlmserve.types import Bidirectional

Config = Mapping[str, Any]
Names = Sequence[tuple[str, str]]
"""Regular expressions for tensor names and their replacements, applied in order."""


@dataclass(frozen=True, slots=True)
class NormSpec:
    eps: float
    layer: bool = False
    """LayerNorm with a bias, not RMSNorm."""
    offset: float = 0.0
    """Added to the stored weights."""


@dataclass(frozen=True, slots=True)
class HeadNormSpec:
    """Norm of queries and keys before RoPE."""

    over: Literal["head", "each head", "row"]
    """"head": each head, with shared weights. "each head": with its own weights. "row": all heads of a token."""
    norm: NormSpec
    bias: bool = False
    weights: bool = True
    values: bool = False
    """Each head of values is normalized too, without weights."""


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Query scale at positions beyond `context`: ``log(position) / log(context)`` (Qwen), or with `beta` ``1 + beta *
    ln(1 + floor(position / context))`` (Llama 4).
    """

    context: int
    beta: float | None = None


@dataclass(frozen=True, slots=True)
class PerLayerSpec:
    """Per-layer embeddings, whose projection each layer adds. Sizes in elements."""

    size: int
    vocab_size: int


MOST_EXPERTS = 2**14
"""Maximum experts of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts. It replaces the MLP unless it has a `router_norm`. Sizes in elements."""

    count: int
    top_k: int
    inner_size: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How the router scores experts."""
    renormalized: bool = True
    """Divide the scores of a token's experts by their sum."""
    correction: bool = False
    """A stored bias on scores selects experts but does not weigh them."""
    scale: float = 1.0
    shared_size: int = 0
    """Inner size of the shared MLP, which every token takes; 0: none."""
    shared_gate: bool = False
    """Multiply the shared MLP's output by the sigmoid of a per-token gate."""
    router_norm: NormSpec | None = None
    """The layer also has its MLP. Router and experts read the residual stream through their own norms, and the router
    scales its inputs and the experts (Gemma 4).
    """

    def __post_init__(self) -> None:
        """Raises ModelLoadError for experts that the router cannot choose."""
        if not 1 <= self.top_k <= self.count <= MOST_EXPERTS:
            raise ModelLoadError(
                f"config.json: tokens take {self.top_k} of {self.count} experts; allowed are 1 to all of at most "
                f"{MOST_EXPERTS:,}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchSpec:
    """The shape of one decoder. Sizes in elements."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    mixers: tuple[Mixer, ...]
    ropes: tuple[RopeSpec | None, ...]
    """One entry a layer; None: no rotary embedding."""
    norm: NormSpec
    activation: str
    tied_embeddings: bool
    max_position: int
    norms: Literal["pre", "output", "sandwich", "post"] = "pre"
    """"pre": before attention and MLP. "output": after each, before the residual is added. "sandwich": both.
    "post": after the residual is added, with no norm after the last layer."""
    head_norm: HeadNormSpec | None = None
    parallel: bool = False
    """Attention and MLP read the same normalized input."""
    gated: bool = True
    """The MLP multiplies its activation by a second projection."""
    output_norm: NormSpec | None = None
    """Norm of the outputs of attention and MLP; None: as `norm`."""
    final_norm: NormSpec | None = None
    """Norm after the last layer; None: as `norm`."""
    output_gate: Literal["elements", "heads", "projected"] | None = None
    """Attention multiplies its result by the sigmoid of gates. "elements": ``q_proj`` also makes them, after each
    head's queries. "heads": ``g_proj`` makes one per head. "projected": ``gate_proj`` makes one per element.
    """
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    head_transform: bool = False
    """A dense layer, the activation and a norm precede the output head."""
    cross_size: int = 0
    """Width of the states for cross-attention, between attention and MLP of every layer; 0: none."""
    bidirectional: Bidirectional | None = None
    """Prompt tokens that attend to each other in both directions."""
    learned_positions: int = 0
    """Rows of the position embedding table; 0: none."""
    query_growth: QueryGrowth | None = None
    embedding_norm: bool = False
    """Normalize embeddings after adding positions."""
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = True
    """Round `embedding_scale` to the type of weights, as Transformers does for Gemma."""
    token_norm_eps: float | None = None
    """Normalize embeddings of tokens, but not of images, without weights."""
    deepstack: int = 0
    """Number of first layers whose outputs get image features added; see `LayerFeatures`."""
    per_layer: PerLayerSpec | None = None
    layer_scalar: bool = False
    """Multiply each layer's output by a stored number."""
    intermediate_sizes: tuple[int, ...] = ()
    """Inner size of each layer's MLP; empty: `intermediate_size`."""
    experts: tuple[ExpertsSpec | None, ...] = ()
    """Experts of each layer; None: an MLP only. Empty: no layer has experts."""
    logit_scale: float = 1.0
    """Factor of logits, before `logit_cap`."""
    logit_cap: float | None = None
    """Bounds logits as `AttentionSpec.soft_cap` bounds scores."""
    mtp: bool = False
    """Has a layer for multi-token prediction, which is like the last layer with attention."""

    def inner_size(self, layer: int) -> int:
        return self.intermediate_sizes[layer] if self.intermediate_sizes else self.intermediate_size

    def experts_of(self, layer: int) -> ExpertsSpec | None:
        return self.experts[layer] if self.experts else None

    @property
    def first_sharing(self) -> int | None:
        """The first of the trailing layers that all read other layers' keys and values; None if the last layer has its
        own.
        """
        own = [
            layer
            for layer, mixer in enumerate(self.mixers)
            if not isinstance(mixer, AttentionSpec) or mixer.shares_with is None
        ]
        first = own[-1] + 1 if own else 0
        return None if first == len(self.mixers) else first

    @property
    def image_width(self) -> int:
        """Elements of an image token's embedding, with the features of later layers."""
        return self.hidden_size * (1 + self.deepstack)

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """Layers with a KV cache, the layer for multi-token prediction last."""
        own = tuple(mixer for mixer in self.mixers if isinstance(mixer, AttentionSpec))
        return (*own, own[-1]) if self.mtp else own

    @property
    def last_attention(self) -> int:
        return max(layer for layer, mixer in enumerate(self.mixers) if isinstance(mixer, AttentionSpec))

    def with_mtp_layer(self) -> ArchSpec:
        """Also counts the layer for multi-token prediction, as the last one."""
        last = slice(self.last_attention, self.last_attention + 1)
        return replace(
            self,
            mtp=False,
            mixers=self.mixers + self.mixers[last],
            ropes=self.ropes + self.ropes[last],
            intermediate_sizes=self.intermediate_sizes + self.intermediate_sizes[last],
            experts=self.experts + self.experts[last],
        )

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return tuple(mixer for mixer in self.mixers if not isinstance(mixer, AttentionSpec))


GPT: Final[Mapping[str, Any]] = {"gated": False, "qkv_bias": True, "output_bias": True, "mlp_bias": True}
"""Fields of `ArchSpec` for GPT-2's blocks."""


def usual_spec(config: Config, **differences: Any) -> ArchSpec:
    """The spec of a config.json with the usual names.

    differences: fields of `ArchSpec`; windows, scale and soft_cap of `AttentionSpec`; rope_part and interleaved of
    `RopeSpec`; states: each layer's state in place of attention, or None.
    Raises ModelLoadError for impossible heads, UnsupportedModelError for a model without attention.
    """
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads or not (config.get("head_dim") or hidden_size % num_heads == 0):
        raise ModelLoadError(
            f"config.json: {num_heads} attention heads do not fit {num_kv_heads} key-value heads or width {hidden_size}"
        )
    head_size = config.get("head_dim") or hidden_size // num_heads
    layers = config["num_hidden_layers"]
    windows, states = (differences.pop(name, [None] * layers) for name in ("windows", "states"))
    if all(states):
        raise UnsupportedModelError("config.json: models without any layer with attention are not supported")
    scale = differences.pop("scale", head_size**-0.5)
    soft_cap = differences.pop("soft_cap", None)
    rope_part, interleaved = differences.pop("rope_part", 1.0), differences.pop("interleaved", False)
    ropes = differences.pop("ropes", None)
    if ropes is None:
        ropes = [usual_rope(config, head_size, part=rope_part, interleaved=interleaved)] * layers
    values: dict[str, Any] = {
        "norm": NormSpec(config.get("rms_norm_eps", 1e-6)),
        "activation": config.get("hidden_act"),
        "tied_embeddings": bool(config["tie_word_embeddings"]),
        "max_position": next((rope.context for rope in ropes if rope), config["max_position_embeddings"]),
        **differences,
    }
    return ArchSpec(
        vocab_size=config["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=config["intermediate_size"],
        mixers=tuple(
            state or AttentionSpec(num_heads, num_kv_heads, head_size, scale, window, soft_cap)
            for window, state in zip(windows, states, strict=True)
        ),
        ropes=tuple(None if state else rope for rope, state in zip(ropes, states, strict=True)),
        **values,
    )


def usual_rope(config: Config, head_size: int, *, part: float = 1.0, interleaved: bool = False) -> RopeSpec:
    """part: fraction of each head that rotates, unless the config has ``partial_rotary_factor``."""
    parameters = dict(rope_parameters(config))
    if "original_max_position_embeddings" in config:
        parameters.setdefault("original_max_position_embeddings", config["original_max_position_embeddings"])
    return RopeSpec.from_config(
        head_size,
        config["rope_theta"],
        parameters,
        config["max_position_embeddings"],
        part=config.get("partial_rotary_factor", part),
        interleaved=interleaved,
    )


def rope_parameters(config: Config) -> Config:
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def with_sections(config: Config, sections: list[int], **parameters: Any) -> Config:
    """The config with M-RoPE. sections: default for ``mrope_section``. parameters: override the config's."""
    return {**config, "rope_scaling": {"mrope_section": sections, **rope_parameters(config), **parameters}}


def layer_windows(config: Config, slides: Callable[[int], bool]) -> list[int | None]:
    """The window of each layer. slides: which layers have one, unless the config has ``layer_types``."""
    layers = range(config["num_hidden_layers"])
    kinds = config.get("layer_types") or ["sliding_attention" if slides(layer) else "" for layer in layers]
    return [config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]


def same_window(config: Config) -> list[int | None]:
    return [config["sliding_window"]] * config["num_hidden_layers"]


def require(config: Config, needed: Mapping[str, tuple[Any, str]]) -> None:
    """Raise UnsupportedModelError unless settings have these values. needed: the value, and what others mean."""
    for name, (wanted, meaning) in needed.items():
        if (config.get(name) or None) != (wanted or None):
            raise UnsupportedModelError(
                f"config.json: {name} is {config.get(name)!r} ({meaning}), which is not supported"
            )
