"""PaliGemma's vision tower and projector (https://arxiv.org/abs/2407.07726): SigLIP and one linear layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor, nn

from vlmserve.families.paligemma import paligemma_vision
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import Linear
from vlmserve.layers.stages import StageBudget, Stages, by_rows
from vlmserve.models.vision.clip import ClipSpec
from vlmserve.models.vision.siglip import SIGLIP_DEFAULTS, SiglipTower
from vlmserve.models.vision.staged import TileVision


class PaliGemmaVision(TileVision):
    """Tower and projector of a PaliGemma config. Module names match checkpoints."""

    def __init__(self, config: Mapping[str, Any], hidden_size: int, **factory: Unpack[Factory]) -> None:
        super().__init__(**factory)
        spec = ClipSpec.from_config(paligemma_vision(config), ("siglip_vision_model",), SIGLIP_DEFAULTS)
        self.vision_tower = SiglipTower(spec, **factory)
        linear = Linear(spec.hidden_size, hidden_size, bias=True, **factory)
        self.multi_modal_projector = nn.ModuleDict({"linear": linear})
        self.tile, self.tile_embeddings = spec.tile, spec.num_patches
        self.tile_products = self.vision_tower.products(spec.num_patches) + spec.num_patches * linear.products

    def tiles_in_stages(self, tiles: Tensor, budget: StageBudget) -> Stages[Tensor]:
        patches = yield from self.vision_tower.in_stages(tiles, budget)
        rows = yield from by_rows(self._projection, self._projection.products, budget, patches.flatten(0, 1))
        return rows.view(len(tiles), -1, rows.shape[-1])

    @property
    def _projection(self) -> Linear:
        linear: Linear = self.multi_modal_projector["linear"]  # type: ignore[assignment]
        return linear
