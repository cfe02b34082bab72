"""The vision transformer of InternVL (https://arxiv.org/abs/2312.14238): CLIP's layers without a first or last norm,
each of which scales what it adds, element by element."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from vlmserve.errors import UnsupportedModelError
from vlmserve.layers.linear import empty_parameter
from vlmserve.layers.norm import LayerNorm, Normalization, RMSNorm
from vlmserve.layers.stages import StageBudget, Stages, by_rows
from vlmserve.models.vision.clip import ClipLayer, ClipSpec, PatchEmbedding
from vlmserve.models.vision.staged import TowerRows, through_layers

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


@dataclass(frozen=True, slots=True, kw_only=True)
class InternSpec:
    """The shape of a tower. norm: before attention and MLP. qkv_bias: whether queries, keys and values have biases.
    head_norms: whether queries and keys are normed, over all heads together."""

    shape: ClipSpec
    norm: type[LayerNorm] | type[RMSNorm]
    qkv_bias: bool
    head_norms: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> InternSpec:
        """From a ``vision_config``. Raises UnsupportedModelError for towers that are not implemented, ModelLoadError
        for impossible sizes."""
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
    """The side of a square whose height and width a config names; anything else as it is."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1] else value


class InternEmbeddings(nn.Module):
    """Images to tokens: the class token, then the patches row by row, each with its position."""

    def __init__(self, spec: ClipSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        size = spec.hidden_size
        self.cls_token = empty_parameter(1, 1, size, dtype=dtype, device=device)
        self.patch_embedding = PatchEmbedding(spec, bias=True, dtype=dtype, device=device)
        self.position_embeddings = empty_parameter(1, spec.num_patches + 1, size, dtype=dtype, device=device)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embedding(pixels)
        return torch.cat((self.cls_token.expand(len(patches), 1, -1), patches), 1) + self.position_embeddings


class InternLayer(ClipLayer):
    def __init__(self, spec: InternSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec.shape, norm=spec.norm, qkv_bias=spec.qkv_bias, dtype=dtype, device=device)
        size = spec.shape.hidden_size
        self.lambda_1 = empty_parameter(size, dtype=dtype, device=device)
        self.lambda_2 = empty_parameter(size, dtype=dtype, device=device)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if spec.head_norms:
            self.q_norm = RMSNorm(size, _HEAD_NORM_EPS, dtype=dtype, device=device)
            self.k_norm = RMSNorm(size, _HEAD_NORM_EPS, dtype=dtype, device=device)

    def before(self, normed: Tensor) -> Tensor:
        """See `StagedLayer.before`."""
        qkv = super().before(normed)
        if self.q_norm is None or self.k_norm is None:
            return qkv
        query, key, value = qkv.chunk(3, -1)
        return torch.cat((self.q_norm(query.contiguous()), self.k_norm(key.contiguous()), value), -1)

    def behind(self, attended: Tensor, x: Tensor, following: Normalization | None) -> TowerRows:
        """See `StagedLayer.behind`."""
        x = torch.addcmul(x, self.lambda_1, self.self_attn.out_proj(attended))
        return torch.addcmul(x, self.lambda_2, self.mlp(self.layer_norm2(x)))


class InternTower(nn.Module):
    """Square images of one size to the states of their class token and patches. Modules that are CLIP's have the names
    that they have there."""

    def __init__(self, spec: InternSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec.shape
        self.embeddings = InternEmbeddings(spec.shape, dtype=dtype, device=device)
        layers = [InternLayer(spec, dtype=dtype, device=device) for _ in range(spec.shape.num_layers)]
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})

    @cached_property
    def products(self) -> int:
        """Multiplications for an image."""
        layers = sum(layer.products(self.spec.num_patches + 1) for layer in self._layers())
        return self._patch_products + layers

    def in_stages(self, pixels: Tensor, budget: StageBudget) -> Stages[Tensor]:
        """``[images, channels, height, width]`` to ``[images, 1 + patches, hidden_size]``."""
        x = yield from by_rows(self.embeddings, self._patch_products, budget, pixels)
        return (yield from through_layers(self._layers(), x, budget))

    @property
    def _patch_products(self) -> int:
        return self.spec.num_patches * self.embeddings.patch_embedding.products

    def _layers(self) -> Iterable[InternLayer]:
        return self.encoder["layers"].children()  # type: ignore[return-value]
