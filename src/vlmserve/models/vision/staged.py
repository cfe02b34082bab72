"""Base classes of vision towers that compute in stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar, Unpack

import torch
from torch import Tensor, nn

from vlmserve.errors import InvalidImageError
from vlmserve.kernels.ranges import Ranges
from vlmserve.layers.encoder_attention import EncoderAttention
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import Linear
from vlmserve.layers.norm import Normalization
from vlmserve.layers.residual import ResidualStream, Unfinished
from vlmserve.layers.stages import StageBudget, Stages, by_rows, in_parts, run_stages
from vlmserve.types import TowerInputs

L = TypeVar("L", bound="StagedLayer")


class FeedForward(Protocol):
    """A block that computes each token independently."""

    @property
    def products(self) -> int: ...

    def __call__(self, x: Tensor, /) -> Unfinished: ...


class LayerParts(NamedTuple):
    """The modules of a layer, in the order of computation."""

    first_norm: Normalization
    qkv: Linear
    attention: EncoderAttention | None
    """None: `StagedLayer.mixed` replaces attention."""
    output: Linear
    second_norm: Normalization
    mlp: FeedForward


class StagedLayer(nn.Module):
    """A transformer layer, split into parts before and after attention over an image's tokens."""

    @cached_property
    def parts(self) -> LayerParts:
        raise NotImplementedError

    def before_attention(self, normed: Tensor, *angles: Tensor) -> Tensor:
        """``[tokens, size]`` to queries, keys and values side by side, ``[tokens, 3 * size]``."""
        qkv: Tensor = self.parts.qkv(normed)
        return qkv

    def after_attention(self, stream: ResidualStream, attended: Tensor) -> None:
        """Add the attention output, ``[tokens, size]``, and compute the rest of the layer."""
        stream.add(Unfinished(self.parts.output, attended))
        stream.add(self.parts.mlp(stream.normed(self.parts.second_norm)))

    @cached_property
    def _token_products(self) -> tuple[int, int]:
        return self.parts.qkv.products, self.parts.output.products + self.parts.mlp.products

    def products(self, *lengths: int) -> int:
        return sum(lengths) * sum(self._token_products) + sum(map(self.mixing_products, lengths))

    def mixing_products(self, length: int) -> int:
        assert self.parts.attention is not None
        return self.parts.attention.products(length)

    def mixed(self, qkv: Tensor, images: int | Ranges, budget: StageBudget) -> Stages[Tensor]:
        """``[tokens, 3 * size]`` to ``[tokens, size]``. images: see `in_stages`."""
        attention = self.parts.attention
        assert attention is not None
        if isinstance(images, Ranges):
            return (yield from attention.over_ranges(qkv, images, budget))
        return (yield from attention.in_stages(qkv.view(images, -1, qkv.shape[1]), budget)).flatten(0, 1)

    def in_stages(
        self, stream: ResidualStream, images: int | Ranges, budget: StageBudget, following: Normalization | None,
        *angles: Tensor,
    ) -> Stages[ResidualStream]:  # fmt: skip
        """Compute the layer for ``[tokens, size]``.

        images: number of equal images, or their ranges. following: a norm that the layer may also compute. angles:
        cosines and sines of tokens, for rotary embeddings.
        """
        before, after = self._token_products
        norm, known = self.parts.first_norm, stream.known

        def begin(rows: Tensor, *angles: Tensor) -> Tensor:
            return self.before_attention(norm(rows) if known is None else rows, *angles)

        qkv = yield from by_rows(begin, before, budget, stream.rows if known is None else known, *angles)
        attended = yield from self.mixed(qkv, images, budget)

        def end(attended: Tensor, rows: Tensor) -> ResidualStream:
            part = ResidualStream(rows)
            self.after_attention(part, attended)
            part.finish(following)
            return part

        return ResidualStream.joined((yield from in_parts(end, after, budget, attended, stream.rows)))


def with_following(layers: Iterable[L]) -> Iterator[tuple[L, Normalization | None]]:
    """Yield each layer with the first norm of the next; None for the last."""
    these = list(layers)
    return itertools.zip_longest(these, [layer.parts.first_norm for layer in these[1:]])


