"""The vision transformer of BLIP (https://arxiv.org/abs/2201.12086): CLIP's layers with another input and output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from vlmserve.errors import InvalidImageError
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import empty_parameter
from vlmserve.layers.norm import LayerNorm
from vlmserve.layers.stages import StageBudget, Stages, by_rows
from vlmserve.models.vision.clip import ClipLayer, ClipSpec, PatchEmbedding
from vlmserve.models.vision.staged import StagedVision, through_layers
from vlmserve.types import TowerInputs

DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 384,
    "patch_size": 16,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
}


class BlipEmbeddings(nn.Module):
    """Maps images to class token and patches, with positions."""

    def __init__(self, spec: ClipSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.class_embedding = empty_parameter(1, 1, spec.hidden_size, **factory)
        self.patch_embedding = PatchEmbedding(spec, bias=True, **factory)
        self.position_embedding = empty_parameter(1, spec.num_patches + 1, spec.hidden_size, **factory)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embedding(pixels)
        return torch.cat((self.class_embedding.expand(len(patches), 1, -1), patches), 1) + self.position_embedding


class BlipTower(StagedVision):
    """Maps images to normed states of class token and patches, for cross-attention."""

    def __init__(self, spec: ClipSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.spec = spec
        self.dtype = factory["dtype"]
        self.embeddings = BlipEmbeddings(spec, **factory)
        layers = [ClipLayer(spec, **factory) for _ in range(spec.num_layers)]
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.post_layernorm = LayerNorm(spec.hidden_size, spec.norm_eps, **factory)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], hidden_size: int, **factory: Unpack[Factory]) -> BlipTower:
        spec = ClipSpec.from_config(
            {**(config.get("vision_config") or {}), "num_channels": 3}, ("blip_vision_model",), DEFAULTS
        )
        return cls(spec, **factory)

    def check(self, shape: tuple[int, ...], num_tokens: int, tiling: TowerInputs | None = None) -> None:
        expected = (1, 3, self.spec.image_size, self.spec.image_size)
        if tuple(shape) != expected:
            raise InvalidImageError(f"the vision tower takes images of {expected}, not of {tuple(shape)}")
        if num_tokens != self.spec.num_patches + 1:
            raise InvalidImageError(f"the image makes {self.spec.num_patches + 1} features, not {num_tokens}")

    @property
    def example_shape(self) -> tuple[int, ...]:
        return 1, 3, self.spec.image_size, self.spec.image_size

    def products(self, shape: tuple[int, ...], tiling: TowerInputs | None = None) -> int:
        layers = sum(layer.products(self.spec.num_patches + 1) for layer in self._layers())
        return self.spec.num_patches * self.embeddings.patch_embedding.products + layers

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        """Features are ``[1 + patches, hidden_size]`` for each image."""
        products = self.spec.num_patches * self.embeddings.patch_embedding.products
        x = yield from by_rows(self.embeddings, products, budget, torch.cat(pixels).to(self.dtype))
        x = yield from through_layers(self._layers(), x, budget)
        return list(self.post_layernorm(x))

    def _layers(self) -> Iterable[ClipLayer]:
        return self.encoder["layers"].children()  # type: ignore[return-value]
