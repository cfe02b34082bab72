"""Tilings of products that were measured to be the fastest, by GPU.

`benchmarks.gpu --stages tiles` measures them and writes them as they stand here.
"""

from __future__ import annotations

from typing import NamedTuple


class Tiling(NamedTuple):
    """How a product is divided. outputs, inputs: of a tile; tokens: its rows of x. splits: parts of the inputs."""

    outputs: int
    tokens: int
    inputs: int
    splits: int
    warps: int
    stages: int


class Shape(NamedTuple):
    """Of a product. group: of inputs that share a scale, of 4 bits, else 0. tokens: rows of a tile."""

    bits: int
    group: int
    out_features: int
    in_features: int
    tokens: int


TUNED: dict[str, dict[Shape, Tiling]] = {}
"""By the names that torch gives GPUs. None was measured yet."""
