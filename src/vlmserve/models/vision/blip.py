"""The vision transformer of BLIP (https://arxiv.org/abs/2201.12086): CLIP's layers with another input and output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from vlmserve.layers.layer import Factory
from vlmserve.layers.stages import StageBudget, Stages
from vlmserve.models.vision.clip import BiasedEmbeddings, ClipLayer, ClipSpec, EncoderTower
from vlmserve.models.vision.staged import FixedSizeVision
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


class BlipVision(FixedSizeVision):
    """Images to normed states of class token and patches, for cross-attention."""

    def __init__(self, config: Mapping[str, Any], hidden_size: int, **factory: Unpack[Factory]) -> None:
        super().__init__(**factory)
        vision = {**(config.get("vision_config") or {}), "num_channels": 3}
        spec = ClipSpec.from_config(vision, ("blip_vision_model",), DEFAULTS)
        layers = [ClipLayer(spec, **factory) for _ in range(spec.num_layers)]
        self.vision_tower = EncoderTower(spec, BiasedEmbeddings(spec, **factory), layers, last_norm=True, **factory)
        self.tile, self.tile_embeddings = spec.tile, spec.num_patches + 1
        self.tile_products = self.vision_tower.products(spec.num_patches)

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        return list((yield from self.vision_tower.in_stages(torch.cat(pixels).to(self.dtype), budget)))
