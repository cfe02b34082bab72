"""Shapes of Qwen2-VL's vision tower and similar ones, from configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.families.qwen3_vl import deepstack_layers

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVisionSpec:
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_channels: int
    patch_size: int
    merge: int
    frames: int
    """Frames in a patch."""
    output_size: int
    activation: str
    gated: bool
    """Gated MLPs, and RMSNorm instead of LayerNorm."""
    norm_eps: float = 1e-6
    bias: bool = True
    head_norms: bool = False
    """Queries and keys are normed, head by head."""
    theta: float = 10000.0
    window: int | None = None
    """Pixels along each side of an attention window; None: the whole image."""
    full_layers: tuple[int, ...] = ()
    """Layers without windows."""
    num_positions: int = 0
    """Number of learned embeddings in a square that is resized to the image; 0: none."""
    corners: bool = True
    """Align corners instead of edges."""
    cubic: bool = False
    flat_patches: bool = False
    """The patch projection has no axis for frames."""
    patch_bias: bool = False
    projections: tuple[str, ...] = ("qkv",)
    """Names of queries, keys and values in checkpoints."""
    deepstack: tuple[int, ...] = ()
    """Layers whose outputs are merged too, for the decoder's first layers (https://arxiv.org/abs/2406.04334)."""
    convolved: int | None = None
    """Inner size of a gated MLP after a convolution that merges patches; None: no convolution."""
    last_norm: bool = False
    """A norm follows the layers, besides the merger's own."""
    merger_eps: float = 1e-6
    kv_heads: int | None = None
    """Heads of keys and values; None: `num_heads`."""
    convolving: tuple[int, ...] = ()
    """Layers with a gated convolution instead of attention."""
    kernel: int = 3
    """Patches along each side of that convolution."""
    patch_matrix: bool = False
    """Checkpoints have the patch projection as a matrix."""
    patch_norm: bool = False
    """A norm follows the patch projection."""
    positions_first: bool = False
    """Learned embeddings of positions are added before that norm, and are zero outside their square."""
    frames_first: bool = False
    """A patch is stored frame by frame, not channel by channel."""
    columns_first: bool = False
    """Rotary embeddings have columns before rows."""
    projector: int | None = None
    """Inner size of a merger with a LayerNorm of each patch and two layers; None: the usual merger."""
    adapter: int | None = None
    """Inner size of a merger with two activated layers, a projection, and a norm without weights; None: the usual
    merger.
    """
    projector_act: str = "gelu"
    projector_bias: bool = True

    @classmethod
    def from_config(cls, config: Config, output_size: int) -> QwenVisionSpec:
        kind = config.get("model_type", "qwen2_vl")
        read = next((read for prefix, read in KINDS.items() if kind.startswith(prefix)), None)
        if read is None:
            *others, last = KINDS
            raise UnsupportedModelError(
                f"vision tower {kind!r} is not supported; supported are {', '.join(others)} and {last}"
            )
        spec = cls(**read(config, output_size))
        if spec.hidden_size % spec.num_heads or spec.head_size % 4:
            raise ModelLoadError(
                f"config.json: {spec.num_heads} heads do not divide the vision tower's width {spec.hidden_size} into "
                "multiples of 4"
            )
        return spec

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads


def _common(config: Config, *, layers: int = 32, patch_size: int = 14) -> dict[str, Any]:
    """Settings with the same names in all configs. layers, patch_size: defaults."""
    return {
        "num_layers": config.get("depth", layers),
        "num_heads": config.get("num_heads", 16),
        "num_channels": config.get("in_channels", config.get("in_chans", 3)),
        "patch_size": config.get("patch_size", patch_size),
        "merge": config.get("spatial_merge_size", 2),
        "frames": config.get("temporal_patch_size", 2),
    }


