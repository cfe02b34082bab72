"""Vision of Idefics3 (https://arxiv.org/abs/2408.12637) and SmolVLM (https://arxiv.org/abs/2504.05299)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from vlmserve.errors import InvalidImageError
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import Linear
from vlmserve.layers.stages import StageBudget, Stages, by_rows
from vlmserve.models.vision.clip import ClipSpec
from vlmserve.models.vision.siglip import IDEFICS3_DEFAULTS, IDEFICS3_KINDS, SiglipTower
from vlmserve.models.vision.staged import StagedVision
from vlmserve.types import TowerInputs

TILES_AT_ONCE = 16
"""Limits the memory for images with many tiles and for several images."""


def merged_squares(patches: Tensor, merge: int) -> Tensor:
    """``[tiles, patches, size]`` of square tiles to ``[tiles, patches / merge^2, merge^2 * size]``.

    Patches of a square are concatenated row by row.
    """
    tiles, count, _ = patches.shape
    side = math.isqrt(count) // merge
    return patches.view(tiles, side, merge, side, merge, -1).transpose(2, 3).reshape(tiles, side**2, -1)


class Connector(nn.Module):
    """Projects squares: ``[tiles, patches, hidden_size]`` to ``[tiles, patches / merge^2, output_size]``.

    Module names match checkpoints.
    """

    def __init__(self, size: int, merge: int, output_size: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        projection = Linear(size * merge**2, output_size, bias=False, **factory)
        self.modality_projection = nn.ModuleDict({"proj": projection})
        self.merge = merge

    def products(self, patches: int) -> int:
        return patches // self.merge**2 * self.modality_projection["proj"].products  # type: ignore[operator, return-value]

    def forward(self, patches: Tensor) -> Tensor:
        output: Tensor = self.modality_projection["proj"](merged_squares(patches, self.merge))
        return output


class Idefics3Vision(StagedVision):
    """Tower and connector of a config. Module names match checkpoints."""

    def __init__(self, config: Mapping[str, Any], hidden_size: int, **factory: Unpack[Factory]) -> None:
        super().__init__(**factory)
        spec = ClipSpec.from_config(config.get("vision_config") or {}, IDEFICS3_KINDS, IDEFICS3_DEFAULTS)
        merge = int(config.get("scale_factor", 2))
        self.vision_model = SiglipTower(spec, stretched=True, **factory)
        self.connector = Connector(spec.hidden_size, merge, hidden_size, **factory)

    def embeddings(self, shape: tuple[int, ...], tiling: TowerInputs | None = None) -> int:
        spec, merge = self.vision_model.spec, self.connector.merge
        side = shape[-1] // spec.patch_size
        if len(shape) != 4 or shape[1] != spec.num_channels or shape[2] != shape[3] or not side or side % merge:
            raise InvalidImageError(
                f"the vision tower takes square tiles with {spec.num_channels} channels and whole squares of "
                f"{merge} x {merge} patches of {spec.patch_size} pixels, not {shape}"
            )
        return shape[0] * (side // merge) ** 2

    @property
    def example_shape(self) -> tuple[int, ...]:
        spec = self.vision_model.spec
        side = spec.patch_size * self.connector.merge
        side *= max(1, spec.image_size // side)
        return 1, spec.num_channels, side, side

    @property
    def larger_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return 4, *self.example_shape[1:]

    def products(self, shape: tuple[int, ...], tiling: TowerInputs | None = None) -> int:
        patches = (shape[2] // self.vision_model.spec.patch_size) ** 2
        return shape[0] * (self.vision_model.products(patches) + self.connector.products(patches))

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        images = []
        for image in pixels:
            embeddings = []
            for tiles in torch.split(image.to(self.dtype), TILES_AT_ONCE):
                patches = yield from self.vision_model.in_stages(tiles, budget)
                products = self.connector.products(patches.shape[1])
                embeddings.append((yield from by_rows(self.connector, products, budget, patches)))
            images.append(torch.cat(embeddings).flatten(0, 1))
        return images
