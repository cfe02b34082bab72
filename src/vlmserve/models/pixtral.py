"""Pixtral (https://arxiv.org/abs/2410.07073), and Mistral Small 3 and Ministral 3, which merge squares of its tower's
patches. Implements `VisionEncoder`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vlmserve.errors import InvalidImageError, ModelLoadError, UnsupportedModelError
from vlmserve.layers.linear import Linear
from vlmserve.layers.norm import RMSNorm
from vlmserve.layers.stages import StageBudget, Stages, by_rows, run_stages
from vlmserve.models.llava import Projector
from vlmserve.models.vision.pixtral import PixtralLayout, PixtralSpec, PixtralTower
from vlmserve.models.vision.staged import StagedVision
from vlmserve.types import TowerInputs

IMAGE_TOKEN_ID = 10


class MergingProjector(Projector):
    """`Projector` of squares of patches, each of which is normed before all become one row."""

    def __init__(
        self, size: int, merge: int, output_size: int, act: str, norm_eps: float, *, bias: bool, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(size, output_size, act, bias=bias, dtype=dtype, device=device)
        self.norm = RMSNorm(size, norm_eps, dtype=dtype, device=device)
        merging = Linear(size * merge**2, size, bias=False, dtype=dtype, device=device)
        self.patch_merger = nn.ModuleDict({"merging_layer": merging})

    @property
    def products(self) -> int:
        """Multiplications for each square."""
        return super().products + self._merging.products

    def forward(self, x: Tensor) -> Tensor:
        """``[squares, merge^2, size]`` to ``[squares, output_size]``."""
        # Element by element of all patches, as a convolution sees them.
        together = self.norm(x).transpose(1, 2).flatten(1)
        return super().forward(self._merging(together))

    @property
    def _merging(self) -> Linear:
        return self.patch_merger["merging_layer"]  # type: ignore[return-value]


class PixtralVision(StagedVision):
    """Tower and projector of a config; modules are named as checkpoints name them.

    Raises UnsupportedModelError for a tower, activation or selection of features that is not implemented,
    ModelLoadError for impossible sizes.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        hidden_size: int,
        *,
        norm_eps: float | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """norm_eps: of the norm before patches are merged; None: they are not, as in Pixtral 12B."""
        super().__init__()
        if (chosen := config.get("vision_feature_layer", -1 if norm_eps is not None else -2)) not in (-1, [-1]):
            raise UnsupportedModelError(
                f"Pixtral with vision_feature_layer {chosen!r} is not supported, only with the last layer (-1)"
            )
        spec = PixtralSpec.from_config(config.get("vision_config") or {})
        size, act = spec.shape.hidden_size, config.get("projector_hidden_act", "gelu")
        self.vision_tower = PixtralTower(spec, dtype=dtype, device=device)
        self.multi_modal_projector: Projector
        if norm_eps is None:
            strategy = config.get("vision_feature_select_strategy", "default")
            if strategy != "full":
                raise UnsupportedModelError(
                    f"Pixtral with vision_feature_select_strategy {strategy!r} is not supported, only with 'full'"
                )
            self._merge, bias = 1, config.get("multimodal_projector_bias", True)
            self.multi_modal_projector = Projector(size, hidden_size, act, bias=bias, dtype=dtype, device=device)
        else:
            self._merge, bias = config.get("spatial_merge_size", 2), config.get("multimodal_projector_bias", False)
            if not isinstance(self._merge, int) or self._merge < 1:
                raise ModelLoadError(f"config.json: spatial_merge_size is {self._merge!r}, not a number of patches")
            self.multi_modal_projector = MergingProjector(
                size, self._merge, hidden_size, act, norm_eps, bias=bias, dtype=dtype, device=device
            )
        self._merges = norm_eps is not None
        self.dtype, self._device = dtype, device

    def check(self, shape: tuple[int, ...], num_tokens: int, tiling: TowerInputs | None = None) -> None:
        """Check that pixels ``[1, channels, height, width]`` become that many embeddings; raises InvalidImageError if
        they do not."""
        side, channels = self._side, self.vision_tower.spec.num_channels
        if len(shape) != 4 or tuple(shape[:2]) != (1, channels) or shape[2] % side or shape[3] % side or not all(shape):
            raise InvalidImageError(f"the vision tower takes images of whole squares of {side} pixels, not {shape}")
        embeddings = (shape[2] // side) * (shape[3] // side)
        if embeddings != num_tokens:
            raise InvalidImageError(f"the image makes {embeddings} embeddings and has {num_tokens} placeholders")

    @property
    def example_shape(self) -> tuple[int, ...]:
        """See `VisionEncoder.example_shape`. 64 embeddings."""
        return 1, self.vision_tower.spec.num_channels, 8 * self._side, 8 * self._side

    @property
    def larger_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """See `VisionEncoder.larger_shape`."""
        tiles, channels, height, width = self.example_shape
        return tiles, channels, 2 * height, 2 * width

    def products(self, shape: tuple[int, ...], tiling: TowerInputs | None = None) -> int:
        """See `VisionEncoder.products`."""
        embeddings = (shape[2] // self._side) * (shape[3] // self._side)
        patches = embeddings * self._merge**2
        return self.vision_tower.products(patches) + embeddings * self.multi_modal_projector.products

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        """See `VisionEncoder.in_stages`. The embeddings of each image come row by row."""
        states = yield from self.vision_tower.in_stages([image[0].to(self.dtype) for image in pixels], budget)
        return (yield from self._projected(states, pixels, budget))

    def lay_out(self, shapes: Sequence[tuple[int, ...]]) -> PixtralLayout:
        """See `LaidOutTower.lay_out`."""
        return self.vision_tower.lay_out([(height, width) for *_, height, width in shapes], self._device)

    def encode_laid_out(self, pixels: Sequence[Tensor], layout: PixtralLayout) -> Tensor:
        """See `LaidOutTower.encode_laid_out`."""
        return run_stages(self._laid_out(pixels, layout, StageBudget()))

    def _laid_out(self, pixels: Sequence[Tensor], layout: PixtralLayout, budget: StageBudget) -> Stages[Tensor]:
        images = [image[0].to(self.dtype) for image in pixels]
        states = yield from self.vision_tower.laid_out(images, layout, budget)
        return torch.cat((yield from self._projected(states, pixels, budget)))

    def _projected(
        self, states: Sequence[Tensor], pixels: Sequence[Tensor], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        """The states of images' patches to their embeddings."""
        projector, merge = self.multi_modal_projector, self._merge
        images = []
        for x, image in zip(states, pixels, strict=True):
            if self._merges:
                down, across = (edge // self._side for edge in image.shape[2:])
                squares = x.view(down, merge, across, merge, -1).transpose(1, 2)
                x = squares.reshape(down * across, merge**2, -1)
            images.append((yield from by_rows(projector, projector.products, budget, x)))
        return images

    @property
    def _side(self) -> int:
        """Pixels along each side of what becomes an embedding."""
        return self.vision_tower.spec.patch_size * self._merge
