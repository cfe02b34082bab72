"""Vision of LLaVA (https://arxiv.org/abs/2304.08485, https://arxiv.org/abs/2310.03744) and LLaVA-NeXT
(https://arxiv.org/abs/2407.07895).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from vlmserve.errors import InvalidImageError, UnsupportedModelError
from vlmserve.families.llava import VISION
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import Linear, empty_parameter
from vlmserve.layers.stages import StageBudget, Stages, by_rows
from vlmserve.models.vision.clip import ClipSpec, ClipTower
from vlmserve.models.vision.staged import TileVision
from vlmserve.types import Tiling, TowerInputs


class Projector(nn.Module):
    """inner: size between the linear layers; None: `size`."""

    def __init__(
        self, in_size: int, size: int, act: str, *, bias: bool, inner: int | None = None, **factory: Unpack[Factory]
    ) -> None:
        super().__init__()
        inner = inner or size
        self.linear_1 = Linear(in_size, inner, bias=bias, **factory, act=act)
        self.linear_2 = Linear(inner, size, bias=bias, **factory)

    @property
    def products(self) -> int:
        return self.linear_1.products + self.linear_2.products

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear_2(self.linear_1(x))
        return output


class LlavaVision(TileVision):
    """Tower and projector of a LLaVA config. Module names match checkpoints."""

    several = True

    def __init__(self, config: Mapping[str, Any], hidden_size: int, **factory: Unpack[Factory]) -> None:
        super().__init__(**factory)
        strategy = config.get("vision_feature_select_strategy", "default")
        if strategy not in ("default", "full"):
            raise UnsupportedModelError(f"vision_feature_select_strategy {strategy!r} is not supported")
        chosen = config.get("vision_feature_layer", -2)
        layers = [chosen] if isinstance(chosen, int) else list(chosen)
        spec = ClipSpec.from_config(config.get("vision_config") or VISION)
        size, act = spec.hidden_size * len(layers), config.get("projector_hidden_act", "gelu")
        bias = config.get("multimodal_projector_bias", True)
        self.vision_tower = ClipTower(spec, layers, **factory)
        self.multi_modal_projector = Projector(size, hidden_size, act, bias=bias, **factory)
        self.skipped_tokens = 1 if strategy == "default" else 0
        self.tile, self.tile_embeddings = spec.tile, spec.num_patches + 1 - self.skipped_tokens
        projection = self.tile_embeddings * self.multi_modal_projector.products
        self.tile_products = self.vision_tower.products(spec.num_patches) + projection

    def tiles_in_stages(self, tiles: Tensor, budget: StageBudget) -> Stages[Tensor]:
        features = yield from self.vision_tower.in_stages(tiles, budget)
        rows = features[:, self.skipped_tokens :].flatten(0, 1)
        embeddings = yield from by_rows(self.multi_modal_projector, self.multi_modal_projector.products, budget, rows)
        return embeddings.view(-1, self.tile_embeddings, embeddings.shape[-1])


class Newline(nn.Module):
    def __init__(self, size: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.weight = empty_parameter(size, **factory)


class LlavaNextVision(LlavaVision):
    """LLaVA-NeXT: embeddings of the downscaled image, then of the joined tiles without padding.

    A newline embedding ends each row of tiles. An image of one tile has one newline. Raises UnsupportedModelError like
    `LlavaVision`, and for features whose tiles cannot be joined.
    """

    def __init__(self, config: Mapping[str, Any], hidden_size: int, **factory: Unpack[Factory]) -> None:
        super().__init__(config, hidden_size, **factory)
        if self.skipped_tokens == 0:
            raise UnsupportedModelError(
                "vision_feature_select_strategy 'full' keeps a class token in each tile, which does not fit into rows; "
                "LLaVA-NeXT is supported with 'default'"
            )
        self.image_newline = Newline(hidden_size, **factory)
        spec = self.vision_tower.spec
        self._side = spec.image_size // spec.patch_size

    def arranged(self, images: list[Tensor], tilings: Sequence[TowerInputs | None]) -> list[Tensor]:
        return [self._arrange(*image) for image in zip(images, tilings, strict=True)]

    def _arrange(self, tiles: Tensor, tiling: TowerInputs | None) -> Tensor:
        if tiling is None:
            return torch.cat((tiles[0], self.image_newline.weight[None]))
        assert isinstance(tiling, Tiling), "`check` lets nothing else pass"
        side, size = self._side, tiles.shape[-1]
        down, across = tiling.rows * side, tiling.columns * side
        whole = tiles[1:].view(tiling.rows, tiling.columns, side, side, size).transpose(1, 2)
        whole = whole.reshape(down, across, size)
        top, left = (down - tiling.height) // 2, (across - tiling.width) // 2
        covered = whole[top : top + tiling.height, left : left + tiling.width]
        newlines = self.image_newline.weight.expand(tiling.height, 1, size)
        return torch.cat((tiles[0], torch.cat((covered, newlines), 1).flatten(0, 1)))

    def embeddings(self, shape: tuple[int, ...], tiling: TowerInputs | None = None) -> int:
        super().embeddings(shape)
        tiles = shape[0]
        if tiling is None and tiles == 1:
            return self._side**2 + 1
        if not isinstance(tiling, Tiling) or tiles != 1 + tiling.rows * tiling.columns:
            raise InvalidImageError(f"the image's {tiles} tiles do not form rows and columns: {tiling}")
        if not 0 <= tiling.height <= tiling.rows * self._side or not 0 <= tiling.width <= tiling.columns * self._side:
            raise InvalidImageError(f"the image covers more than its tiles: {tiling}")
        return self._side**2 + tiling.height * (tiling.width + 1)
