"""The vision transformers of Qwen2-VL (https://arxiv.org/abs/2409.12191), Qwen2.5-VL
(https://arxiv.org/abs/2502.13923) and Qwen3-VL (https://arxiv.org/abs/2511.21631): images of any size, patches that
are rotated by row and column, merged four to one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from vlmserve.errors import InvalidImageError, UnsupportedModelError
from vlmserve.layers.encoder_attention import EncoderAttention
from vlmserve.layers.linear import GatedLinear, Linear, empty_parameter
from vlmserve.layers.norm import LayerNorm, RMSNorm
from vlmserve.layers.stages import StageBudget, Stages, by_rows
from vlmserve.models.vision.rotation import patch_angles, rotate_heads
from vlmserve.models.vision.staged import StagedVision
from vlmserve.types import TowerInputs

ROPE_THETA = 10000.0
NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVisionSpec:
    """The shape of a tower. patch_size: pixels; merge: patches along each side that become one embedding; frames: that
    a patch is deep. window: pixels along each side within which patches attend to each other; None: all of the image.
    full_layers: those without windows all the same. gated: an MLP with gates and norms without means, only in 2.5.
    num_positions: of a square of learned embeddings that is resized to the image; 0: none. patch_bias: whether the
    projection of patches has one. deepstack: the layers whose outputs are merged too, each for one of the decoder's
    first layers (https://arxiv.org/abs/2406.04334).
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_channels: int
    patch_size: int
    merge: int
    frames: int
    output_size: int
    activation: str
    gated: bool
    window: int | None = None
    full_layers: tuple[int, ...] = ()
    num_positions: int = 0
    patch_bias: bool = False
    deepstack: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any], output_size: int) -> QwenVisionSpec:
        """From a ``vision_config``; output_size: of the decoder. Raises UnsupportedModelError for other towers."""
        kind = config.get("model_type", "qwen2_vl")
        common = {
            "num_layers": config.get("depth", 32),
            "num_heads": config.get("num_heads", 16),
            "num_channels": config.get("in_channels", config.get("in_chans", 3)),
            "patch_size": config.get("patch_size", 14),
            "merge": config.get("spatial_merge_size", 2),
            "frames": config.get("temporal_patch_size", 2),
        }
        if kind.startswith("qwen2_5_vl"):
            return cls(
                **common,
                hidden_size=config.get("hidden_size", 3584),
                intermediate_size=config.get("intermediate_size", 3420),
                output_size=config.get("out_hidden_size", output_size),
                activation=config.get("hidden_act", "silu"),
                gated=True,
                window=config.get("window_size", 112),
                full_layers=tuple(config.get("fullatt_block_indexes", (7, 15, 23, 31))),
            )
        if kind.startswith("qwen2_vl"):
            # Here `hidden_size` is the decoder's.
            hidden_size = config.get("embed_dim", 1280)
            return cls(
                **common,
                hidden_size=hidden_size,
                intermediate_size=int(hidden_size * config.get("mlp_ratio", 4)),
                output_size=config.get("hidden_size", output_size),
                activation=config.get("hidden_act", "quick_gelu"),
                gated=False,
            )
        if kind.startswith("qwen3_vl"):
            return cls(
                **{**common, "num_layers": config.get("depth", 27), "patch_size": config.get("patch_size", 16)},
                hidden_size=config.get("hidden_size", 1152),
                intermediate_size=config.get("intermediate_size", 4304),
                output_size=config.get("out_hidden_size", 3584),
                activation=config.get("hidden_act", "gelu_pytorch_tanh"),
                gated=False,
                num_positions=config.get("num_position_embeddings", 2304),
                patch_bias=True,
                deepstack=deepstack_layers(config),
            )
        raise UnsupportedModelError(
            f"vision tower {kind!r} is not supported; supported are qwen2_vl, qwen2_5_vl and qwen3_vl"
        )

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads


