"""Gemma 4 12B's vision: a linear layer over squares of pixels, without a tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import Linear, empty_parameter
from vlmserve.layers.norm import LayerNorm
from vlmserve.layers.stages import StageBudget, Stages, by_rows
from vlmserve.models.vision.gemma4 import CHANNELS, Gemma4Projector
from vlmserve.models.vision.staged import SquaresVision
from vlmserve.types import TowerInputs

_DEFAULTS: Mapping[str, Any] = {
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "mm_embed_dim": 3840,
    "mm_posemb_size": 1120,
    "rms_norm_eps": 1e-6,
}
_EPS = 1e-5


class SquareEmbedder(nn.Module):
    def __init__(self, side: int, size: int, positions: int, **factory: Unpack[Factory]) -> None:
        """side: pixels along each side of a square. positions: maximum squares along each side of an image."""
        super().__init__()
        self._side, inputs = side, CHANNELS * side**2
        self.patch_ln1 = LayerNorm(inputs, _EPS, **factory)
        self.patch_dense = Linear(inputs, size, bias=True, **factory)
        self.patch_ln2, self.pos_norm = (LayerNorm(size, _EPS, **factory) for _ in range(2))
        self.pos_embedding = empty_parameter(positions, 2, size, **factory)

    def forward(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Rows of squares ``[rows, channels, side, width]`` to ``[rows, squares of each, size]``.

        numbers: of the rows in the image.
        """
        down, channels, side, _ = rows.shape
        squares = rows.view(down, channels, side, -1, side).permute(0, 3, 2, 4, 1).flatten(2)
        states: Tensor = self.patch_ln2(self.patch_dense(self.patch_ln1(squares)))
        by_column, by_row = self.pos_embedding.data.unbind(1)
        states = states + (by_column[: squares.shape[1]] + by_row[numbers][:, None])
        output: Tensor = self.pos_norm(states)
        return output


class Gemma4UnifiedVision(SquaresVision):
    """Embedder and projector of a config. Module names match checkpoints."""

    def __init__(self, config: Mapping[str, Any], hidden_size: int, **factory: Unpack[Factory]) -> None:
        super().__init__(**factory)
        values = {**_DEFAULTS, **(config.get("vision_config") or {})}
        if (kind := values.get("model_type", "gemma4_unified_vision")) != "gemma4_unified_vision":
            raise UnsupportedModelError(f"the vision {kind!r} is not supported; supported: gemma4_unified_vision")
        size, positions = values["mm_embed_dim"], values["mm_posemb_size"]
        if (width := values.get("output_proj_dims", size)) != size:
            raise ModelLoadError(f"config.json: mm_embed_dim {size} does not fit output_proj_dims {width}")
        self.side = values["patch_size"] * values["pooling_kernel_size"]
        self.most = positions * self.side
        kinds: dict[str, Any] = {**factory}
        self.vision_tower = SquareEmbedder(self.side, size, positions, **kinds)
        self.multi_modal_projector = Gemma4Projector(size, hidden_size, values["rms_norm_eps"], **kinds)

    def products(self, shape: tuple[int, ...], tiling: TowerInputs | None = None) -> int:
        return self.embeddings(shape) * self._products

    @property
    def _products(self) -> int:
        return self.vision_tower.patch_dense.products + self.multi_modal_projector.embedding_projection.products

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        images = []
        for image in pixels:
            down, across = image.shape[2] // self.side, image.shape[3] // self.side
            rows = image[0].to(self.dtype).reshape(CHANNELS, down, self.side, -1).transpose(0, 1).contiguous()
            numbers = torch.arange(down, device=image.device)
            embedded = yield from by_rows(self._embed, across * self._products, budget, rows, numbers)
            images.append(embedded.flatten(0, 1))
        return images

    def _embed(self, rows: Tensor, numbers: Tensor) -> Tensor:
        output: Tensor = self.multi_modal_projector(self.vision_tower(rows, numbers))
        return output
