"""Vision of InternVL 3 (https://arxiv.org/abs/2504.10479) and 3.5 (https://arxiv.org/abs/2508.18265).

InternViT (https://arxiv.org/abs/2312.14238) has CLIP's layers without first and last norm; a learned vector scales each
layer's outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import empty_parameter
from vlmserve.layers.norm import LayerNorm, RMSNorm
from vlmserve.layers.residual import ResidualStream, Unfinished
from vlmserve.layers.stages import StageBudget, Stages, by_rows
from vlmserve.models.vision.clip import BiasedEmbeddings, ClipLayer, ClipSpec, EncoderTower
from vlmserve.models.vision.idefics3 import TILES_AT_ONCE, merged_squares
from vlmserve.models.vision.llava import Projector
from vlmserve.models.vision.staged import FixedSizeVision
from vlmserve.types import TowerInputs

KINDS = ("internvl_vision",)
DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}
_NORMS: Mapping[str, type[LayerNorm] | type[RMSNorm]] = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}
_HEAD_NORM_EPS = 1e-6
_PROJECTOR_EPS = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class InternSpec:
    shape: ClipSpec
    norm: type[LayerNorm] | type[RMSNorm]
    """Before attention and MLP."""
    qkv_bias: bool
    head_norms: bool
    """Queries and keys are normed, over all heads together."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> InternSpec:
        needed = {"use_mean_pooling": True, "use_absolute_position_embeddings": True}
        for name, value in needed.items():
            if config.get(name, value) != value:
                raise UnsupportedModelError(f"an InternVL vision tower with {name} {config[name]!r} is not supported")
        norm = config.get("norm_type", "layer_norm")
        if norm not in _NORMS:
            raise UnsupportedModelError(f"norm_type {norm!r} of a vision tower is not supported")
        sizes = {name: square_side(config[name]) for name in ("image_size", "patch_size") if name in config}
        return cls(
            shape=ClipSpec.from_config({**config, **sizes}, KINDS, DEFAULTS),
            norm=_NORMS[norm],
            qkv_bias=bool(config.get("attention_bias", False)),
            head_norms=bool(config.get("use_qk_norm", False)),
        )


def square_side(value: Any) -> Any:
    """The side of a square given as equal height and width; other values pass unchanged."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1] else value


class InternLayer(ClipLayer):
    def __init__(self, spec: InternSpec, **factory: Unpack[Factory]) -> None:
        super().__init__(spec.shape, norm=spec.norm, qkv_bias=spec.qkv_bias, **factory)
        size = spec.shape.hidden_size
        self.lambda_1 = empty_parameter(size, **factory)
        self.lambda_2 = empty_parameter(size, **factory)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if spec.head_norms:
            self.q_norm = RMSNorm(size, _HEAD_NORM_EPS, **factory)
            self.k_norm = RMSNorm(size, _HEAD_NORM_EPS, **factory)

    def before_attention(self, normed: Tensor, *angles: Tensor) -> Tensor:
        qkv = super().before_attention(normed)
        if self.q_norm is None or self.k_norm is None:
            return qkv
        query, key, value = qkv.chunk(3, -1)
        return torch.cat((self.q_norm(query.contiguous()), self.k_norm(key.contiguous()), value), -1)

    def after_attention(self, stream: ResidualStream, attended: Tensor) -> None:
        stream.add(Unfinished(self.self_attn.out_proj, attended), factor=self.lambda_1)
        stream.add(self.mlp(stream.normed(self.layer_norm2)), factor=self.lambda_2)


class NormedProjector(Projector):
    """A `Projector` that norms its rows first. inner: see `Projector`."""

    def __init__(
        self,
        in_size: int,
        size: int,
        act: str,
        *,
        bias: bool = True,
        inner: int | None = None,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__(in_size, size, act, bias=bias, **factory, inner=inner)
        self.layer_norm = LayerNorm(in_size, _PROJECTOR_EPS, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.layer_norm(x))


class InternVision(FixedSizeVision):
    """Tower and projector. `families/internvl.py` maps module names."""

    several = True

    def __init__(self, config: Mapping[str, Any], hidden_size: int, **factory: Unpack[Factory]) -> None:
        super().__init__(**factory)
        needed = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
        for name, value in needed.items():
            if config.get(name, value) != value:
                raise UnsupportedModelError(
                    f"InternVL with {name} {config[name]!r} is not supported, only with {value!r}"
                )
        spec = InternSpec.from_config(config.get("vision_config") or {})
        shape = spec.shape
        self._merge = int(1 / config.get("downsample_ratio", 0.5))
        self._side = shape.image_size // shape.patch_size
        if self._merge < 1 or self._side % self._merge:
            raise ModelLoadError(
                f"config.json: {self._side} x {self._side} patches cannot be merged by downsample_ratio "
                f"{config.get('downsample_ratio')}"
            )
        layers = [InternLayer(spec, **factory) for _ in range(shape.num_layers)]
        self.vision_tower = EncoderTower(shape, BiasedEmbeddings(shape, **factory), layers, **factory)
        size, act = shape.hidden_size * self._merge**2, config.get("projector_hidden_act", "gelu")
        self.multi_modal_projector = NormedProjector(size, hidden_size, act, **factory)
        self.tile, self.tile_embeddings = shape.tile, (self._side // self._merge) ** 2
        projection = self.tile_embeddings * self.multi_modal_projector.products
        self.tile_products = self.vision_tower.products(shape.num_patches) + projection

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        projector = self.multi_modal_projector
        images = []
        for image in pixels:
            embeddings = []
            for tiles in torch.split(image.to(self.dtype), TILES_AT_ONCE):
                states = yield from self.vision_tower.in_stages(tiles, budget)
                squares = merged_squares(states[:, 1:].contiguous(), self._merge).flatten(0, 1)
                embeddings.append((yield from by_rows(projector, projector.products, budget, squares)))
            images.append(torch.cat(embeddings))
        return images