def deepstack_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Of Qwen3-VL's ``vision_config``: see `QwenVisionSpec.deepstack`."""
    return tuple(config.get("deepstack_visual_indexes", (8, 16, 24)))


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the patches of an image are, in the order in which a tower keeps them: merged ones side by side.

    cos, sin: float32 ``[patches, 1, head_size / 2]``. windows: how many patches lie in each window, one after the
    other; frames: likewise, in each frame. back: int64 ``[embeddings]``, where each merged patch of the image, row by
    row, is among those of the windows.
    """

    cos: Tensor
    sin: Tensor
    windows: list[int]
    frames: list[int]
    order: Tensor
    back: Tensor


class PatchEmbedding(Linear):
    """``[patches, channels * frames * patch * patch]`` to ``[patches, hidden_size]``; a convolution in checkpoints."""

    def __init__(self, spec: QwenVisionSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        shape = (spec.num_channels, spec.frames, spec.patch_size, spec.patch_size)
        super().__init__(math.prod(shape), spec.hidden_size, bias=spec.patch_bias, dtype=dtype, device=device)
        self.weight = empty_parameter(spec.hidden_size, *shape, dtype=dtype, device=device)


class PositionGrid(nn.Module):
    """Learned embeddings of places in a square, resized to images by bilinear interpolation, corners to corners."""

    def __init__(self, spec: QwenVisionSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_parameter(spec.num_positions, spec.hidden_size, dtype=dtype, device=device)
        self._side = math.isqrt(spec.num_positions)

    def forward(self, rows: Tensor, columns: Tensor, shape: tuple[int, int]) -> Tensor:
        """``[patches, hidden_size]`` of the patches at those rows and columns, int64 ``[patches]``, of an image of
        that many rows and columns."""
        result = torch.zeros(len(rows), self.weight.shape[1], device=self.weight.device)
        vertical, horizontal = (self._taps(*axis) for axis in zip((rows, columns), shape, strict=True))
        for down, of_row in vertical:
            for across, of_column in horizontal:
                result += self.weight[down * self._side + across].float() * (of_row * of_column)[:, None]
        return result.to(self.weight.dtype)

    def _taps(self, places: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
        """The two places in the square that lie around each, and their weights."""
        exact = places.to(self.weight.device).float() * (self._side - 1) / max(length - 1, 1)
        first = exact.floor().long()
        second = (first + 1).clamp(max=self._side - 1)
        return [(first, 1 - (exact - first)), (second, exact - first)]


class VisionAttention(nn.Module):
    """Self-attention within windows or frames, patches rotated by where they are."""

    def __init__(self, spec: QwenVisionSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        size = spec.hidden_size
        self.qkv = Linear(size, 3 * size, bias=True, dtype=dtype, device=device)
        self.proj = Linear(size, size, bias=True, dtype=dtype, device=device)
        self.attention = EncoderAttention(size, spec.num_heads, dtype=dtype)
        self._num_heads = spec.num_heads

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[patches, hidden_size]`` to queries, keys and values side by side."""
        return rotate_heads(self.qkv(x), self._num_heads, cos, sin)

    def attended(self, qkv: Tensor, lengths: list[int], budget: StageBudget) -> Stages[Tensor]:
        """lengths: how many patches see each other, one group behind the other."""
        parts = []
        for length, group in _runs(qkv, lengths):
            groups = group.view(-1, length, group.shape[-1])
            parts.append((yield from self.attention.in_stages(groups, budget)).flatten(0, 1))
        return torch.cat(parts)


def _runs(rows: Tensor, lengths: list[int]) -> list[tuple[int, Tensor]]:
    """Rows of neighbouring groups that are equally long, together."""
    runs: list[tuple[int, Tensor]] = []
    start = 0
    while lengths:
        length = lengths[0]
        count = next((i for i, other in enumerate(lengths) if other != length), len(lengths))
        runs.append((length, rows[start : start + count * length]))
        start += count * length
        lengths = lengths[count:]
    return runs


