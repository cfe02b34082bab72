"""Gemma 3's vision: a SigLIP tower and projected averages of patches (https://arxiv.org/abs/2503.19786)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch.nn.functional as F
from torch import Tensor, nn

from vlmserve.errors import ModelLoadError
from vlmserve.families.gemma3 import TOKENS_PER_IMAGE
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import empty_parameter
from vlmserve.layers.norm import RMSNorm
from vlmserve.layers.stages import StageBudget, Stages, by_rows
from vlmserve.models.vision.clip import ClipSpec
from vlmserve.models.vision.siglip import SIGLIP_DEFAULTS, SiglipTower
from vlmserve.models.vision.staged import TileVision


class Gemma3Projector(nn.Module):
    """``[images, patches, vision width]`` to ``[images, embeddings, hidden_size]``, by averaging squares.

    products: MACs for an image.
    """

    def __init__(self, spec: ClipSpec, hidden_size: int, num_tokens: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self._side = spec.image_size // spec.patch_size
        self._square = self._side // max(1, int(num_tokens**0.5))
        if self._square < 1 or (self._side // self._square) ** 2 != num_tokens:
            raise ModelLoadError(
                f"config.json: {self._side} x {self._side} patches cannot be averaged to mm_tokens_per_image "
                f"{num_tokens} embeddings"
            )
        # Transposed compared with a linear layer's weight.
        self.mm_input_projection_weight = empty_parameter(spec.hidden_size, hidden_size, **factory)
        self.products = num_tokens * spec.hidden_size * hidden_size
        self.mm_soft_emb_norm = RMSNorm(spec.hidden_size, spec.norm_eps, offset=1.0, **factory)

    def forward(self, patches: Tensor) -> Tensor:
        images, _, width = patches.shape
        planes = patches.transpose(1, 2).reshape(images, width, self._side, self._side)
        averaged = F.avg_pool2d(planes, self._square).flatten(2).transpose(1, 2)
        output: Tensor = self.mm_soft_emb_norm(averaged) @ self.mm_input_projection_weight
        return output


class Gemma3Vision(TileVision):
    """Tower and projector of a Gemma 3 config. Module names match checkpoints."""

    def __init__(self, config: Mapping[str, Any], hidden_size: int, **factory: Unpack[Factory]) -> None:
        super().__init__(**factory)
        spec = ClipSpec.from_config(config.get("vision_config") or {}, ("siglip_vision_model",), SIGLIP_DEFAULTS)
        self.tile, self.tile_embeddings = spec.tile, config.get("mm_tokens_per_image", TOKENS_PER_IMAGE)
        self.vision_tower = SiglipTower(spec, **factory)
        self.multi_modal_projector = Gemma3Projector(spec, hidden_size, self.tile_embeddings, **factory)
        self.tile_products = self.vision_tower.products(spec.num_patches) + self.multi_modal_projector.products

    def tiles_in_stages(self, tiles: Tensor, budget: StageBudget) -> Stages[Tensor]:
        patches = yield from self.vision_tower.in_stages(tiles, budget)
        projector = self.multi_modal_projector
        return (yield from by_rows(projector, projector.products, budget, patches))
