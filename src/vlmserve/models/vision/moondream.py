"""The vision tower of Moondream 2 (https://huggingface.co/vikhyatk/moondream2, revisions 2025-01-09 to 2025-04-14).

CLIP's layers encode the whole image and overlapping crops. The crops' features are joined, averaged to the whole
image's grid, and projected together with its features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmserve.errors import InvalidImageError, UnsupportedModelError
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import empty_parameter
from vlmserve.layers.norm import LayerNorm
from vlmserve.layers.stages import StageBudget, Stages, by_rows
from vlmserve.models.vision.clip import ClipLayer, ClipSpec, PatchEmbedding
from vlmserve.models.vision.llava import Projector
from vlmserve.models.vision.staged import StagedVision, through_layers
from vlmserve.types import TowerInputs

DEFAULTS: Mapping[str, Any] = {
    "enc_dim": 1152,
    "enc_patch_size": 14,
    "enc_n_layers": 27,
    "enc_ff_dim": 4304,
    "enc_n_heads": 16,
    "proj_out_dim": 2048,
    "crop_size": 378,
    "in_channels": 3,
    "max_crops": 12,
    "overlap_margin": 4,
    "proj_inner_dim": 8192,
}
ACTIVATION = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class MoondreamSpec:
    layers: ClipSpec
    margin: int
    """Patches along each side of a crop that overlap its neighbors."""
    max_crops: int
    """Maximum number for one image, without the whole image."""
    inner_size: int
    out_size: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any], hidden_size: int) -> MoondreamSpec:
        own = config.get("config") or {}
        vision = {**DEFAULTS, **(own.get("vision") or {})}
        layers = ClipSpec.from_config(
            {
                "hidden_size": vision["enc_dim"],
                "intermediate_size": vision["enc_ff_dim"],
                "num_hidden_layers": vision["enc_n_layers"],
                "num_attention_heads": vision["enc_n_heads"],
                "num_channels": vision["in_channels"],
                "image_size": vision["crop_size"],
                "patch_size": vision["enc_patch_size"],
                "hidden_act": ACTIVATION,
                "layer_norm_eps": 1e-5,
            }
        )
        prefix = (own.get("text") or {}).get("prefix_attn", layers.num_patches + 1)
        if prefix != layers.num_patches + 1:
            raise UnsupportedModelError(
                f"config.json: prefix_attn {prefix} is not supported; an image and the token before it make "
                f"{layers.num_patches + 1}"
            )
        if vision["proj_out_dim"] != hidden_size or layers.image_size % layers.patch_size:
            raise UnsupportedModelError(
                f"config.json: images of {vision['proj_out_dim']} features for a decoder of {hidden_size}, or crops "
                f"of {layers.image_size} pixels in patches of {layers.patch_size}, are not supported"
            )
        if layers.image_size // layers.patch_size <= 2 * vision["overlap_margin"]:
            raise UnsupportedModelError("config.json: overlap_margin leaves nothing of a crop")
        return cls(
            layers, vision["overlap_margin"], vision["max_crops"], vision["proj_inner_dim"], vision["proj_out_dim"]
        )

    @property
    def side(self) -> int:
        return self.layers.image_size // self.layers.patch_size

    @property
    def stride(self) -> int:
        return self.side - 2 * self.margin


class MoondreamTower(StagedVision):
    """A `VisionEncoder`. The pixels of an image are one plane.

    The whole image at a crop's size is in the upper left corner; below it is the image that crops are cut from.
    """

    def __init__(self, spec: MoondreamSpec, **factory: Unpack[Factory]) -> None:
        super().__init__(**factory)
        self.spec = spec
        self._size, self._step = spec.layers.image_size, spec.stride * spec.layers.patch_size
        shape = spec.layers
        self.patch_embedding = PatchEmbedding(shape, bias=True, as_matrix=True, **factory)
        self.position_embedding = empty_parameter(1, shape.num_patches, shape.hidden_size, **factory)
        self._layers = [ClipLayer(shape, **factory) for _ in range(shape.num_layers)]
        self.blocks = nn.ModuleList(self._layers)
        self.post_layernorm = LayerNorm(shape.hidden_size, shape.norm_eps, **factory)
        self.projector = Projector(
            2 * shape.hidden_size, spec.out_size, ACTIVATION, inner=spec.inner_size, bias=True, **factory
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], hidden_size: int, **factory: Unpack[Factory]) -> MoondreamTower:
        return cls(MoondreamSpec.from_config(config, hidden_size), **factory)

    def embeddings(self, shape: tuple[int, ...], tiling: TowerInputs | None = None) -> int:
        layers = self.spec.layers
        layout = self._layout(shape) if len(shape) == 4 and tuple(shape[:2]) == (1, layers.num_channels) else (0, 0)
        fits = min(layout) == 1 or (min(layout) > 1 and layout[0] * layout[1] <= self.spec.max_crops)
        if not fits or self._plane(layout) != tuple(shape[2:]):
            raise InvalidImageError(
                f"pixels {tuple(shape)} are not an image with up to {self.spec.max_crops} crops, or one row or column"
            )
        return layers.num_patches

    @property
    def example_shape(self) -> tuple[int, ...]:
        return 1, self.spec.layers.num_channels, *self._plane((1, 1))

    @property
    def larger_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return 1, self.spec.layers.num_channels, *self._plane((2, 2))

    def products(self, shape: tuple[int, ...], tiling: TowerInputs | None = None) -> int:
        rows, columns = self._layout(shape)
        patches = self.spec.layers.num_patches
        crop = patches * self.patch_embedding.products + sum(block.products(patches) for block in self._layers)
        return (1 + rows * columns) * crop + patches * self.projector.products

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        images = []
        for plane in pixels:
            images.append((yield from self._encode(plane[0].to(self.dtype), self._layout(plane.shape), budget)))
        return images

    def _layout(self, shape: tuple[int, ...]) -> tuple[int, int]:
        size, step = self._size, self._step
        return (shape[2] - 2 * size) // step + 1, (shape[3] - size) // step + 1

    def _plane(self, layout: tuple[int, int]) -> tuple[int, int]:
        """Height and width of pixels with these rows and columns of crops."""
        size, step = self._size, self._step
        return 2 * size + (layout[0] - 1) * step, size + (layout[1] - 1) * step

    def _encode(self, plane: Tensor, layout: tuple[int, int], budget: StageBudget) -> Stages[Tensor]:
        size, step = self._size, self._step
        crops = plane[:, size:].unfold(1, size, step).unfold(2, size, step).permute(1, 2, 0, 3, 4).flatten(0, 1)
        crops = torch.cat((plane[None, :, :size, :size], crops))
        products = self.spec.layers.num_patches * self.patch_embedding.products
        x = yield from by_rows(self.patch_embedding, products, budget, crops)
        x = x + self.position_embedding
        x = self.post_layernorm((yield from through_layers(self._layers, x, budget)))
        side = self.spec.side
        grid = self._put_together(x[1:].unflatten(1, (side, side)).unflatten(0, layout))
        local = F.adaptive_avg_pool2d(grid.permute(2, 0, 1).float(), side).to(x.dtype)
        features = torch.cat((x[0], local.flatten(1).T), -1)
        return (yield from by_rows(self.projector, self.projector.products, budget, features))

    def _put_together(self, crops: Tensor) -> Tensor:
        """Join crops ``[rows, columns, side, side, size]`` to one grid; each neighbor keeps half of an overlap."""
        rows, columns, side, _, _ = crops.shape
        margin = self.spec.margin

        def kept(number: int, of: int) -> slice:
            return slice(0 if number == 0 else margin, side if number == of - 1 else side - margin)

        return torch.cat(
            [
                torch.cat([crops[row, column, kept(row, rows), kept(column, columns)] for column in range(columns)], 1)
                for row in range(rows)
            ]
        )
