"""The vision transformers of Qwen2-VL and similar towers, for images of any size.

Qwen2-VL: https://arxiv.org/abs/2409.12191, Qwen2.5-VL: https://arxiv.org/abs/2502.13923, Qwen3-VL:
https://arxiv.org/abs/2511.21631, PaddleOCR-VL: https://arxiv.org/abs/2510.14528, GLM-4.1V to 4.6V, and GLM-OCR.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Unpack, cast

import torch
from torch import Tensor, nn

from vlmserve.families.registry import vision_config
from vlmserve.kernels.operations import Operations
from vlmserve.kernels.ranges import Ranges
from vlmserve.kernels.transfers import to_device
from vlmserve.layers.encoder_attention import EncoderAttention
from vlmserve.layers.layer import Factory, Layer
from vlmserve.layers.linear import Linear, MergedLinear, empty_parameter
from vlmserve.layers.norm import RMSNorm
from vlmserve.layers.residual import ResidualStream
from vlmserve.layers.stages import StageBudget, Stages, by_rows
from vlmserve.models.blocks.mlp import MLP
from vlmserve.models.vision.grid_convolution import GridConvolution
from vlmserve.models.vision.mergers import AdaptingMerger, ConvolvingMerger, PatchMerger, ProjectingMerger, tower_norm
from vlmserve.models.vision.qwen_spec import QwenVisionSpec
from vlmserve.models.vision.rotation import patch_angles, rotated
from vlmserve.models.vision.staged import LayerParts, SquaresVision, StagedLayer, with_following
from vlmserve.types import TowerInputs


@dataclass(frozen=True, slots=True)
class Layout:
    """The order of an image's patches in the tower; merged patches are adjacent."""

    cos: Tensor
    sin: Tensor
    windows: Ranges
    frames: Ranges
    order: Tensor
    """int64 ``[patches]``, index of each patch in `QwenVisionTower._patches`."""
    back: Tensor
    """int64 ``[embeddings]``, index of each merged patch, in row order, in the order of the windows."""
    positions: Tensor | None
    """Learned embeddings of a frame's patches in this order, ``[patches of a frame, hidden_size]``."""

    @classmethod
    def join(cls, layouts: Sequence[Layout]) -> Layout:
        if len(layouts) == 1:
            return layouts[0]
        patches = list(itertools.accumulate((len(layout.order) for layout in layouts), initial=0))
        embeddings = list(itertools.accumulate((len(layout.back) for layout in layouts), initial=0))
        return cls(
            cos=torch.cat([layout.cos for layout in layouts]),
            sin=torch.cat([layout.sin for layout in layouts]),
            windows=Ranges.join([layout.windows for layout in layouts]),
            frames=Ranges.join([layout.frames for layout in layouts]),
            order=torch.cat([layout.order + first for layout, first in zip(layouts, patches, strict=False)]),
            back=torch.cat([layout.back + first for layout, first in zip(layouts, embeddings, strict=False)]),
            positions=None,
        )


class Layouts(NamedTuple):
    """grids: frames, rows and columns of patches. joined: all images concatenated."""

    grids: list[tuple[int, int, int]]
    of_images: list[Layout]
    joined: Layout


Merger = PatchMerger | ConvolvingMerger | ProjectingMerger | AdaptingMerger
KEPT_PATCHES = 2**15
"""Maximum patches whose layouts are cached by grid, besides the last image."""


class PatchEmbedding(Linear):
    """``[patches, channels * frames * patch * patch]`` to ``[patches, hidden_size]``; a convolution in checkpoints."""

    def __init__(self, spec: QwenVisionSpec, **factory: Unpack[Factory]) -> None:
        depth = () if spec.flat_patches else (spec.frames,)
        shape = (spec.num_channels, *depth, spec.patch_size, spec.patch_size)
        super().__init__(math.prod(shape), spec.hidden_size, bias=spec.patch_bias, **factory)
        if not spec.patch_matrix:
            self.weight = empty_parameter(spec.hidden_size, *shape, **factory)


