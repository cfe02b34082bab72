"""The vision tower that reads: Qwen3-VL's layout without merging of patches, in plain modules that train fast.

Images of several sizes are encoded together. Attention is two batched matrix products for the images of each size, as
in `training.pixie.model`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.pixie.reading.labels import IGNORED, READING_LABELS
from vlmserve.pixie.documents import PATCH

WIDTH: Final = 256
LAYERS: Final = 5
HEADS: Final = 4
INNER: Final = 768
SIDE: Final = 28
"""Learned positions along each side of a square, which is resized to every image."""
THETA: Final = 10000.0


def rotary_angles(grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Cosines and sines of Qwen3-VL's rotary embedding by row and column, ``[patches, size of a head]`` each."""
    half = WIDTH // HEADS // 2
    frequencies = THETA ** -(torch.arange(0, half, 2) / half)
    rows, columns = (place.flatten()[:, None] for place in torch.meshgrid(*map(torch.arange, grid), indexing="ij"))
    angles = torch.cat((rows * frequencies, columns * frequencies), -1)
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


@cache
def _rotations(grid: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of queries, which are scaled, and of keys, ``[patches, 2 * HEADS, size of a head]``."""
    cos, sin = rotary_angles(grid)
    half = sin.shape[-1] // 2
    # The sign of `rotate_half` belongs to the sine of the first half.
    signed = torch.cat((-sin[:, :half], sin[:, half:]), -1)
    scales = torch.tensor([(2 * half) ** -0.5] * HEADS + [1.0] * HEADS)[:, None]
    return (cos[:, None] * scales).to(dtype), (signed[:, None] * scales).to(dtype)


@cache
def _resizing(grid: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The matrix that resizes the square of positions, corners aligned, ``[patches, SIDE * SIDE]``."""
    sides = []
    for length in grid:
        exact = torch.linspace(0, SIDE - 1, length)
        first = exact.floor().long()
        weights = torch.zeros(length, SIDE)
        weights.scatter_(1, first[:, None], (1 - (exact - first))[:, None])
        weights.scatter_add_(1, (first + 1).clamp(max=SIDE - 1)[:, None], (exact - first)[:, None])
        sides.append(weights)
    return torch.einsum("ra,cb->rcab", *sides).reshape(grid[0] * grid[1], -1).to(dtype)


class ReadingBlock(nn.Module):
    """A layer of the tower."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        for last in (self.out, self.fc2):
            nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * LAYERS))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
        """x: ``[patches, WIDTH]``, images of the same size one after the other. sizes: for each size, the number of
        images and the patches of one."""
        qkv = self.qkv(self.norm1(x)).view(len(x), 3 * HEADS, -1)
        turned, value = qkv.split((2 * HEADS, HEADS), 1)
        turned = turned * cos + turned.roll(turned.shape[-1] // 2, -1) * sin
        patches = [count * length for count, length in sizes]
        parts = zip(turned.split(patches), value.split(patches), sizes, strict=True)
        x = x + self.out(torch.cat([_attend(*part) for part in parts]))
        return x + self.fc2(F.silu(self.fc1(self.norm2(x))))


def _attend(turned: Tensor, value: Tensor, size: tuple[int, int]) -> Tensor:
    """Attention within each image. turned: queries and keys. size: the number of images and the patches of one."""
    count, length = size
    query, key = turned.view(count, length, 2 * HEADS, -1).transpose(1, 2).split(HEADS, 1)
    query, value = (
        part.reshape(count * HEADS, length, -1)
        for part in (query, value.view(count, length, HEADS, -1).transpose(1, 2))
    )
    key = key.reshape(count * HEADS, length, -1).transpose(1, 2)
    attended = torch.bmm(torch.bmm(query, key).softmax(-1), value).view(count, HEADS, length, -1)
    return attended.transpose(1, 2).reshape(count * length, -1)


class ReadingTower(nn.Module):
    """uint8 images ``[batch, height, width, 3]`` of one size to features ``[batch, patches, WIDTH]``."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(SIDE * SIDE, WIDTH))
        self.patch = nn.Linear(3 * PATCH**2, WIDTH)
        self.blocks = nn.ModuleList(ReadingBlock() for _ in range(LAYERS))
        nn.init.normal_(self.patch.weight, std=0.5 * (3 * PATCH**2) ** -0.5)

    def forward(self, images: Tensor) -> Tensor:
        return self.encode([images]).view(len(images), -1, WIDTH)

    def encode(self, batches: Sequence[Tensor]) -> Tensor:
        """Features of batches of images, each of one size, ``[patches, WIDTH]``."""
        dtype = self.patch.weight.dtype
        grids = [(images.shape[1] // PATCH, images.shape[2] // PATCH) for images in batches]
        sizes = [(len(images), rows * columns) for images, (rows, columns) in zip(batches, grids, strict=True)]
        pixels = torch.cat([_pixels(images, grid) for images, grid in zip(batches, grids, strict=True)])
        positions = torch.cat(
            [
                (_resizing(grid, dtype) @ self.positions).repeat(size[0], 1)
                for grid, size in zip(grids, sizes, strict=True)
            ]
        )
        x = self.patch(pixels.to(dtype) * (1 / 127.5) - 1) + positions
        rotations = [_rotations(grid, dtype) for grid in grids]
        cos, sin = (
            torch.cat([turn[part].repeat(size[0], 1, 1) for turn, size in zip(rotations, sizes, strict=True)])
            for part in (0, 1)
        )
        for block in self.blocks:
            x = block(x, cos, sin, sizes)
        return x


def _pixels(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """The values of each patch, ``[patches, 3 * PATCH**2]``."""
    patches = images.view(len(images), grid[0], PATCH, grid[1], PATCH, 3).permute(0, 1, 3, 5, 2, 4)
    return patches.reshape(len(images) * grid[0] * grid[1], -1)


class ReadingHeads(nn.Module):
    """Features to logits of all kinds of labels beside each other, ``[patches, classes]``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.classes = nn.Linear(WIDTH, sum(kind.num_classes for kind in READING_LABELS))

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.classes(self.norm(features.flatten(0, -2)))
        return logits


def reading_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss over uint8 ``[kinds, patches]`` labels."""
    total = torch.zeros((), device=labels.device)
    parts = logits.split([kind.num_classes for kind in READING_LABELS], -1)
    for kind, scores, target in zip(READING_LABELS, parts, labels.long(), strict=True):
        losses = F.cross_entropy(scores.float(), target, ignore_index=IGNORED, reduction="none")
        thing = (target > 0) & (target != IGNORED)
        # Many patches are empty: things count as much again.
        total = total + kind.weight * (losses.mean() + 0.5 * (losses * thing).sum() / thing.sum().clamp(min=1))
    return total


@torch.no_grad()
def named_right(logits: Tensor, labels: Tensor) -> list[float]:
    """Of each kind the share of things that are named right."""
    parts = logits.split([kind.num_classes for kind in READING_LABELS], -1)
    right = []
    for scores, target in zip(parts, labels.long(), strict=True):
        thing = (target > 0) & (target != IGNORED)
        right.append(float((scores.argmax(-1)[thing] == target[thing]).float().mean()) if thing.any() else 0.0)
    return right
