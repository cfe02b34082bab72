"""LFM2-VL's vision: SigLIP 2 NaFlex (https://arxiv.org/abs/2502.14786)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmserve.errors import InvalidImageError, ModelLoadError
from vlmserve.kernels.ranges import Ranges
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import Embedding, Linear
from vlmserve.layers.norm import LayerNorm
from vlmserve.layers.residual import ResidualStream
from vlmserve.layers.stages import StageBudget, Stages, by_rows
from vlmserve.models.vision.clip import ClipLayer, ClipSpec
from vlmserve.models.vision.intern import NormedProjector
from vlmserve.models.vision.llava import Projector
from vlmserve.models.vision.siglip import SIGLIP_DEFAULTS
from vlmserve.models.vision.staged import StagedVision, with_following
from vlmserve.types import SquareGrids, TowerInputs

Grid = tuple[int, int]
KINDS = ("siglip2_vision_model",)
KEPT_PATCHES = 2**14
"""Maximum patches whose position embeddings are cached by grid, besides the last grid."""
_PATCHES = 256
_SIDE = 8
"""Squares along each side of the image for warm-up and timing."""


class SquareEmbeddings(nn.Module):
    """Squares of pixels to patches with position embeddings, square by square."""

    def __init__(self, spec: ClipSpec, merge: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        patch = spec.num_channels * spec.patch_size**2
        self.patch_embedding = Linear(patch, spec.hidden_size, bias=True, **factory)
        self.position_embedding = Embedding(spec.num_patches, spec.hidden_size, **factory)
        self._side = spec.image_size // spec.patch_size
        self._merge = merge
        self._kept: OrderedDict[Grid, Tensor] = OrderedDict()

    @property
    def products(self) -> int:
        return self._merge**2 * self.patch_embedding.products

    def forward(self, squares: Tensor) -> Tensor:
        """``[squares, channels, side, side]`` to ``[squares, merge^2, hidden_size]``, without positions."""
        count, channels, side, _ = squares.shape
        size = side // self._merge
        patches = squares.view(count, channels, self._merge, size, self._merge, size).permute(0, 2, 4, 3, 5, 1)
        output: Tensor = self.patch_embedding(patches.reshape(count, self._merge**2, -1))
        return output

    def positions(self, grid: Grid) -> Tensor:
        if grid not in self._kept:
            self._kept[grid] = self._resized(*grid)
        self._kept.move_to_end(grid)
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > KEPT_PATCHES:
            self._kept.popitem(last=False)
        return self._kept[grid]

    def _resized(self, rows: int, columns: int) -> Tensor:
        weight, merge = self.position_embedding.weight, self._merge
        table = weight.float().T.view(1, -1, self._side, self._side)
        size = rows * merge, columns * merge
        # In float32 as in transformers: antialiasing supports no shorter dtype on CPUs.
        resized = F.interpolate(table, size, mode="bilinear", align_corners=False, antialias=True)[0]
        squares = resized.view(-1, rows, merge, columns, merge).permute(1, 3, 2, 4, 0)
        return squares.reshape(rows * columns * merge**2, -1).to(weight.dtype)


class SquareTower(nn.Module):
    """Squares of images to states of their patches. Module names match checkpoints."""

    def __init__(self, spec: ClipSpec, merge: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.spec = spec
        self._merge = merge
        self.embeddings = SquareEmbeddings(spec, merge, **factory)
        self._layers = [ClipLayer(spec, **factory) for _ in range(spec.num_layers)]
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(self._layers)})
        self.post_layernorm = LayerNorm(spec.hidden_size, spec.norm_eps, **factory)

    def products(self, grids: Sequence[Grid]) -> int:
        lengths = self._lengths(grids)
        layers = sum(layer.products(*lengths) for layer in self._layers)
        return sum(map(math.prod, grids)) * self.embeddings.products + layers

    @property
    def takes_together(self) -> bool:
        """Return whether the device computes several images faster together."""
        return self._layers[0].self_attn.attention.range_kernels is not None

    def in_stages(self, squares: Tensor, grids: Sequence[Grid], budget: StageBudget) -> Stages[Tensor]:
        """``[squares, channels, side, side]`` of parts with these grids to ``[squares * merge^2, hidden_size]``.

        A part's patches attend to each other.
        """
        patches = yield from by_rows(self.embeddings, self.embeddings.products, budget, squares)
        positions = torch.cat([self.embeddings.positions(grid) for grid in grids])
        stream = ResidualStream(patches.flatten(0, 1) + positions)
        ranges = Ranges.of(self._lengths(grids), squares.device)
        for layer, following in with_following(self._layers):
            stream = yield from layer.in_stages(stream, ranges, budget, following)
        output: Tensor = self.post_layernorm(stream.rows)
        return output

    def _lengths(self, grids: Sequence[Grid]) -> list[int]:
        return [math.prod(grid) * self._merge**2 for grid in grids]


class SquareVision(StagedVision):
    """Tower and projector of a config. Module names match checkpoints."""

    def __init__(self, config: Mapping[str, Any], hidden_size: int, **factory: Unpack[Factory]) -> None:
        super().__init__(**factory)
        spec = _spec(config.get("vision_config") or {})
        self._merge = int(config.get("downsample_factor", 2))
        projector = NormedProjector if config.get("projector_use_layernorm", True) else Projector
        self.vision_tower = SquareTower(spec, self._merge, **factory)
        self.multi_modal_projector = projector(
            spec.hidden_size * self._merge**2,
            hidden_size,
            config.get("projector_hidden_act", "gelu"),
            bias=config.get("projector_bias", True),
            inner=config.get("projector_hidden_size", 2560),
            **factory,
        )

    def embeddings(self, shape: tuple[int, ...], tiling: TowerInputs | None = None) -> int:
        expected = self.example_shape[1:]
        if len(shape) != 4 or tuple(shape[1:]) != expected or not shape[0]:
            raise InvalidImageError(f"the vision tower takes squares of {expected}, not of {tuple(shape[1:])}")
        embeddings = sum(map(math.prod, _grids(shape[0], tiling)))
        if shape[0] != embeddings:
            raise InvalidImageError(f"the image has {shape[0]} squares and makes {embeddings} embeddings")
        return embeddings

    @property
    def example_shape(self) -> tuple[int, ...]:
        side = self.vision_tower.spec.patch_size * self._merge
        return _SIDE**2, self.vision_tower.spec.num_channels, side, side

    @property
    def larger_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        squares, *square = self.example_shape
        return 4 * squares, *square

    def products(self, shape: tuple[int, ...], tiling: TowerInputs | None = None) -> int:
        return self.vision_tower.products(_grids(shape[0], tiling)) + shape[0] * self.multi_modal_projector.products

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        """One embedding per square, in the order of the pixels."""
        tilings = tilings or [None] * len(pixels)
        images = [(image, _grids(len(image), tiling)) for image, tiling in zip(pixels, tilings, strict=True)]
        embeddings: list[Tensor] = []
        for some in [images] if self.vision_tower.takes_together else [[image] for image in images]:
            squares = torch.cat([image for image, _ in some]).to(self.dtype)
            grids = [grid for _, own in some for grid in own]
            patches = yield from self.vision_tower.in_stages(squares, grids, budget)
            rows = patches.view(len(squares), -1)
            projected = yield from by_rows(
                self.multi_modal_projector, self.multi_modal_projector.products, budget, rows
            )
            embeddings += torch.split(projected, [len(image) for image, _ in some])
        return embeddings


def _grids(squares: int, tiling: TowerInputs | None) -> tuple[Grid, ...]:
    """The grids of an image's parts. Without tiling, the squares form a square."""
    if isinstance(tiling, SquareGrids):
        return tiling.grids
    return ((math.isqrt(squares),) * 2,)


def _spec(config: Mapping[str, Any]) -> ClipSpec:
    patches, patch = config.get("num_patches", _PATCHES), config.get("patch_size", SIGLIP_DEFAULTS["patch_size"])
    side = math.isqrt(patches)
    if side**2 != patches:
        raise ModelLoadError(f"config.json: num_patches of the vision tower is {patches}, not a square number")
    return ClipSpec.from_config({**config, "image_size": side * patch}, KINDS, SIGLIP_DEFAULTS)
