"""InternVL 3 (https://arxiv.org/abs/2504.10479) and 3.5 (https://arxiv.org/abs/2508.18265): InternViT over square
tiles, and a network that makes one embedding of each square of patches. Implements `VisionEncoder`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vlmserve.errors import InvalidImageError, ModelLoadError, UnsupportedModelError
from vlmserve.layers.norm import LayerNorm
from vlmserve.layers.stages import StageBudget, Stages, by_rows
from vlmserve.models.idefics3 import TILES_AT_ONCE, merged_squares
from vlmserve.models.llava import Projector
from vlmserve.models.vision.intern import InternSpec, InternTower
from vlmserve.models.vision.staged import StagedVision
from vlmserve.types import TowerInputs

IMAGE_TOKEN_ID = 151667
_NORM_EPS = 1e-5


class InternProjector(Projector):
    """`Projector` of normed rows."""

    def __init__(self, in_size: int, size: int, act: str, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(in_size, size, act, bias=True, dtype=dtype, device=device)
        self.layer_norm = LayerNorm(in_size, _NORM_EPS, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.layer_norm(x))


class InternVision(StagedVision):
    """Tower and projector of a config; modules are named as `VISION_FAMILIES` renames those of checkpoints.

    Raises UnsupportedModelError for a tower, activation or selection of features that is not implemented,
    ModelLoadError for impossible sizes.
    """

    def __init__(
        self, config: Mapping[str, Any], hidden_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
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
        self.vision_tower = InternTower(spec, dtype=dtype, device=device)
        self.multi_modal_projector = InternProjector(
            shape.hidden_size * self._merge**2,
            hidden_size,
            config.get("projector_hidden_act", "gelu"),
            dtype=dtype,
            device=device,
        )
        self.dtype = dtype

    def check(self, shape: tuple[int, ...], num_tokens: int, tiling: TowerInputs | None = None) -> None:
        """Check that tiles of a shape become that many embeddings; raises InvalidImageError if they do not."""
        expected = self.example_shape[1:]
        if len(shape) != 4 or tuple(shape[1:]) != expected:
            raise InvalidImageError(f"the vision tower takes tiles of {expected}, not of {tuple(shape[1:])}")
        embeddings = shape[0] * self._embeddings_of_tile
        if embeddings != num_tokens:
            raise InvalidImageError(f"the image makes {embeddings} embeddings and has {num_tokens} placeholders")

    @property
    def example_shape(self) -> tuple[int, ...]:
        """See `VisionEncoder.example_shape`."""
        spec = self.vision_tower.spec
        return 1, spec.num_channels, spec.image_size, spec.image_size

    @property
    def larger_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """See `VisionEncoder.larger_shape`."""
        return 4, *self.example_shape[1:]

    def products(self, shape: tuple[int, ...], tiling: TowerInputs | None = None) -> int:
        """See `VisionEncoder.products`."""
        return shape[0] * (self.vision_tower.products + self._embeddings_of_tile * self.multi_modal_projector.products)

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        """See `VisionEncoder.in_stages`. One image after the other, its embeddings tile by tile, row by row."""
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

    @property
    def _embeddings_of_tile(self) -> int:
        return math.prod((self._side // self._merge,) * 2)