def through_layers(layers: Iterable[StagedLayer], x: Tensor, budget: StageBudget) -> Stages[Tensor]:
    stream = ResidualStream(x.flatten(0, 1))
    for layer, following in with_following(layers):
        stream = yield from layer.in_stages(stream, len(x), budget, following)
    return stream.rows.view_as(x)


class StagedVision(nn.Module):
    """The methods of `VisionEncoder` that follow from `in_stages` and `embeddings`."""

    larger_shape: tuple[int, ...] | None = None
    has_dynamic_resolution = False

    def __init__(self, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.dtype, self.device = factory["dtype"], factory["device"]

    def embeddings(self, shape: tuple[int, ...], tiling: TowerInputs | None = None) -> int:
        """Raises InvalidImageError for pixels that do not fit."""
        raise NotImplementedError

    def check(self, shape: tuple[int, ...], num_tokens: int, tiling: TowerInputs | None = None) -> None:
        if (made := self.embeddings(tuple(shape), tiling)) != num_tokens:
            raise InvalidImageError(f"the image makes {made} embeddings and has {num_tokens} placeholders")

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        raise NotImplementedError

    def encode(self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None] = ()) -> list[Tensor]:
        return run_stages(self.in_stages(pixels, tilings, StageBudget())) if pixels else []


class FixedSizeVision(StagedVision):
    """Base of towers for tiles of one size."""

    tile: tuple[int, ...]
    """Channels, height and width."""
    tile_embeddings: int
    tile_products: int
    """MACs for a tile."""
    several = False
    """True if an image may have several tiles."""

    def embeddings(self, shape: tuple[int, ...], tiling: TowerInputs | None = None) -> int:
        expected, found = (self.tile, shape[1:]) if self.several else (self.example_shape, shape)
        if len(shape) != 4 or found != expected:
            raise InvalidImageError(f"the vision tower takes images of {expected}, not of {found}")
        return shape[0] * self.tile_embeddings

    @property
    def example_shape(self) -> tuple[int, ...]:
        return 1, *self.tile

    @property
    def larger_shape(self) -> tuple[int, ...] | None:  # type: ignore[override]
        return (4, *self.tile) if self.several else None

    def products(self, shape: tuple[int, ...], tiling: TowerInputs | None = None) -> int:
        return shape[0] * self.tile_products


class SquaresVision(StagedVision):
    """Base of towers that make an embedding of each square of pixels, for images of any size."""

    side: int
    channels = 3
    most: int | None = None
    """Maximum pixels along each side of an image."""
    frames: int | None = None
    """Frames of a video that share embeddings; None: no videos."""

    def embeddings(self, shape: tuple[int, ...], tiling: TowerInputs | None = None) -> int:
        side, many = self.side, self.frames is None and shape[0] != 1
        if len(shape) != 4 or many or shape[1] != self.channels or shape[2] % side or shape[3] % side or not all(shape):
            raise InvalidImageError(f"the vision tower takes images of whole squares of {side} pixels, not {shape}")
        if self.most is not None and max(shape[2:]) > self.most:
            raise InvalidImageError(f"the vision tower takes at most {self.most} pixels along a side, not {shape}")
        return -(-shape[0] // (self.frames or 1)) * (shape[2] // side) * (shape[3] // side)

    @property
    def example_shape(self) -> tuple[int, ...]:
        return 1, self.channels, 8 * self.side, 8 * self.side

    @property
    def larger_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return 1, self.channels, 16 * self.side, 16 * self.side


class TileVision(FixedSizeVision):
    """Base of towers whose images consist of independent tiles."""

    def tiles_in_stages(self, tiles: Tensor, budget: StageBudget) -> Stages[Tensor]:
        raise NotImplementedError

    def arranged(self, images: list[Tensor], tilings: Sequence[TowerInputs | None]) -> list[Tensor]:
        return [tiles.flatten(0, 1) for tiles in images]

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        embeddings = yield from self.tiles_in_stages(torch.cat(pixels).to(self.dtype), budget)
        return self.arranged(list(torch.split(embeddings, [len(image) for image in pixels])), tilings)

    def encode_tiles(self, tiles: Tensor) -> Tensor:
        return run_stages(self.tiles_in_stages(tiles, StageBudget()))
