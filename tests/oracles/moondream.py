"""Moondream 2 written out in float64, slowly: no cache, no batch, one crop after the other.

Source: the architecture as the model's repository, https://huggingface.co/vikhyatk/moondream2, has it at the revisions
2025-01-09 to 2025-04-14 (`HfMoondream`), told again from knowledge of it, not checked against its files. Tensors have
the names of those revisions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

Weights = Mapping[str, Tensor]


class MoondreamOracle:
    """config: the sections "text" and "vision" of the model's own settings, complete. weights: of a checkpoint."""

    def __init__(self, config: Mapping[str, Any], weights: Weights) -> None:
        self.text, self.vision = config["text"], config["vision"]
        self.weights = {name.removeprefix("model."): tensor.double() for name, tensor in weights.items()}

    # Images

    def crops(self, pil_image: Image.Image) -> tuple[Tensor, tuple[int, int]]:
        """The whole image and its crops, ``[1 + rows * columns, 3, size, size]``, and how many rows and columns."""
        size, patch = self.vision["crop_size"], self.vision["enc_patch_size"]
        margin = patch * self.vision["overlap_margin"]
        window = size - 2 * margin
        tiles = self._tiles(pil_image.height - 2 * margin, pil_image.width - 2 * margin, window)
        large = pil_image.resize(
            (tiles[1] * window + 2 * margin, tiles[0] * window + 2 * margin), Image.Resampling.LANCZOS
        )
        levels = np.asarray(large)
        crops = [np.asarray(pil_image.resize((size, size), Image.Resampling.LANCZOS))]
        for row in range(tiles[0]):
            for column in range(tiles[1]):
                top, left = row * window, column * window
                crops.append(levels[top : top + size, left : left + size])
        stacked = np.stack(crops).transpose(0, 3, 1, 2).astype(np.float64)
        return torch.from_numpy((stacked / 255 - 0.5) / 0.5), tiles

    def _tiles(self, height: int, width: int, window: int) -> tuple[int, int]:
        most = self.vision["max_crops"]
        if height <= window or width <= window:
            return 1, 1
        fewest_down, fewest_across = math.ceil(height / window), math.ceil(width / window)
        if fewest_down * fewest_across > most:
            ratio = math.sqrt(most / (fewest_down * fewest_across))
            return max(1, math.floor(fewest_down * ratio)), max(1, math.floor(fewest_across * ratio))
        down = max(math.floor(math.sqrt(most * height / width)), fewest_down)
        across = max(math.floor(math.sqrt(most * width / height)), fewest_across)
        if down * across > most:
            if across > down:
                across = math.floor(most / down)
            else:
                down = math.floor(most / across)
        return max(1, down), max(1, across)

    def see(self, crops: Tensor, tiles: tuple[int, int]) -> Tensor:
        """Embeddings of an image, ``[side * side, dim]``."""
        features = [self._encode(crop) for crop in crops.double()]
        side = self.vision["crop_size"] // self.vision["enc_patch_size"]
        margin = self.vision["overlap_margin"]
        window = side - 2 * margin
        height, width = (count * window + 2 * margin for count in tiles)
        whole = torch.zeros(height, width, self.vision["enc_dim"]).double()
        # A crop keeps its margin only where it has no neighbour.
        for number, crop in enumerate(features[1:]):
            row, column = divmod(number, tiles[1])
            grid = crop.view(side, side, -1)
            for y in range(side):
                for x in range(side):
                    hidden_y = (y < margin and row > 0) or (y >= side - margin and row < tiles[0] - 1)
                    hidden_x = (x < margin and column > 0) or (x >= side - margin and column < tiles[1] - 1)
                    if not hidden_y and not hidden_x:
                        whole[row * window + y, column * window + x] = grid[y, x]
        pooled = []
        for y in range(side):
            top, bottom = y * whole.shape[0] // side, -(-(y + 1) * whole.shape[0] // side)
            for x in range(side):
                left, right = x * whole.shape[1] // side, -(-(x + 1) * whole.shape[1] // side)
                pooled.append(whole[top:bottom, left:right].mean((0, 1)))
        return self._mlp("vision.proj_mlp", torch.cat((features[0], torch.stack(pooled)), -1))

    def _encode(self, crop: Tensor) -> Tensor:
        patch = self.vision["enc_patch_size"]
        side = crop.shape[1] // patch
        patches = [
            crop[:, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch].flatten()
            for row in range(side)
            for column in range(side)
        ]
        x = self._linear("vision.patch_emb", torch.stack(patches)) + self.weights["vision.pos_emb"][0]
        everything = torch.ones(len(x), len(x), dtype=torch.bool)
        for layer in range(self.vision["enc_n_layers"]):
            block = f"vision.blocks.{layer}"
            heads = self.vision["enc_n_heads"]
            x = x + self._attention(
                f"{block}.attn", self._norm(f"{block}.ln1", x), everything, heads, heads, rotary=False
            )
            x = x + self._mlp(f"{block}.mlp", self._norm(f"{block}.ln2", x))
        return self._norm("vision.post_ln", x)

    # Text

    def embed(self, token_ids: list[int]) -> Tensor:
        return self.weights["text.wte"][torch.tensor(token_ids, dtype=torch.int64)]

    def logits(self, embeddings: Tensor, prefix: int) -> Tensor:
        """``[tokens, dim]``, of which the first `prefix` see each other, to ``[tokens, vocabulary]``."""
        x = embeddings.double()
        seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        seen[:prefix, :prefix] = True
        heads, kv_heads = self.text["n_heads"], self.text["n_kv_heads"]
        for layer in range(self.text["n_layers"]):
            block = f"text.blocks.{layer}"
            normed = self._norm(f"{block}.ln", x)
            attended = self._attention(f"{block}.attn", normed, seen, heads, kv_heads, rotary=True)
            x = x + attended + self._mlp(f"{block}.mlp", normed)
        return self._linear("text.lm_head", self._norm("text.post_ln", x))

    # Parts

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        scaled = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        x = self._linear(f"{name}.fc1", x)
        x = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return self._linear(f"{name}.fc2", x)

    def _attention(self, name: str, x: Tensor, seen: Tensor, heads: int, kv_heads: int, *, rotary: bool) -> Tensor:
        size = self.weights[f"{name}.proj.weight"].shape[1] // heads
        qkv = self._linear(f"{name}.qkv", x)
        query, key, value = (
            part.unflatten(-1, (-1, size)) for part in qkv.split([heads * size, *[kv_heads * size] * 2], -1)
        )
        if rotary:
            query, key = self._turned(query), self._turned(key)
        results = []
        for head in range(heads):
            own = head // (heads // kv_heads)
            scores = query[:, head] @ key[:, own].T / math.sqrt(size)
            results.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value[:, own])
        return self._linear(f"{name}.proj", torch.cat(results, -1))

    @staticmethod
    def _turned(x: Tensor) -> Tensor:
        """The first half of each head rotated, element i with element i + a quarter of the head."""
        rotated_size = x.shape[-1] // 2
        frequencies = 10000.0 ** (-torch.arange(0, rotated_size, 2).double() / rotated_size)
        angles = torch.arange(len(x)).double()[:, None, None] * frequencies
        first, second = x[..., : rotated_size // 2], x[..., rotated_size // 2 : rotated_size]
        rotated = (first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos())
        return torch.cat((*rotated, x[..., rotated_size:]), -1)
