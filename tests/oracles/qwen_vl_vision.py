"""The vision side of the first Qwen-VL, written out in float64, one image at a time.

Source: https://huggingface.co/Qwen/Qwen-VL (``visual.py``) and https://arxiv.org/abs/2308.12966. Tensors have their
published names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.oracles.original_decoders import layer_norm


def cubic(distance: float) -> float:
    """The weight of a neighbour at that distance in bicubic interpolation (Keys, with PyTorch's -0.75)."""
    a, x = -0.75, abs(distance)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def spread(positions: Tensor, wanted: int) -> Tensor:
    """A square of embeddings, row by row, interpolated to `wanted` along each side."""
    side = math.isqrt(len(positions))
    if side == wanted:
        return positions
    weights = torch.zeros(wanted, side, dtype=torch.float64)
    for target in range(wanted):
        centre = (target + 0.5) * side / wanted - 0.5
        for source in range(math.floor(centre) - 1, math.floor(centre) + 3):
            weights[target, min(max(source, 0), side - 1)] += cubic(centre - source)
    square = positions.view(side, side, -1)
    return torch.einsum("ar,bc,rcd->abd", weights, weights, square).flatten(0, 1)


def sines_and_cosines(side: int, width: int) -> Tensor:
    """Fixed embeddings of a square of positions: a half tells the column, the other one the row."""

    def along(place: int) -> list[float]:
        angles = [place / 10000 ** (i / (width / 4)) for i in range(width // 4)]
        return [*map(math.sin, angles), *map(math.cos, angles)]

    return torch.tensor([along(column) + along(row) for row in range(side) for column in range(side)])


def attention(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """``[queries, width]`` over ``[patches, width]``."""
    outputs = [
        (q @ k.T / math.sqrt(q.shape[1])).softmax(-1) @ v
        for q, k, v in zip(query.chunk(heads, 1), key.chunk(heads, 1), value.chunk(heads, 1), strict=True)
    ]
    return torch.cat(outputs, 1)


class QwenVLVision:
    def __init__(self, tensors: Mapping[str, Tensor], visual: Mapping[str, Any]) -> None:
        """tensors: those of a checkpoint, float64. visual: its config's section."""
        self.tensors = {
            name.removeprefix("transformer.visual."): tensor
            for name, tensor in tensors.items()
            if name.startswith("transformer.visual.")
        }
        self.visual = visual

    def norm(self, x: Tensor, name: str) -> Tensor:
        return layer_norm(x, self.tensors[name + ".weight"], self.tensors[name + ".bias"], 1e-6)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[name + ".weight"].T + self.tensors[name + ".bias"]

    @torch.inference_mode()
    def encode(self, pixels: Tensor) -> Tensor:
        """``[3, side, side]`` to ``[queries, output width]``."""
        size = self.visual["patch_size"]
        side = self.visual["image_size"] // size
        kernel = self.tensors["conv1.weight"].flatten(1)
        patches = [
            kernel @ pixels[:, row * size : (row + 1) * size, column * size : (column + 1) * size].double().flatten()
            for row in range(side)
            for column in range(side)
        ]
        x = self.norm(torch.stack(patches) + spread(self.tensors["positional_embedding"], side), "ln_pre")
        for number in range(self.visual["layers"]):
            x = self.block(x, f"transformer.resblocks.{number}.")
        return self.norm(self.pool(x, side), "ln_post") @ self.tensors["proj"]

    def block(self, x: Tensor, name: str) -> Tensor:
        heads = self.visual["heads"]
        mixed = self.linear(self.norm(x, name + "ln_1"), name + "attn.in_proj")
        # Each head has its queries, keys and values side by side.
        query, key, value = mixed.view(len(x), heads, 3, -1).permute(2, 0, 1, 3).flatten(2)
        x = x + self.linear(attention(query, key, value, heads), name + "attn.out_proj")
        inner = self.linear(self.norm(x, name + "ln_2"), name + "mlp.c_fc")
        inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
        return x + self.linear(inner, name + "mlp.c_proj")

    def pool(self, x: Tensor, side: int) -> Tensor:
        if "attn_pool.kv_proj.weight" in self.tensors:
            x = x @ self.tensors["attn_pool.kv_proj.weight"].T
        value = self.norm(x, "attn_pool.ln_kv")
        places = self.tensors["attn_pool.pos_embed"]
        query = self.norm(self.tensors["attn_pool.query"], "attn_pool.ln_q") + places
        key = value + spread(places, side)
        weights = self.tensors["attn_pool.attn.in_proj_weight"].chunk(3)
        biases = self.tensors["attn_pool.attn.in_proj_bias"].chunk(3)
        projected = [
            each @ weight.T + bias for each, weight, bias in zip((query, key, value), weights, biases, strict=True)
        ]
        return self.linear(attention(*projected, heads=len(places[0]) // 128), "attn_pool.attn.out_proj")
