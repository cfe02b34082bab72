"""Inputs of a vision tower besides pixels."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Tiling(msgspec.Struct, frozen=True, tag=True):
    """An image's tiles. The first shows the whole image.

    rows, columns: of the other tiles. height, width: rows and columns of their embeddings that show the image,
    centered in padding.
    """

    rows: int
    columns: int
    height: int
    width: int


class Pieces(msgspec.Struct, frozen=True, tag=True):
    """Rows and columns of patches of each piece. Pixels: patches, piece by piece."""

    grids: tuple[tuple[int, int], ...]


class NamedArray(msgspec.Struct, frozen=True):
    """A small array, named as in the model's own code. data: row-major bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class FurtherInputs(msgspec.Struct, frozen=True, tag=True):
    """Inputs of a tower on the Transformers backend."""

    num_embeddings: int
    arrays: tuple[NamedArray, ...]


class SquareGrids(msgspec.Struct, frozen=True, tag=True):
    """Rows and columns of squares, an embedding each, per part of an image."""

    grids: tuple[tuple[int, int], ...]


TowerInputs: TypeAlias = Pieces | Tiling | FurtherInputs | SquareGrids