class PositionGrid(nn.Module):
    """Learned position embeddings in a square, resized to each image by bilinear or bicubic interpolation."""

    def __init__(self, spec: QwenVisionSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.weight = empty_parameter(spec.num_positions, spec.hidden_size, **factory)
        self._side = math.isqrt(spec.num_positions)
        self._corners, self._cubic, self._bounded = spec.corners, spec.cubic, spec.positions_first

    def forward(self, rows: Tensor, columns: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return embeddings of patches, ``[patches, hidden_size]``.

        rows, columns: int64 ``[patches]``. shape: rows and columns of the image.
        """
        result = torch.zeros(len(rows), self.weight.shape[1], device=self.weight.device)
        vertical, horizontal = (self._taps(*axis) for axis in zip((rows, columns), shape, strict=True))
        for down, of_row in vertical:
            for across, of_column in horizontal:
                result += self.weight[down * self._side + across].float() * (of_row * of_column)[:, None]
        return result.to(self.weight.dtype)

    def _taps(self, places: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
        """The two or four nearest positions, and their weights."""
        exact = to_device(places, self.weight.device).float()
        if self._corners:
            exact = exact * (self._side - 1) / max(length - 1, 1)
        else:
            exact = (exact + 0.5) * self._side / length - 0.5
        first = exact.floor()
        share = exact - first
        weights = [(0, 1 - share), (1, share)]
        if self._cubic:
            weights = [(step, _cubic((share - step).abs())) for step in range(-1, 3)]
        taps = [((first + step).long(), weight) for step, weight in weights]
        if self._bounded:
            taps = [(place, weight * ((place >= 0) & (place < self._side))) for place, weight in taps]
        return [(place.clamp(0, self._side - 1), weight) for place, weight in taps]


def _cubic(distance: Tensor) -> Tensor:
    """Keys' cubic kernel as in torch, for distances from 0 to 2."""
    near = (1.25 * distance - 2.25) * distance**2 + 1
    far = -0.75 * (((distance - 5) * distance + 8) * distance - 4)
    return torch.where(distance <= 1, near, far)


class VisionAttention(nn.Module):
    """Self-attention within windows or frames, with rotary embeddings by row and column."""

    def __init__(self, spec: QwenVisionSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        size = spec.hidden_size
        parts = dict.fromkeys(spec.projections, 3 * size // len(spec.projections))
        self._shared = 1 if spec.kv_heads is None else spec.num_heads // spec.kv_heads
        if self._shared > 1:
            parts |= dict.fromkeys(spec.projections[1:], size // self._shared)
        self.qkv = MergedLinear(size, parts, bias=spec.bias, **factory)
        self.proj = Linear(size, size, bias=spec.bias, **factory)
        self.attention = EncoderAttention(size, spec.num_heads, dtype=factory["dtype"])
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if spec.head_norms:
            self.q_norm = RMSNorm(spec.head_size, spec.norm_eps, **factory)
            self.k_norm = RMSNorm(spec.head_size, spec.norm_eps, **factory)
        self._num_heads = spec.num_heads

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[patches, hidden_size]`` to rotated queries, keys and values side by side."""
        qkv: Tensor = self._for_all_heads(self.qkv(x))
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys, _ = qkv.view(len(qkv), 3, self._num_heads, -1).unbind(1)
            queries.copy_(self.q_norm(queries))
            keys.copy_(self.k_norm(keys))
        return rotated(self.attention, qkv, cos, sin)

    def _for_all_heads(self, qkv: Tensor) -> Tensor:
        if self._shared == 1:
            return qkv
        heads = qkv.view(len(qkv), -1, self.attention.head_size)
        queries, shared = heads[:, : self._num_heads], heads[:, self._num_heads :]
        return torch.cat((queries, shared.repeat_interleave(self._shared, 1)), 1).flatten(1)


class VisionMLP(MLP, Layer):
    def __init__(self, spec: QwenVisionSpec, **factory: Unpack[Factory]) -> None:
        size, inner, names = spec.hidden_size, spec.intermediate_size, None if spec.gated else ("fc1", "fc2")
        kind: dict[str, Any] = {"gated": spec.gated, "bias": spec.bias, **factory}
        super().__init__(size, inner, spec.activation, names=names, **kind)

    def arrange(self, operations: Operations) -> None:
        """Pad the inner size before the layers are packed: on a GPU, Qwen2.5-VL's 3,420 become 3,456."""
        self.reader.widen_for(self.last, operations)


@dataclass(frozen=True, slots=True)
class Frames(Ranges):
    shapes: list[tuple[int, int]]


class VisionLayer(StagedLayer):
    def __init__(self, spec: QwenVisionSpec, index: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.norm1 = tower_norm(spec, **factory)
        self.norm2 = tower_norm(spec, **factory)
        mixer = GridConvolution if index in spec.convolving else VisionAttention
        self.attn = mixer(spec, **factory)
        self.mlp = VisionMLP(spec, **factory)

    @cached_property
    def parts(self) -> LayerParts:
        return LayerParts(self.norm1, self.attn.qkv, self.attn.attention, self.attn.proj, self.norm2, self.mlp)

    def before_attention(self, normed: Tensor, *angles: Tensor) -> Tensor:
        if isinstance(self.attn, VisionAttention):
            return self.attn.rotated(normed, *angles)
        return super().before_attention(normed)

    def mixing_products(self, length: int) -> int:
        return self.attn.products(length) if isinstance(self.attn, GridConvolution) else super().mixing_products(length)

    def mixed(self, qkv: Tensor, images: int | Ranges, budget: StageBudget) -> Stages[Tensor]:
        if isinstance(self.attn, GridConvolution):
            assert isinstance(images, Frames)
            return (yield from self.attn.in_stages(qkv, images.shapes, budget))
        return (yield from super().mixed(qkv, images, budget))


class QwenVisionTower(SquaresVision):
    """Images of any size, or videos, to embeddings. Module names match checkpoints."""

    has_dynamic_resolution = True

    def __init__(self, spec: QwenVisionSpec, **factory: Unpack[Factory]) -> None:
        super().__init__(**factory)
        self.spec = spec
        self.side, self.channels, self.frames = spec.patch_size * spec.merge, spec.num_channels, spec.frames
        # Matches the name in checkpoints.
        self.patch_embed = nn.ModuleDict({"proj": PatchEmbedding(spec, **factory)})
        self._layers = [VisionLayer(spec, index, **factory) for index in range(spec.num_layers)]
        self.blocks = nn.ModuleList(self._layers)
        self.patch_norm = tower_norm(spec, **factory) if spec.patch_norm else None
        self.merger = _merger(spec, **factory)
        self.layouts: OrderedDict[tuple[int, int, int], Layout] = OrderedDict()
        self.pos_embed = PositionGrid(spec, **factory) if spec.num_positions else None
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(spec, norms_squares=True, **factory) for _ in spec.deepstack
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], hidden_size: int, **factory: Unpack[Factory]) -> QwenVisionTower:
        spec = QwenVisionSpec.from_config(vision_config(config), hidden_size)
        return cls(spec, **factory)

    def products(self, shape: tuple[int, ...], tiling: TowerInputs | None = None) -> int:
        spec = self.spec
        deep, down, across = -(-shape[0] // spec.frames), shape[2] // spec.patch_size, shape[3] // spec.patch_size
        windows = [spec.merge**2 * len(window) for window in self._windows((deep, down, across))]
        layers = sum(
            block.products(*(windows if self._is_windowed(index) else [down * across] * deep))
            for index, block in enumerate(self._layers)
        )
        patches = deep * down * across
        embeddings = patches // spec.merge**2
        mergers = self.merger.products * (1 + len(spec.deepstack))
        return layers + patches * self._projection.products + embeddings * mergers

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        """Compute images or videos together if the device has range kernels, else one by one."""
        together = any(block.attn.attention and block.attn.attention.range_kernels for block in self._layers)
        images: list[Tensor] = []
        for some in [pixels] if together else [[image] for image in pixels]:
            layouts = self._layouts([image.shape for image in some])
            embeddings = yield from self._encode(some, layouts, budget)
            images += torch.split(embeddings, [len(of_image.back) for of_image in layouts.of_images])
        return images

    def _layouts(self, shapes: Sequence[tuple[int, ...]]) -> Layouts:
        size = self.spec.patch_size
        grids = [(-(-frames // self.spec.frames), down // size, across // size) for frames, _, down, across in shapes]
        of_images = [self._layout(grid) for grid in grids]
        return Layouts(grids, of_images, Layout.join(of_images))

    @property
    def _projection(self) -> PatchEmbedding:
        return self.patch_embed["proj"]  # type: ignore[return-value]

    def _is_windowed(self, layer: int) -> bool:
        return self.spec.window is not None and layer not in self.spec.full_layers

    def _encode(self, images: Sequence[Tensor], layouts: Layouts, budget: StageBudget) -> Stages[Tensor]:
        spec, layout = self.spec, layouts.joined
        filled = [self._whole_patches(image.to(self.dtype)) for image in images]
        patches = [self._patches(*image) for image in zip(filled, layouts.grids, strict=True)]
        ordered = torch.cat(patches)[layout.order]
        x = yield from by_rows(self._projection, self._projection.products, budget, ordered)
        if self.pos_embed is not None and spec.positions_first:
            x = _placed(x, layouts.of_images)
        if self.patch_norm is not None:
            x = self.patch_norm(x)
        if self.pos_embed is not None and not spec.positions_first:
            x = _placed(x, layouts.of_images)
        shapes = [(down, across) for deep, down, across in layouts.grids for _ in range(deep)]
        frames = Frames(layout.frames.lengths, layout.frames.blocks, layout.frames.block_rows, shapes)
        of_layers: list[Tensor] = []
        stream = ResidualStream(x)
        for index, (block, following) in enumerate(with_following(self._layers)):
            ranges = layout.windows if self._is_windowed(index) else frames
            stream = yield from block.in_stages(stream, ranges, budget, following, layout.cos, layout.sin)
            if index in spec.deepstack:
                merger = cast(PatchMerger, self.deepstack_merger_list[spec.deepstack.index(index)])
                of_layers.append((yield from self._merged(stream.rows, merger, budget)))
        merged = yield from self._merged(stream.rows, self.merger, budget)
        return torch.cat((merged, *of_layers), 1)[layout.back]

    def _whole_patches(self, pixels: Tensor) -> Tensor:
        missing = -len(pixels) % self.spec.frames
        return torch.cat((pixels, pixels[-1:].expand(missing, -1, -1, -1))) if missing else pixels

    def _merged(self, x: Tensor, merger: Merger, budget: StageBudget) -> Stages[Tensor]:
        return by_rows(merger, merger.products, budget, x.view(-1, self.spec.merge**2, x.shape[-1]))

    def _patches(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """``[patches, channels * frames * patch * patch]``, merged patches adjacent, else row by row."""
        spec = self.spec
        deep, down, across = grid
        merge, size = spec.merge, spec.patch_size
        split = pixels.view(
            deep, spec.frames, spec.num_channels, down // merge, merge, size, across // merge, merge, size
        )
        inner = (1, 2) if spec.frames_first else (2, 1)
        return split.permute(0, 3, 6, 4, 7, *inner, 5, 8).reshape(deep * down * across, -1)

    def _layout(self, grid: tuple[int, int, int]) -> Layout:
        layout = self.layouts.pop(grid, None) or self._new_layout(grid)
        self.layouts[grid] = layout
        while len(self.layouts) > 1 and sum(map(math.prod, self.layouts)) > KEPT_PATCHES:
            self.layouts.popitem(last=False)
        return layout

    def _new_layout(self, grid: tuple[int, int, int]) -> Layout:
        spec, device = self.spec, self.device
        deep, down, across = grid
        unit = spec.merge**2
        windows = self._windows(grid)
        merged = torch.cat(windows)
        order = (merged[:, None] * unit + torch.arange(unit)).flatten()
        of_frame = self._rows_and_columns(down, across)
        axes = of_frame[::-1] if spec.columns_first else of_frame
        row, column = (axis.repeat(deep)[order] for axis in axes)
        frequencies = 1.0 / spec.theta ** (torch.arange(0, spec.head_size // 2, 2).float() / (spec.head_size // 2))
        cos, sin = patch_angles(row, column, frequencies, frequencies, device)
        positions = None if self.pos_embed is None else self.pos_embed(*of_frame, (down, across))
        return Layout(
            cos=cos,
            sin=sin,
            windows=Ranges.of([unit * len(window) for window in windows], device),
            frames=Ranges.of([down * across] * deep, device),
            order=to_device(order, device),
            back=to_device(merged.argsort(), device),
            positions=None if positions is None else positions[to_device(order[: down * across], device)],
        )

    def _windows(self, grid: tuple[int, int, int]) -> list[Tensor]:
        """The merged patches of each window, by frame, window and row."""
        spec = self.spec
        deep, rows, columns = grid[0], grid[1] // spec.merge, grid[2] // spec.merge
        places = torch.arange(deep * rows * columns).view(deep, rows, columns)
        side = max(rows, columns, 1) if spec.window is None else spec.window // spec.merge // spec.patch_size
        return [window.flatten() for frame in places for band in frame.split(side) for window in band.split(side, 1)]

    def _rows_and_columns(self, down: int, across: int) -> tuple[Tensor, Tensor]:
        merge = self.spec.merge
        row, column = torch.meshgrid(torch.arange(down), torch.arange(across), indexing="ij")
        shape = (down // merge, merge, across // merge, merge)
        return row.view(shape).transpose(1, 2).flatten(), column.view(shape).transpose(1, 2).flatten()


def _merger(spec: QwenVisionSpec, **factory: Unpack[Factory]) -> Merger:
    if spec.adapter is not None:
        return AdaptingMerger(spec, **factory)
    if spec.convolved is not None:
        return ConvolvingMerger(spec, **factory)
    return (PatchMerger if spec.projector is None else ProjectingMerger)(spec, **factory)


def _placed(x: Tensor, layouts: Sequence[Layout]) -> Tensor:
    images = []
    for rows, layout in zip(torch.split(x, [len(layout.order) for layout in layouts]), layouts, strict=True):
        assert layout.positions is not None
        images.append((rows.view(-1, *layout.positions.shape) + layout.positions).flatten(0, 1))
    return images[0] if len(images) == 1 else torch.cat(images)
