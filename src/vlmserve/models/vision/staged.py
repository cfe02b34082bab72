"""What vision towers that compute in stages have in common."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from vlmserve.kernels.operations import NormedRows
from vlmserve.layers.encoder_attention import EncoderAttention
from vlmserve.layers.norm import Normalization, rows_of
from vlmserve.layers.stages import StageBudget, Stages, by_rows, in_parts, run_stages
from vlmserve.types import TowerInputs

TowerRows: TypeAlias = "Tensor | NormedRows"
"""What a layer gets and gives, with or without its norm."""
L = TypeVar("L")


def before_norm(
    x: TowerRows, norm: Normalization, compute: Callable[..., Tensor]
) -> tuple[Callable[..., Tensor], Tensor]:
    """What computes the first part of a layer, which takes normed rows, and what it computes it of: the norm is part of
    it, unless the layer before has computed that."""
    if isinstance(x, NormedRows):
        return compute, x.normed
    return lambda rows, *others: compute(norm(rows), *others), x


def with_following(
    layers: Iterable[L], norm_of: Callable[[L], Normalization]
) -> Iterator[tuple[L, Normalization | None]]:
    """Each layer, and the norm with which the next one begins; None: it is the last one."""
    these = list(layers)
    return itertools.zip_longest(these, map(norm_of, these[1:]))


def ends_by_rows(
    compute: Callable[..., TowerRows], products: int, budget: StageBudget, *inputs: Tensor
) -> Stages[TowerRows]:
    """As `by_rows`, of the end of a layer."""
    parts = yield from in_parts(compute, products, budget, *inputs)
    if len(parts) == 1:
        return parts[0]
    rows = torch.cat([rows_of(part) for part in parts])
    normed = [part.normed for part in parts if isinstance(part, NormedRows)]
    return NormedRows(rows, torch.cat(normed)) if normed else rows


class StagedLayer(nn.Module):
    """A layer of a transformer: what is done to each token before and behind attention over all tokens of an image."""

    @property
    def first_norm(self) -> Normalization:
        """Of what the layer gets."""
        raise NotImplementedError

    def before(self, normed: Tensor) -> Tensor:
        """``[tokens, size]`` to queries, keys and values side by side, ``[tokens, 3 * size]``."""
        raise NotImplementedError

    def behind(self, attended: Tensor, x: Tensor, following: Normalization | None) -> TowerRows:
        """What attention gave and what the layer got, ``[tokens, size]`` each, to what the layer gives, with the norm
        that follows or without it."""
        raise NotImplementedError

    @property
    def full_attention(self) -> EncoderAttention:
        """Of all tokens of an image to each other."""
        raise NotImplementedError

    @cached_property
    def token_products(self) -> tuple[int, int]:
        """Multiplications for each token, before and behind attention."""
        raise NotImplementedError

    def products(self, length: int) -> int:
        """Multiplications for an image of that many tokens."""
        return length * sum(self.token_products) + self.full_attention.products(length)

    def in_stages(self, x: TowerRows, budget: StageBudget, following: Normalization | None) -> Stages[TowerRows]:
        """``[images, tokens, size]`` to the same. x: with `first_norm`, if it is not a tensor. following: a norm that
        the layer may compute as well."""
        before, behind = self.token_products
        shape, rows = rows_of(x).shape, rows_of(x).flatten(0, 1)
        compute, inputs = before_norm(x, self.first_norm, self.before)
        inputs = rows if inputs is x else inputs.flatten(0, 1)
        qkv = yield from by_rows(compute, before, budget, inputs)
        attended = yield from self.full_attention.in_stages(qkv.view(*shape[:2], -1), budget)
        rest = partial(self.behind, following=following)
        output = yield from ends_by_rows(rest, behind, budget, attended.flatten(0, 1), rows)
        if isinstance(output, Tensor):
            return output.view(shape)
        return NormedRows(output.rows.view(shape), output.normed.view(shape))


def through_layers(layers: Iterable[StagedLayer], x: Tensor, budget: StageBudget) -> Stages[Tensor]:
    """``[images, tokens, size]`` to the same, through all layers."""
    rows: TowerRows = x
    for layer, following in with_following(layers, lambda layer: layer.first_norm):
        rows = yield from layer.in_stages(rows, budget, following)
    return rows_of(rows)


class StagedVision(nn.Module):
    """The part of a `VisionEncoder` that follows from its stages."""

    larger_shape: tuple[int, ...] | None = None

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        raise NotImplementedError

    def encode(self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None] = ()) -> list[Tensor]:
        return run_stages(self.in_stages(pixels, tilings, StageBudget())) if pixels else []


class TileVision(StagedVision):
    """One whose images consist of tiles of one size, each of which is computed by itself. A `TileEncoder`."""

    dtype: torch.dtype

    def tiles_in_stages(self, tiles: Tensor, budget: StageBudget) -> Stages[Tensor]:
        """`TileEncoder.encode_tiles` in stages."""
        raise NotImplementedError

    def arranged(self, images: list[Tensor], tilings: Sequence[TowerInputs | None]) -> list[Tensor]:
        """See `TileEncoder.arranged`. One tile's embeddings behind the other's."""
        return [tiles.flatten(0, 1) for tiles in images]

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        """See `VisionEncoder.in_stages`. The tiles of all images are computed together."""
        embeddings = yield from self.tiles_in_stages(torch.cat(pixels).to(self.dtype), budget)
        return self.arranged(list(torch.split(embeddings, [len(image) for image in pixels])), tilings)

    def encode_tiles(self, tiles: Tensor) -> Tensor:
        return run_stages(self.tiles_in_stages(tiles, StageBudget()))
