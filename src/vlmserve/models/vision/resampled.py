"""Vision of the first Qwen-VL (https://arxiv.org/abs/2308.12966): OpenCLIP's ViT-bigG and a `Resampler`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmserve.errors import ModelLoadError
from vlmserve.layers.encoder_attention import EncoderAttention
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import Linear, empty_parameter
from vlmserve.layers.norm import LayerNorm
from vlmserve.layers.stages import StageBudget, Stages, by_rows
from vlmserve.models.blocks.mlp import MLP
from vlmserve.models.vision.clip import ClipSpec, PatchEmbedding
from vlmserve.models.vision.staged import FixedSizeVision, LayerParts, StagedLayer, through_layers
from vlmserve.types import TowerInputs

NORM_EPS = 1e-6
TRAINED_POSITIONS = 256
"""The tower's own position embeddings, 16 x 16."""
POOL_HEAD_SIZE = 128


@dataclass(frozen=True, slots=True)
class ResampledSpec:
    """tower: of the patches. num_queries: embeddings of an image. output_size: of the decoder."""

    tower: ClipSpec
    num_queries: int
    output_size: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any], output_size: int) -> ResampledSpec:
        width, heads = config.get("width", 1664), config.get("heads", 16)
        size = config.get("output_dim", output_size)
        queries = config.get("n_queries", 256)
        if width % heads or size % POOL_HEAD_SIZE or math.isqrt(queries) ** 2 != queries or size != output_size:
            raise ModelLoadError(
                f"config.json: {heads} heads, {queries} queries and {size} outputs do not fit a tower of width {width} "
                f"for a decoder of width {output_size}"
            )
        tower = ClipSpec(
            hidden_size=width,
            intermediate_size=int(width * config.get("mlp_ratio", 4.9231)),
            num_layers=config.get("layers", 48),
            num_heads=heads,
            num_channels=3,
            image_size=config.get("image_size", 448),
            patch_size=config.get("patch_size", 14),
            activation="gelu",
            norm_eps=NORM_EPS,
        )
        return cls(tower, queries, size)


def interpolated(positions: Tensor, count: int) -> Tensor:
    """Resize position embeddings of a square, row by row, to a square of `count` positions."""
    if len(positions) == count:
        return positions
    side, wanted = math.isqrt(len(positions)), math.isqrt(count)
    square = positions.float().view(1, side, side, -1).permute(0, 3, 1, 2)
    spread = F.interpolate(square, size=(wanted, wanted), mode="bicubic", align_corners=False)
    return spread.permute(0, 2, 3, 1).flatten(0, 2).to(positions.dtype)