class VisionMLP(nn.Module):
    def __init__(self, spec: QwenVisionSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        size, inner = spec.hidden_size, spec.intermediate_size
        kind: dict[str, Any] = {"bias": True, "dtype": dtype, "device": device}
        self._gated = spec.gated
        if spec.gated:
            self.gate_up_proj = GatedLinear(size, {"gate_proj": inner, "up_proj": inner}, spec.activation, **kind)
            self.down_proj = Linear(inner, size, **kind)
        else:
            self.fc1 = Linear(size, inner, act=spec.activation, **kind)
            self.fc2 = Linear(inner, size, **kind)

    @property
    def products(self) -> int:
        """Multiplications for each patch."""
        first, second = (self.gate_up_proj, self.down_proj) if self._gated else (self.fc1, self.fc2)
        return first.products + second.products

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """x, residual: ``[patches, hidden_size]``; the second is added to the output."""
        gated = self._gated
        output: Tensor = self.down_proj(self.gate_up_proj(x), residual) if gated else self.fc2(self.fc1(x), residual)
        return output


def _norm(spec: QwenVisionSpec, *, dtype: torch.dtype, device: torch.device) -> RMSNorm | LayerNorm:
    kind = RMSNorm if spec.gated else LayerNorm
    return kind(spec.hidden_size, NORM_EPS, dtype=dtype, device=device)


class VisionLayer(nn.Module):
    def __init__(self, spec: QwenVisionSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.norm1 = _norm(spec, dtype=dtype, device=device)
        self.norm2 = _norm(spec, dtype=dtype, device=device)
        self.attn = VisionAttention(spec, dtype=dtype, device=device)
        self.mlp = VisionMLP(spec, dtype=dtype, device=device)

    def products(self, lengths: list[int]) -> int:
        """Multiplications for patches of which so many see each other."""
        pairs = sum(self.attn.attention.products(length) for length in lengths)
        return sum(lengths) * sum(self._products) + pairs

    def in_stages(self, x: Tensor, layout: Layout, lengths: list[int], budget: StageBudget) -> Stages[Tensor]:
        """``[patches, hidden_size]`` to the same."""
        before, behind = self._products
        qkv = yield from by_rows(self._rotated, before, budget, x, layout.cos, layout.sin)
        attended = yield from self.attn.attended(qkv, lengths, budget)
        return (yield from by_rows(self._behind, behind, budget, attended, x))

    @property
    def _products(self) -> tuple[int, int]:
        """Multiplications for each patch, before and behind attention."""
        return self.attn.qkv.products, self.attn.proj.products + self.mlp.products

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.attn.rotated(self.norm1(x), cos, sin)

    def _behind(self, attended: Tensor, x: Tensor) -> Tensor:
        x = self.attn.proj(attended, x)
        output: Tensor = self.mlp(self.norm2(x), x)
        return output


class PatchMerger(nn.Module):
    """Squares of patches to embeddings. products: multiplications for each. Modules are named as checkpoints do it."""

    def __init__(
        self, spec: QwenVisionSpec, *, norms_squares: bool = False, dtype: torch.dtype, device: torch.device
    ) -> None:
        """norms_squares: the patches of a square are normed together, not each by itself."""
        super().__init__()
        size = spec.hidden_size * spec.merge**2
        self.ln_q = (
            LayerNorm(size, NORM_EPS, dtype=dtype, device=device)
            if norms_squares
            else _norm(spec, dtype=dtype, device=device)
        )
        self._norms_squares = norms_squares
        first = Linear(size, size, bias=True, dtype=dtype, device=device, act="gelu")
        second = Linear(size, spec.output_size, bias=True, dtype=dtype, device=device)
        self.mlp = nn.ModuleDict({"0": first, "2": second})
        self._size = size
        self.products = first.products + second.products

    def forward(self, x: Tensor) -> Tensor:
        """``[embeddings, merge^2, hidden_size]`` to ``[embeddings, output_size]``."""
        x = x.flatten(1) if self._norms_squares else x
        output: Tensor = self.mlp["2"](self.mlp["0"](self.ln_q(x).view(-1, self._size)))
        return output


class QwenVisionTower(StagedVision):
    """Images of any size, or videos, to embeddings. Modules are named as checkpoints name them."""

    def __init__(self, spec: QwenVisionSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.dtype = dtype
        # A dict puts the weight where checkpoints have it, under "patch_embed.proj".
        self.patch_embed = nn.ModuleDict({"proj": PatchEmbedding(spec, dtype=dtype, device=device)})
        self.blocks = nn.ModuleList(VisionLayer(spec, dtype=dtype, device=device) for _ in range(spec.num_layers))
        self.merger = PatchMerger(spec, dtype=dtype, device=device)
        self.pos_embed = PositionGrid(spec, dtype=dtype, device=device) if spec.num_positions else None
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(spec, norms_squares=True, dtype=dtype, device=device) for _ in spec.deepstack
        )

    def check(self, shape: tuple[int, ...], num_tokens: int, tiling: TowerInputs | None = None) -> None:
        """Check that pixels ``[frames, channels, height, width]`` become that many embeddings.

        Raises InvalidImageError if they do not.
        """
        side = self.spec.patch_size * self.spec.merge
        if (
            len(shape) != 4
            or shape[1] != self.spec.num_channels
            or shape[2] % side
            or shape[3] % side
            or not all(shape)
        ):
            raise InvalidImageError(f"the vision tower takes images of whole squares of {side} pixels, not {shape}")
        embeddings = -(-shape[0] // self.spec.frames) * (shape[2] // side) * (shape[3] // side)
        if embeddings != num_tokens:
            raise InvalidImageError(f"the image makes {embeddings} embeddings and has {num_tokens} placeholders")

    @property
    def example_shape(self) -> tuple[int, ...]:
        """See `VisionEncoder.example_shape`. 64 embeddings."""
        side = 8 * self.spec.patch_size * self.spec.merge
        return 1, self.spec.num_channels, side, side

    def products(self, shape: tuple[int, ...], tiling: TowerInputs | None = None) -> int:
        """See `VisionEncoder.products`."""
        spec = self.spec
        deep, down, across = -(-shape[0] // spec.frames), shape[2] // spec.patch_size, shape[3] // spec.patch_size
        windows = [spec.merge**2 * len(window) for window in self._windows((deep, down, across))]
        layers = sum(
            block.products(windows if self._is_windowed(index) else [down * across] * deep)
            for index, block in enumerate(self._layers())
        )
        patches = deep * down * across
        embeddings = patches // spec.merge**2
        mergers = self.merger.products * (1 + len(spec.deepstack))
        return layers + patches * self._projection.products + embeddings * mergers

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        """See `VisionEncoder.in_stages`. Images or videos ``[frames, channels, height, width]`` each by itself; the
        last frame is repeated to fill a patch. Embeddings come frame by frame, row by row, beside what the decoder's
        layers get of them: ``[embeddings, (1 + deepstack) * output_size]``."""
        images = []
        for image in pixels:
            images.append((yield from self._encode(image.to(self.dtype), budget)))
        return images

    def _layers(self) -> Iterable[VisionLayer]:
        return self.blocks.children()  # type: ignore[return-value]

    @property
    def _projection(self) -> PatchEmbedding:
        return self.patch_embed["proj"]  # type: ignore[return-value]

    def _is_windowed(self, layer: int) -> bool:
        return self.spec.window is not None and layer not in self.spec.full_layers

    def _encode(self, pixels: Tensor, budget: StageBudget) -> Stages[Tensor]:
        spec = self.spec
        missing = -len(pixels) % spec.frames
        if missing:
            pixels = torch.cat((pixels, pixels[-1:].expand(missing, -1, -1, -1)))
        grid = len(pixels) // spec.frames, pixels.shape[2] // spec.patch_size, pixels.shape[3] // spec.patch_size
        layout = self._layout(grid, pixels.device)
        patches = self._patches(pixels, grid)[layout.order]
        x = yield from by_rows(self._projection, self._projection.products, budget, patches)
        if self.pos_embed is not None:
            of_frame = self.pos_embed(*self._rows_and_columns(*grid[1:]), grid[1:])
            x = (x.view(grid[0], *of_frame.shape) + of_frame).flatten(0, 1)
        of_layers: list[Tensor] = []
        for index, block in enumerate(self._layers()):
            lengths = layout.windows if self._is_windowed(index) else layout.frames
            x = yield from block.in_stages(x, layout, lengths, budget)
            if index in spec.deepstack:
                merger = cast(PatchMerger, self.deepstack_merger_list[spec.deepstack.index(index)])
                of_layers.append((yield from self._merged(x, merger, budget)))
        merged = yield from self._merged(x, self.merger, budget)
        return torch.cat((merged, *of_layers), 1)[layout.back]

    def _merged(self, x: Tensor, merger: PatchMerger, budget: StageBudget) -> Stages[Tensor]:
        return by_rows(merger, merger.products, budget, x.view(-1, self.spec.merge**2, x.shape[-1]))

    def _patches(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """``[patches, channels * frames * patch * patch]``, merged ones side by side, else row by row."""
        spec = self.spec
        deep, down, across = grid
        merge, size = spec.merge, spec.patch_size
        split = pixels.view(
            deep, spec.frames, spec.num_channels, down // merge, merge, size, across // merge, merge, size
        )
        return split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(deep * down * across, -1)

    def _layout(self, grid: tuple[int, int, int], device: torch.device) -> Layout:
        spec = self.spec
        deep, down, across = grid
        unit = spec.merge**2
        windows = self._windows(grid)
        merged = torch.cat(windows)
        order = (merged[:, None] * unit + torch.arange(unit)).flatten()
        row, column = (axis.repeat(deep)[order] for axis in self._rows_and_columns(down, across))
        frequencies = 1.0 / ROPE_THETA ** (torch.arange(0, spec.head_size // 2, 2).float() / (spec.head_size // 2))
        cos, sin = patch_angles(row, column, frequencies, frequencies, device)
        return Layout(
            cos=cos,
            sin=sin,
            windows=[unit * len(window) for window in windows],
            frames=[down * across] * deep,
            order=order.to(device),
            back=merged.argsort().to(device),
        )

    def _windows(self, grid: tuple[int, int, int]) -> list[Tensor]:
        """Which merged patches lie in each window: frame by frame, window by window, row by row."""
        spec = self.spec
        deep, rows, columns = grid[0], grid[1] // spec.merge, grid[2] // spec.merge
        places = torch.arange(deep * rows * columns).view(deep, rows, columns)
        side = max(rows, columns, 1) if spec.window is None else spec.window // spec.merge // spec.patch_size
        return [window.flatten() for frame in places for band in frame.split(side) for window in band.split(side, 1)]

    def _rows_and_columns(self, down: int, across: int) -> tuple[Tensor, Tensor]:
        """Of the patches of a frame, in the order of `_patches`."""
        merge = self.spec.merge
        row, column = torch.meshgrid(torch.arange(down), torch.arange(across), indexing="ij")
        shape = (down // merge, merge, across // merge, merge)
        return row.view(shape).transpose(1, 2).flatten(), column.view(shape).transpose(1, 2).flatten()
