"""What vision towers that compute in stages have in common."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from vlmserve.layers.encoder_attention import EncoderAttention
from vlmserve.layers.stages import StageBudget, Stages, by_rows, run_stages
from vlmserve.types import TowerInputs


class StagedLayer(nn.Module):
    """A layer of a transformer: what is done to each token before and behind attention over all tokens of an image."""

    def before(self, x: Tensor) -> Tensor:
        """``[tokens, size]`` to queries, keys and values side by side, ``[tokens, 3 * size]``."""
        raise NotImplementedError

    def behind(self, attended: Tensor, x: Tensor) -> Tensor:
        """What attention gave and what the layer got, ``[tokens, size]`` each, to what the layer gives."""
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

    def in_stages(self, x: Tensor, budget: StageBudget) -> Stages[Tensor]:
        """``[images, tokens, size]`` to the same."""
        before, behind = self.token_products
        rows = x.flatten(0, 1)
        qkv = yield from by_rows(self.before, before, budget, rows)
        attended = yield from self.full_attention.in_stages(qkv.view(*x.shape[:2], -1), budget)
        output = yield from by_rows(self.behind, behind, budget, attended.flatten(0, 1), rows)
        return output.view_as(x)


class StagedVision(nn.Module):
    """The part of a `VisionEncoder` that follows from its stages."""

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        """See `VisionEncoder.in_stages`."""
        raise NotImplementedError

    def encode(self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None] = ()) -> list[Tensor]:
        """See `VisionEncoder.encode`."""
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
        """See `TileEncoder.encode_tiles`."""
        return run_stages(self.tiles_in_stages(tiles, StageBudget()))
