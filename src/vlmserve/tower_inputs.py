"""Inputs of a vision tower besides pixels."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Tiling(msgspec.Struct, frozen=True, tag=True):
    """An image's tiles; the first shows the whole.

    rows, columns: of the others. height, width: embeddings that show the image, centered in padding.
    """

    rows: int
    columns: int
    height: int
    width: int


class Pieces(msgspec.Struct, frozen=True, tag=True):
    """Rows and columns of patches per piece."""

    grids: tuple[tuple[int, int], ...]


class NamedArray(msgspec.Struct, frozen=True):
    """Named as in the model's own code. dtype: numpy's name. data: row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class FurtherInputs(msgspec.Struct, frozen=True, tag=True):
    """Inputs of a tower on the Transformers backend."""

    num_embeddings: int
    arrays: tuple[NamedArray, ...]


class SquareGrids(msgspec.Struct, frozen=True, tag=True):
    """Rows and columns of squares, an embedding each, per part."""

    grids: tuple[tuple[int, int], ...]


TowerInputs: TypeAlias = Pieces | Tiling | FurtherInputs | SquareGrids
