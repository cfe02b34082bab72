"""Vision of Granite Docling: SigLIP on tiles, a connector, and features of tower layers (DeepStack,
https://arxiv.org/abs/2406.04334). Module names match checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmserve.errors import ModelLoadError
from vlmserve.families.granite_docling import Scales, deepstack_layers
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import Linear
from vlmserve.layers.norm import LayerNorm
from vlmserve.layers.residual import ResidualStream
from vlmserve.layers.stages import StageBudget, Stages, by_rows
from vlmserve.models.vision.clip import ClipLayer, ClipSpec, EncoderTower
from vlmserve.models.vision.idefics3 import TILES_AT_ONCE, merged_squares
from vlmserve.models.vision.siglip import SIGLIP_DEFAULTS, SiglipEmbeddings
from vlmserve.models.vision.staged import FixedSizeVision, with_following
from vlmserve.types import TowerInputs

_DEFAULTS: Mapping[str, Any] = {**SIGLIP_DEFAULTS, "image_size": 512}
_EPS = 1e-5
"""Of the connector's norms."""


class DoclingTower(EncoderTower):
    def __init__(self, spec: ClipSpec, wanted: Sequence[int], **factory: Unpack[Factory]) -> None:
        """wanted: layers whose outputs are features, from 0."""
        layers = [ClipLayer(spec, **factory) for _ in range(spec.num_layers)]
        embeddings = SiglipEmbeddings(spec, stretched=False, **factory)
        super().__init__(spec, embeddings, layers, class_tokens=0, last_norm=True, **factory)
        self._wanted = frozenset(wanted)

    def in_stages(self, pixels: Tensor, budget: StageBudget) -> Stages[Tensor]:
        """Return the normed states and the wanted layers' outputs, ``[tiles, patches, states * hidden_size]``."""
        x = yield from by_rows(self._embedded, self.spec.num_patches * self._patch_products, budget, pixels)
        states: list[Tensor] = []
        stream = ResidualStream(x.flatten(0, 1))
        for index, (layer, following) in enumerate(with_following(self._layers)):
            stream = yield from layer.in_stages(stream, len(x), budget, following)
            if index in self._wanted:
                states.append(stream.rows.view_as(x))
        assert self.post_layernorm is not None
        return torch.cat((self.post_layernorm(stream.rows.view_as(x)), *states), -1)


class DeepStackMerger(nn.Module):
    def __init__(self, size: int, output_size: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.layer_norm = LayerNorm(size, _EPS, **factory)
        self.linear_1 = Linear(size, output_size, bias=True, act="gelu", **factory)
        self.linear_2 = Linear(output_size, output_size, bias=True, **factory)
        self.products = self.linear_1.products + self.linear_2.products

    def forward(self, squares: Tensor) -> Tensor:
        output: Tensor = self.linear_2(self.linear_1(self.layer_norm(squares)))
        return output


class ConnectorPath(nn.Module):
    def __init__(self, size: int, count: int, output_size: int, **factory: Unpack[Factory]) -> None:
        """size: of a square. count: of features."""
        super().__init__()
        self.projection = Linear(size, output_size, bias=False, **factory)
        self.deepstack_mergers = nn.ModuleList(DeepStackMerger(size, output_size, **factory) for _ in range(count))


class DoclingConnector(nn.Module):
    """States to image embeddings and features for the decoder's first layers, ``[tiles, squares, image_width]``."""

    def __init__(
        self, spec: ClipSpec, count: int, merge: int, output_size: int, scales: Scales, **factory: Unpack[Factory]
    ) -> None:
        super().__init__()
        self.ln_in = LayerNorm(spec.hidden_size, _EPS, **factory)
        self.coarse = ConnectorPath(spec.hidden_size * merge**2, count, output_size, **factory)
        self.ln_mid = LayerNorm(output_size, _EPS, **factory)
        self.mlp_fc2 = Linear(output_size, output_size, bias=False, **factory)
        self.ln_out = LayerNorm(output_size, _EPS, **factory)
        self._size, self._merge, self._scales = spec.hidden_size, merge, scales
        self._positions = _positions(spec.image_size // spec.patch_size // merge, output_size)
        mergers = sum(merger.products for merger in self.coarse.deepstack_mergers)  # type: ignore[misc]
        self.products: int = self.coarse.projection.products + self.mlp_fc2.products + mergers
        """MACs for each square."""

    def forward(self, states: Tensor) -> Tensor:
        last, *others = (state.contiguous() for state in torch.split(states, self._size, -1))
        projected = self.coarse.projection(merged_squares(self.ln_in(last), self._merge))
        placed = projected + self._positions.to(projected.device, projected.dtype)
        embeddings = self.ln_out(self.mlp_fc2(F.gelu(self.ln_mid(placed)))) * self._scales.embeddings
        features = [
            merger(merged_squares(state, self._merge)) * self._scales.features
            for merger, state in zip(self.coarse.deepstack_mergers, others, strict=True)
        ]
        return torch.cat((embeddings, *features), -1)


def _positions(side: int, size: int) -> Tensor:
    """Sines and cosines of columns, then of rows, ``[side^2, size]``, row by row."""
    frequencies = 10000.0 ** -(torch.arange(size // 4, device="cpu").double() / (size // 4))
    angles = torch.arange(side, device="cpu").double()[:, None] * frequencies
    waves = torch.cat((angles.sin(), angles.cos()), 1)
    return torch.cat((waves.repeat(side, 1), waves.repeat_interleave(side, 0)), 1).float()


class GraniteDoclingVision(FixedSizeVision):
    several = True

    def __init__(self, config: Mapping[str, Any], hidden_size: int, **factory: Unpack[Factory]) -> None:
        super().__init__(**factory)
        vision = config.get("vision_config") or {}
        spec = ClipSpec.from_config(vision, ("granite_docling_vision",), _DEFAULTS)
        layers, merge = deepstack_layers(vision), int(vision.get("scale_factor", 4))
        side = spec.image_size // spec.patch_size
        if side % merge or hidden_size % 4 or not all(0 <= layer < spec.num_layers for layer in layers):
            raise ModelLoadError(
                f"vision_config: scale_factor {merge} must divide {side} patches, and deepstack_visual_indexes "
                f"{list(layers)} must lie within {spec.num_layers} layers"
            )
        self.tile = spec.tile
        self.vision_model = DoclingTower(spec, layers, **factory)
        self.connector = DoclingConnector(spec, len(layers), merge, hidden_size, Scales.of(config), **factory)
        self.tile_embeddings = (side // merge) ** 2
        connecting = self.tile_embeddings * self.connector.products
        self.tile_products = self.vision_model.products(side**2) + connecting

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        images = []
        for image in pixels:
            embeddings = []
            for tiles in torch.split(image.to(self.dtype), TILES_AT_ONCE):
                states = yield from self.vision_model.in_stages(tiles, budget)
                products = self.connector.products * self.tile_embeddings
                embeddings.append((yield from by_rows(self.connector, products, budget, states)))
            images.append(torch.cat(embeddings).flatten(0, 1))
        return images