def _qwen2(config: Config, output_size: int) -> dict[str, Any]:
    # Here `hidden_size` is the decoder's.
    hidden_size = config.get("embed_dim", 1280)
    return {
        **_common(config),
        "hidden_size": hidden_size,
        "intermediate_size": int(hidden_size * config.get("mlp_ratio", 4)),
        "output_size": config.get("hidden_size", output_size),
        "activation": config.get("hidden_act", "quick_gelu"),
        "gated": False,
    }


def _qwen25(config: Config, output_size: int) -> dict[str, Any]:
    return {
        **_common(config),
        "hidden_size": config.get("hidden_size", 3584),
        "intermediate_size": config.get("intermediate_size", 3420),
        "output_size": config.get("out_hidden_size", output_size),
        "activation": config.get("hidden_act", "silu"),
        "gated": True,
        "window": config.get("window_size", 112),
        "full_layers": tuple(config.get("fullatt_block_indexes", (7, 15, 23, 31))),
    }


def _qwen3(config: Config, output_size: int) -> dict[str, Any]:
    return {
        **_common(config, layers=27, patch_size=16),
        "hidden_size": config.get("hidden_size", 1152),
        "intermediate_size": config.get("intermediate_size", 4304),
        "output_size": config.get("out_hidden_size", 3584),
        "activation": config.get("hidden_act", "gelu_pytorch_tanh"),
        "gated": False,
        "num_positions": config.get("num_position_embeddings", 2304),
        "patch_bias": True,
        "deepstack": deepstack_layers(config),
    }


def _qwen35(config: Config, output_size: int) -> dict[str, Any]:
    return {**_qwen3(config, output_size), "deepstack": ()}


def _glm_ocr(config: Config, output_size: int) -> dict[str, Any]:
    return {
        **_common(config, layers=24),
        "hidden_size": config.get("hidden_size", 1024),
        "intermediate_size": config.get("intermediate_size", 4096),
        "output_size": config.get("out_hidden_size", 1536),
        "activation": config.get("hidden_act", "silu"),
        "gated": True,
        "norm_eps": config.get("rms_norm_eps", 1e-5),
        "bias": config.get("attention_bias", True),
        "head_norms": True,
        "theta": _theta(config),
        "patch_bias": True,
        "convolved": config.get("out_hidden_size", 1536) * config.get("in_channels", 3),
    }


