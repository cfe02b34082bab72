"""Metadata of GGUF files, and how files of a family differ from its checkpoints in Hugging Face layout.

llama.cpp's conversion writes the files, and its ``tools/mtmd/clip.cpp`` reads them
(https://github.com/ggml-org/llama.cpp). Settings that a file lacks come from the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.families.spec import Config, Names
from vlmserve.gguf_header import Header, TensorInfo


class Metadata:
    """Values of a language model, without their common prefix. Raises ModelLoadError for a missing value."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self._prefix = f"{header.architecture}."

    def get(self, key: str, default: Any = None) -> Any:
        """Raise UnsupportedModelError for a value that differs between layers. Layers without attention have 0."""
        if self._prefix + key not in self.header.arrays:
            return self.header.values.get(self._prefix + key, default)
        each = set(self.array(key)) - ({0} if key == "attention.head_count_kv" else set())
        if len(each) != 1:
            raise UnsupportedModelError(f"{self.header.path}: layers differ in {key}, which is not supported")
        return each.pop()

    def array(self, key: str) -> list[Any]:
        return self.header.array(self._prefix + key)

    def of_first_layer(self, key: str, default: Any = None) -> Any:
        """As `get`, for values that may differ between layers."""
        each = self.array(key)
        return each[0] if each else self.get(key, default)

    def __getitem__(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise ModelLoadError(f"{self.header.path} lacks {self._prefix}{key}")
        return value

    @property
    def num_layers(self) -> int:
        """Excludes the trailing layers for multi-token prediction (MTP)."""
        layers, further = self["block_count"], self.get("nextn_predict_layers", 0)
        if not isinstance(layers, int) or not isinstance(further, int):
            raise ModelLoadError(
                f"{self.header.path}: block_count {layers!r} and nextn_predict_layers {further!r} must be numbers"
            )
        return layers - further

    @property
    def sections(self) -> list[int]:
        """Pairs of a head that rotate by frames, rows and columns. Other models have a fourth section."""
        return self.array("rope.dimension_sections")[:3]

    def has(self, name: str) -> bool:
        """Return whether the model or its first layer has the tensor."""
        return name in self.header.tensors or f"blk.0.{name}" in self.header.tensors


@dataclass(frozen=True, slots=True)
class GGUFText:
    """How GGUF files of a language model differ from its checkpoints."""

    traits: Callable[[Metadata], Config] = lambda metadata: {}
    """Fields of config.json that only this architecture has."""
    interleaved: bool = False
    """RoPE pairs neighbouring rows of queries and keys."""
    halved: bool = False
    """With M-RoPE, files pair rows with the other half of the head, checkpoints with their neighbours."""
    norm_offset: float = 0.0
    """Added to the weights of norms."""
    merged_gate: bool = False
    """``ffn_up`` holds gate and up projection."""
    strips_space: bool = False
    """Control tokens absorb the space after them, which files do not say."""
    has_sections: bool = False
    """M-RoPE: positions have rows and columns, which are equal in text."""
    has_experts: bool = False
    """Files may have experts in place of MLPs."""
    layers_differ: bool = False
    """Layers may differ in MLP sizes and KV heads, which `traits` reads."""
    layer_names: Mapping[str, str] = field(default_factory=dict)
    """Additional or different tensor names of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTower:
    """How GGUF files of a tower and projector differ from checkpoints."""

    vision: Callable[[Clip], Config]
    """``vision_config`` of config.json."""
    settings: Callable[[Clip], Config]
    """preprocessor_config.json."""
    videos: Callable[[Clip], Config] | None = None
    """video_preprocessor_config.json."""
    more: Callable[[Clip], Config] = lambda clip: {}
    """Other fields of config.json."""
    names: Names
    """Regular expressions for tensor names in the file, and names in checkpoints. The first match counts; an empty name
    skips the tensor.
    """
    output: str
    """Tensor whose size on `axis` is the decoder's width."""
    axis: int = 0
    text_types: Mapping[str, str] = field(default_factory=dict)
    """``model_type`` of the language model by the architecture of its file; empty: all fit."""
    tokens: Mapping[str, str] = field(default_factory=lambda: {"image_token_id": "<image>"})
    """Fields of config.json with tokens, the placeholder first, and the texts of these tokens."""
    else_unknown: bool = False
    """Without a placeholder in the vocabulary, use the unknown token: ordinary text never becomes it."""
    interleaved: bool = False
    """RoPE pairs neighbouring rows of queries and keys."""
    norm_offset: float = 0.0
    """Added to the norm before the projector."""
    channels_last: bool = False
    """In checkpoints, the patch projection is a matrix whose input interleaves the channels."""
    swaps: bool = True
    """Old files swap the names of the two MLP matrices."""


class Clip:
    """Values of a tower, without their common prefix. Raises ModelLoadError for a missing value."""

    def __init__(self, header: Header) -> None:
        self.header = header

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.values.get(f"clip.vision.{key}", default)

    def array(self, key: str) -> list[Any]:
        return self.header.array(f"clip.vision.{key}")

    def __getitem__(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise ModelLoadError(f"{self.header.path} lacks clip.vision.{key}")
        return value

    def tensor(self, name: str) -> TensorInfo:
        if name not in self.header.tensors:
            raise ModelLoadError(f"{self.header.path} lacks {name}: it is not a complete vision tower")
        return self.header.tensors[name]

    def has(self, name: str) -> bool:
        return name in self.header.tensors

    @property
    def intermediate_size(self) -> int:
        """The width of MLPs, from their weights: some conversions write another number."""
        width = self["embedding_length"]
        shapes = [self.tensor(f"v.blk.0.ffn_{part}.weight").shape for part in ("up", "down")]
        return next((shape[0] for shape in shapes if shape[-1] == width), shapes[0][0])

    @property
    def deepstack_layers(self) -> list[int]:
        return [layer for layer, merged in enumerate(self.array("is_deepstack_layers")) if merged]


def with_sections(metadata: Metadata) -> Config:
    scaling = rope_scaling(metadata) or {"rope_type": "default"}
    return {"rope_scaling": {**scaling, "mrope_section": metadata.sections}}


def clip_names(tower: str) -> Names:
    """Names of tensors in towers with CLIP's layers. tower: prefix of the names."""
    layer = rf"{tower}.encoder.layers.\1"
    return (
        (r"v\.class_embd", f"{tower}.embeddings.class_embedding"),
        (r"v\.patch_embd\.(\w+)", rf"{tower}.embeddings.patch_embedding.\1"),
        (r"v\.position_embd\.weight", f"{tower}.embeddings.position_embedding.weight"),
        (r"v\.pre_ln\.(\w+)", rf"{tower}.pre_layrnorm.\1"),
        (r"v\.post_ln\.(\w+)", rf"{tower}.post_layernorm.\1"),
        (r"v\.blk\.(\d+)\.ln([12])\.(\w+)", rf"{layer}.layer_norm\2.\3"),
        (r"v\.blk\.(\d+)\.attn_([qkv])\.(\w+)", rf"{layer}.self_attn.\2_proj.\3"),
        (r"v\.blk\.(\d+)\.attn_out\.(\w+)", rf"{layer}.self_attn.out_proj.\2"),
        (r"v\.blk\.(\d+)\.ffn_up\.(\w+)", rf"{layer}.mlp.fc1.\2"),
        (r"v\.blk\.(\d+)\.ffn_down\.(\w+)", rf"{layer}.mlp.fc2.\2"),
    )


def clip_sizes(clip: Clip) -> Config:
    return {
        "hidden_size": clip["embedding_length"],
        "intermediate_size": clip.intermediate_size,
        "num_hidden_layers": clip["block_count"],
        "num_attention_heads": clip["attention.head_count"],
        "image_size": clip["image_size"],
        "patch_size": clip["patch_size"],
        "layer_norm_eps": clip["attention.layer_norm_epsilon"],
    }


def siglip_vision(kind: str) -> Callable[[Clip], Config]:
    return lambda clip: {**clip_sizes(clip), "model_type": kind, "hidden_act": "gelu_pytorch_tanh"}


def clip_scale(clip: Clip, default: int) -> int:
    """Patches along each side that become one embedding."""
    return int(clip.get("projector.scale_factor", default))


def rope_scaling(metadata: Metadata) -> Config | None:
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
    # The spec rejects unknown types.
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
    """Mistral's files state attention's factor relative to `mscale` 1."""
    relative = metadata.get("rope.scaling.yarn_log_multiplier")
    return {} if relative is None else {"mscale": 1.0, "mscale_all_dim": relative}
