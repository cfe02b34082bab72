"""Vision of MiniCPM-V 4.6 and 4.7: SigLIP over pieces of several sizes.

It merges 2 x 2 patches after one of its layers, and 2 x 2 again at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from vlmserve.errors import InvalidImageError, ModelLoadError, UnsupportedModelError
from vlmserve.kernels.ranges import Ranges
from vlmserve.kernels.transfers import to_device
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import Embedding, Linear
from vlmserve.layers.norm import LayerNorm
from vlmserve.layers.residual import ResidualStream
from vlmserve.layers.stages import StageBudget, Stages, by_rows
from vlmserve.models.vision.clip import ClipAttention, ClipLayer, ClipSpec, PatchEmbedding
from vlmserve.models.vision.siglip import SIGLIP_DEFAULTS, patch_positions
from vlmserve.models.vision.staged import SquaresVision, with_following
from vlmserve.types import Pieces, TowerInputs

KINDS = ("minicpmv4_6_vision", "minicpmv4_7_vision")
_MERGER_EPS = 1e-6

Grids = Sequence[tuple[int, int]]


class PieceEmbeddings(nn.Module):
    def __init__(self, spec: ClipSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.patch_embedding = PatchEmbedding(spec, bias=True, **factory)
        self.position_embedding = Embedding(spec.num_patches, spec.hidden_size, **factory)

    def forward(self, pixels: Tensor, places: Tensor) -> Tensor:
        """``[1, channels, height, width]`` and places ``[1, patches]`` to ``[1, patches, hidden_size]``."""
        output: Tensor = self.patch_embedding(pixels) + self.position_embedding.weight[places]
        return output


class WindowMerger(nn.Module):
    """``[windows, 4, hidden_size]`` to ``[windows, hidden_size]``. Module names match checkpoints.

    Attention within each window; then an MLP over all four patches adds to their mean.
    """

    def __init__(self, spec: ClipSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        size, inner, eps = spec.hidden_size, 4 * spec.intermediate_size, spec.norm_eps
        self.self_attn = ClipAttention(spec, **factory)
        self.layer_norm1 = LayerNorm(size, eps, **factory)
        self.pre_norm = LayerNorm(4 * size, eps, **factory)
        self.linear_1 = Linear(4 * size, inner, bias=True, act="gelu_pytorch_tanh", **factory)
        self.linear_2 = Linear(inner, size, bias=True, **factory)

    @property
    def products(self) -> int:
        attn = self.self_attn
        patches = 4 * (attn.qkv_proj.products + attn.out_proj.products)
        return patches + attn.attention.products(4) + self.linear_1.products + self.linear_2.products

    def forward(self, x: Tensor) -> Tensor:
        attn = self.self_attn
        x = x + attn.out_proj(attn.attention(attn.qkv_proj(self.layer_norm1(x))))
        merged: Tensor = self.linear_2(self.linear_1(self.pre_norm(x.flatten(1)))) + x.mean(1)
        return merged


class LastMerger(nn.Module):
    """``[squares, 4, hidden_size]`` to ``[squares, output_size]``. Module names match checkpoints."""

    def __init__(self, size: int, output_size: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.pre_norm = LayerNorm(4 * size, _MERGER_EPS, **factory)
        self.linear_1 = Linear(4 * size, 4 * size, bias=True, act="gelu", **factory)
        self.linear_2 = Linear(4 * size, output_size, bias=True, **factory)

    @property
    def products(self) -> int:
        return self.linear_1.products + self.linear_2.products

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear_2(self.linear_1(self.pre_norm(x.flatten(1))))
        return output


class PieceTower(nn.Module):
    """Pieces to states of their patches. Module names match checkpoints."""

    def __init__(self, spec: ClipSpec, merging_layer: int | None, **factory: Unpack[Factory]) -> None:
        """merging_layer: the layer before `vit_merger`; None: no merging."""
        super().__init__()
        self.spec = spec
        self.merging_layer = merging_layer
        self.device = factory["device"]
        self.embeddings = PieceEmbeddings(spec, **factory)
        layers = [ClipLayer(spec, **factory) for _ in range(spec.num_layers)]
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.post_layernorm = LayerNorm(spec.hidden_size, spec.norm_eps, **factory)
        self.vit_merger = WindowMerger(spec, **factory)

    @property
    def runs(self) -> list[list[ClipLayer]]:
        layers: list[ClipLayer] = list(self.encoder["layers"].children())  # type: ignore[arg-type]
        count = len(layers) if self.merging_layer is None else self.merging_layer + 1
        return [layers[:count], layers[count:]]

    def products(self, grids: Grids) -> int:
        lengths = [rows * columns for rows, columns in grids]
        before, after = self.runs
        total = sum(lengths) * self.embeddings.patch_embedding.products
        total += sum(layer.products(*lengths) for layer in before)
        if self.merging_layer is None:
            return total
        merged = [length // 4 for length in lengths]
        return total + sum(merged) * self.vit_merger.products + sum(layer.products(*merged) for layer in after)

    def in_stages(self, images: Sequence[Tensor], grids: Sequence[Grids], budget: StageBudget) -> Stages[Tensor]:
        """Images ``[1, channels, height, width]`` to ``[patches, hidden_size]``, piece by piece, row by row."""
        embedded = []
        for image, own in zip(images, grids, strict=True):
            places = to_device(self._places(own), image.device)[None]
            products = places.numel() * self.embeddings.patch_embedding.products
            embedded.append((yield from by_rows(self.embeddings, products, budget, image, places)))
        pieces = [grid for own in grids for grid in own]
        before, after = self.runs
        x = yield from self._through(before, torch.cat(embedded, 1)[0], pieces, budget)
        if self.merging_layer is not None:
            merger = self.vit_merger
            x = yield from by_rows(merger, merger.products, budget, squares(x, pieces))
            x = yield from self._through(after, x, halved(pieces), budget)
        output: Tensor = self.post_layernorm(x)
        return output

    def _through(self, layers: Sequence[ClipLayer], x: Tensor, grids: Grids, budget: StageBudget) -> Stages[Tensor]:
        ranges = Ranges.of([rows * columns for rows, columns in grids], self.device)
        stream = ResidualStream(x)
        for layer, following in with_following(layers):
            stream = yield from layer.in_stages(stream, ranges, budget, following)
        return stream.rows

    def _places(self, grids: Grids) -> Tensor:
        side = self.spec.image_size // self.spec.patch_size
        return torch.cat([patch_positions(rows, columns, side, exact=True) for rows, columns in grids])


class MiniCPMVision(SquaresVision):
    """Tower and merger of a config. Module names match checkpoints."""

    def __init__(self, config: Mapping[str, Any], hidden_size: int, **factory: Unpack[Factory]) -> None:
        super().__init__(**factory)
        vision = config.get("vision_config") or {}
        spec = ClipSpec.from_config(vision, KINDS, SIGLIP_DEFAULTS)
        _check_mergers(config, vision)
        merges = config.get("downsample_mode", "16x") != "4x"
        layer = config.get("insert_layer_id", 6)
        if merges and not 0 <= layer < spec.num_layers:
            raise ModelLoadError(
                f"config.json: insert_layer_id is {layer}, but the vision tower has {spec.num_layers} layers"
            )
        self.vision_tower = PieceTower(spec, layer if merges else None, **factory)
        last = LastMerger(spec.hidden_size, hidden_size, **factory)
        self.merger = nn.ModuleDict({"mlp": nn.ModuleList([last])})
        self._merge = 4 if merges else 2
        self.side, self.channels = self._merge * spec.patch_size, spec.num_channels

    def embeddings(self, shape: tuple[int, ...], tiling: TowerInputs | None = None) -> int:
        """tiling: the pieces of a sliced image. None: a whole image."""
        spec, merge = self.vision_tower.spec, self._merge
        if len(shape) != 4 or shape[:2] != (1, spec.num_channels):
            raise InvalidImageError(f"the vision tower takes one image of {spec.num_channels} channels, not {shape}")
        grids = self._grids(shape, tiling)
        patches = sum(rows * columns for rows, columns in grids)
        whole = all(rows and columns and not rows % merge and not columns % merge for rows, columns in grids)
        if not whole or shape[2] * shape[3] != patches * spec.patch_size**2:
            raise InvalidImageError(
                f"the vision tower takes pieces of whole squares of {merge * spec.patch_size} pixels, not {shape}"
            )
        return patches // merge**2

    def products(self, shape: tuple[int, ...], tiling: TowerInputs | None = None) -> int:
        grids = self._grids(shape, tiling)
        embeddings = sum(rows * columns for rows, columns in grids) // self._merge**2
        return self.vision_tower.products(grids) + embeddings * self._last.products

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        first = self.vision_tower.runs[0][0]
        together = first.self_attn.attention.range_kernels is not None
        images = [image.to(self.dtype) for image in pixels]
        padded = [*tilings, *[None] * (len(images) - len(tilings))]
        grids = [self._grids(tuple(image.shape), tiling) for image, tiling in zip(images, padded, strict=True)]
        embeddings: list[Tensor] = []
        for some in [slice(None)] if together else [slice(index, index + 1) for index in range(len(images))]:
            x = yield from self.vision_tower.in_stages(images[some], grids[some], budget)
            merged = [grid for own in grids[some] for grid in (halved(own) if self._merge == 4 else own)]
            rows = yield from by_rows(self._last, self._last.products, budget, squares(x, merged))
            counts = [sum(down * across for down, across in own) // self._merge**2 for own in grids[some]]
            embeddings += torch.split(rows, counts)
        return embeddings

    @property
    def _last(self) -> LastMerger:
        [last] = self.merger["mlp"].children()
        return last  # type: ignore[return-value]

    def _grids(self, shape: tuple[int, ...], tiling: TowerInputs | None) -> Grids:
        if isinstance(tiling, Pieces):
            return tiling.grids
        patch = self.vision_tower.spec.patch_size
        return [(shape[2] // patch, shape[3] // patch)]


def squares(x: Tensor, grids: Grids) -> Tensor:
    """2 x 2 neighbors, piece by piece, row by row: ``[patches, size]`` to ``[squares, 4, size]``."""
    parts = torch.split(x, [rows * columns for rows, columns in grids])
    return torch.cat(
        [
            part.view(rows // 2, 2, columns // 2, 2, -1).transpose(1, 2).reshape(-1, 4, part.shape[1])
            for part, (rows, columns) in zip(parts, grids, strict=True)
        ]
    )


def halved(grids: Grids) -> Grids:
    return [(rows // 2, columns // 2) for rows, columns in grids]


def _check_mergers(config: Mapping[str, Any], vision: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError for squares other than 2 x 2, and for more merging rounds."""
    found = {
        "merge_kernel_size": list(config.get("merge_kernel_size", (2, 2))),
        "window_kernel_size": list(vision.get("window_kernel_size", (2, 2))),
        "merger_times": config.get("merger_times", 1),
    }
    supported = {"merge_kernel_size": [2, 2], "window_kernel_size": [2, 2], "merger_times": 1}
    for name, value in found.items():
        if value != supported[name]:
            raise UnsupportedModelError(f"MiniCPM-V with {name} {value} is not supported, only with {supported[name]}")