class TowerAttention(nn.Module):
    """Full self-attention within each image. A head's queries, keys and values are adjacent."""

    def __init__(self, spec: ClipSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        size = spec.hidden_size
        self.in_proj = Linear(size, 3 * size, bias=True, **factory)
        self.out_proj = Linear(size, size, bias=True, **factory)
        self.attention = EncoderAttention(size, spec.num_heads, dtype=factory["dtype"])
        self._num_heads = spec.num_heads

    def qkv(self, x: Tensor) -> Tensor:
        """``[patches, size]`` to ``[patches, 3 * size]``: queries, then keys, then values."""
        heads: Tensor = self.in_proj(x).view(len(x), self._num_heads, 3, -1)
        return heads.transpose(1, 2).flatten(1)


class TowerLayer(StagedLayer):
    def __init__(self, spec: ClipSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(spec.hidden_size, spec.norm_eps, **factory)
        self.ln_2 = LayerNorm(spec.hidden_size, spec.norm_eps, **factory)
        self.attn = TowerAttention(spec, **factory)
        size, inner, names = spec.hidden_size, spec.intermediate_size, ("c_fc", "c_proj")
        self.mlp = MLP(size, inner, spec.activation, names=names, **factory)

    @cached_property
    def parts(self) -> LayerParts:
        return LayerParts(self.ln_1, self.attn.in_proj, self.attn.attention, self.attn.out_proj, self.ln_2, self.mlp)

    def before_attention(self, normed: Tensor, *angles: Tensor) -> Tensor:
        return self.attn.qkv(normed)


class ResamplerAttention(nn.Module):
    """Cross-attention with the parameter names of PyTorch's multi-head attention."""

    def __init__(self, size: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.in_proj_weight = empty_parameter(3 * size, size, **factory)
        self.in_proj_bias = empty_parameter(3 * size, **factory)
        self.out_proj = Linear(size, size, bias=True, **factory)
        self._num_heads = size // POOL_HEAD_SIZE

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query: ``[queries, size]``, shared by all images. key, value: ``[images, patches, size]``.

        Returns ``[images, queries, size]``.
        """
        inputs = query.expand(len(key), -1, -1), key, value
        heads = [
            F.linear(x, weight, bias).unflatten(2, (self._num_heads, -1)).transpose(1, 2)  # type: ignore[no-untyped-call]
            for x, weight, bias in zip(inputs, self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3), strict=True)
        ]
        attended = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        output: Tensor = self.out_proj(attended)
        return output


class Resampler(nn.Module):
    """``[images, patches, width]`` to ``[images, num_queries, output_size]``."""

    def __init__(self, spec: ResampledSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        size, count, width = spec.output_size, spec.num_queries, spec.tower.hidden_size
        self.pos_embed = empty_parameter(count, size, **factory)
        self.query = empty_parameter(count, size, **factory)
        projected = width != size
        self.kv_proj = Linear(width, size, bias=False, **factory) if projected else nn.Identity()
        self.attn = ResamplerAttention(size, **factory)
        self._key_products = width * size * projected + 2 * size * size + 2 * count * size
        self._query_products = 2 * count * size * size
        self.ln_q = LayerNorm(size, NORM_EPS, **factory)
        self.ln_kv = LayerNorm(size, NORM_EPS, **factory)

    def products(self, patches: int) -> int:
        return patches * self._key_products + self._query_products

    def forward(self, patches: Tensor) -> Tensor:
        value = self.ln_kv(self.kv_proj(patches))
        key = value + interpolated(self.pos_embed, patches.shape[1])
        output: Tensor = self.attn(self.ln_q(self.query) + self.pos_embed, key, value)
        return output


class ResampledVision(FixedSizeVision):
    """Images of one size to a fixed number of embeddings each. Module names match checkpoints."""

    def __init__(self, spec: ResampledSpec, **factory: Unpack[Factory]) -> None:
        super().__init__(**factory)
        self.spec = spec
        tower, size = spec.tower, spec.output_size
        self.conv1 = PatchEmbedding(tower, **factory)
        self.positional_embedding = empty_parameter(TRAINED_POSITIONS, tower.hidden_size, **factory)
        self.ln_pre = LayerNorm(tower.hidden_size, NORM_EPS, **factory)
        self._layers = [TowerLayer(tower, **factory) for _ in range(tower.num_layers)]
        # Matches the names in checkpoints.
        self.transformer = nn.ModuleDict({"resblocks": nn.ModuleList(self._layers)})
        self.attn_pool = Resampler(spec, **factory)
        self.ln_post = LayerNorm(size, NORM_EPS, **factory)
        self.proj = empty_parameter(size, size, **factory)
        patches = tower.num_patches
        self._pool_products = self.attn_pool.products(patches) + spec.num_queries * size * size
        layers = sum(layer.products(patches) for layer in self._layers)
        self.tile, self.tile_embeddings = tower.tile, spec.num_queries
        self.tile_products = patches * self.conv1.products + layers + self._pool_products

    @classmethod
    def from_config(cls, config: Mapping[str, Any], hidden_size: int, **factory: Unpack[Factory]) -> ResampledVision:
        return cls(ResampledSpec.from_config(config["visual"], hidden_size), **factory)

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        count = self.spec.tower.num_patches
        images = torch.cat(pixels).to(self.dtype)
        patches = yield from by_rows(self.conv1, count * self.conv1.products, budget, images)
        x = self.ln_pre(patches + interpolated(self.positional_embedding, count))
        x = yield from through_layers(self._layers, x, budget)
        return list((yield from by_rows(self._pool, self._pool_products, budget, x)))

    def _pool(self, patches: Tensor) -> Tensor:
        output: Tensor = self.ln_post(self.attn_pool(patches)) @ self.proj
        return output
