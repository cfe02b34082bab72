"""Base classes of vision towers that compute in stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from vlmserve.kernels.ranges import Ranges
from vlmserve.layers.encoder_attention import EncoderAttention
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

    def before(self, normed: Tensor, *angles: Tensor) -> Tensor:
        """``[tokens, size]`` to queries, keys and values side by side, ``[tokens, 3 * size]``."""
        qkv: Tensor = self.parts.qkv(normed)
        return qkv

    def behind(self, stream: ResidualStream, attended: Tensor) -> None:
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
        before, behind = self._token_products
        norm, known = self.parts.first_norm, stream.known

        def begin(rows: Tensor, *angles: Tensor) -> Tensor:
            return self.before(norm(rows) if known is None else rows, *angles)

        qkv = yield from by_rows(begin, before, budget, stream.rows if known is None else known, *angles)
        attended = yield from self.mixed(qkv, images, budget)

        def end(attended: Tensor, rows: Tensor) -> ResidualStream:
            part = ResidualStream(rows)
            self.behind(part, attended)
            part.finish(following)
            return part

        return ResidualStream.joined((yield from in_parts(end, behind, budget, attended, stream.rows)))


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
    """The methods of `VisionEncoder` that follow from `in_stages`."""

    larger_shape: tuple[int, ...] | None = None

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        raise NotImplementedError

    def encode(self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None] = ()) -> list[Tensor]:
        return run_stages(self.in_stages(pixels, tilings, StageBudget())) if pixels else []


class TileVision(StagedVision):
    """Base of towers whose images consist of independent tiles of one size."""

    dtype: torch.dtype

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