def _glm4v(config: Config, output_size: int) -> dict[str, Any]:
    """Layers' MLPs are as wide as the merger's output; `intermediate_size` is the merger's."""
    if config.get("attention_bias"):
        raise UnsupportedModelError("vision_config: attention_bias true is not supported for GLM-4V towers")
    width = config.get("out_hidden_size", 4096)
    return {
        **_common({"num_heads": 12, **config}, layers=24),
        "hidden_size": config.get("hidden_size", 1536),
        "intermediate_size": width,
        "output_size": width,
        "activation": config.get("hidden_act", "silu"),
        "gated": True,
        "norm_eps": config.get("rms_norm_eps", 1e-5),
        "bias": False,
        "theta": _theta(config),
        "num_positions": (config.get("image_size", 336) // config.get("patch_size", 14)) ** 2,
        "corners": False,
        "cubic": True,
        "patch_bias": True,
        "patch_norm": True,
        "convolved": config.get("intermediate_size", 13696),
    }


def _paddleocr(config: Config, output_size: int) -> dict[str, Any]:
    size, patch_size = config.get("image_size", 384), config.get("patch_size", 14)
    return {
        "num_layers": config.get("num_hidden_layers", 27),
        "hidden_size": config.get("hidden_size", 1152),
        "intermediate_size": config.get("intermediate_size", 4304),
        "num_heads": config.get("num_attention_heads", 16),
        "num_channels": config.get("num_channels", 3),
        "patch_size": patch_size,
        "merge": config.get("spatial_merge_size", 2),
        "frames": 1,
        "output_size": output_size,
        "activation": config.get("hidden_act", "gelu_pytorch_tanh"),
        "gated": False,
        "norm_eps": config.get("layer_norm_eps", 1e-6),
        "theta": _theta(config),
        "num_positions": (size // patch_size) ** 2,
        "corners": False,
        "flat_patches": True,
        "patch_bias": True,
        "projections": ("q_proj", "k_proj", "v_proj"),
        "last_norm": True,
        "merger_eps": 1e-5,
    }


def _lfm3(config: Config, output_size: int) -> dict[str, Any]:
    layers = config.get("num_hidden_layers", 14)
    kinds = config.get("layer_types") or ["conv" if n < 2 or n % 2 else "full_attention" for n in range(layers)]
    return {
        **_common(config, patch_size=16),
        "num_layers": layers,
        "hidden_size": config.get("hidden_size", 1024),
        "intermediate_size": config.get("intermediate_size", 2560),
        "num_heads": config.get("num_attention_heads", 16),
        "kv_heads": config.get("num_key_value_heads", 8),
        "output_size": output_size,
        "activation": "silu",
        "gated": True,
        "norm_eps": config.get("norm_eps", 1e-5),
        "bias": False,
        "head_norms": True,
        "theta": float((config.get("rope_parameters") or {}).get("rope_theta", 1e6)),
        "projections": ("q_proj", "k_proj", "v_proj"),
        "convolving": tuple(number for number, kind in enumerate(kinds) if kind == "conv"),
        "kernel": config.get("conv_kernel_size", 3),
        "patch_matrix": True,
        "patch_norm": True,
        "projector": config.get("projector_hidden_size", 4096),
        "projector_act": config.get("projector_hidden_act", "gelu"),
        "projector_bias": config.get("projector_bias", True),
    }


def _muse_glimmer(config: Config, output_size: int) -> dict[str, Any]:
    layers, side = config.get("num_hidden_layers", 50), config.get("pos_emb_height", 32)
    needed = {"layer_norm_eps": 1e-5, "pos_emb_width": side}
    for name, value in needed.items():
        if config.get(name, value) != value:
            raise UnsupportedModelError(f"vision_config: {name} {config[name]!r} is not supported; supported: {value}")
    patch_size, merge = config.get("patch_size", 14), config.get("merge_size", 2)
    if side % merge:
        raise ModelLoadError(f"vision_config: pos_emb_height, {side}, is no multiple of merge_size, {merge}")
    full = [layer for layer in range(layers) if layer % 4 == 3 or layer == layers - 1]
    if kinds := config.get("layer_types"):
        full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    return {
        "num_layers": layers,
        "hidden_size": config.get("hidden_size", 1536),
        "intermediate_size": config.get("intermediate_size", 8960),
        "num_heads": config.get("num_attention_heads", 16),
        "num_channels": 3,
        "patch_size": patch_size,
        "merge": merge,
        "frames": config.get("patch_temporal", 2),
        "output_size": output_size,
        "activation": config.get("hidden_act", "gelu"),
        "gated": False,
        "norm_eps": 1e-5,
        "theta": _theta(config),
        "window": side * patch_size,
        "full_layers": tuple(full),
        "num_positions": side**2,
        "corners": False,
        "projections": ("q_proj", "k_proj", "v_proj"),
        "patch_matrix": True,
        "patch_norm": True,
        "positions_first": True,
        "frames_first": True,
        "columns_first": True,
        "adapter": config["projector_hidden_size"],
        "projector_act": config["projector_hidden_act"],
        "merger_eps": config["output_eps"],
    }


def _theta(config: Config) -> float:
    return float((config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta") or 10000.0)


KINDS: Mapping[str, Callable[[Config, int], dict[str, Any]]] = {
    "qwen2_vl": _qwen2,
    "qwen2_5_vl": _qwen25,
    "qwen3_vl": _qwen3,
    "qwen3_5": _qwen35,
    "glm_ocr": _glm_ocr,
    "glm4v": _glm4v,
    "lfm3_vl": _lfm3,
    "muse_glimmer": _muse_glimmer,
    "paddleocr_vl": _paddleocr,
}
"""Readers of a spec's fields, by prefix of the tower's model type. They get the config and the decoder's width."""
