"""Inputs of a vision tower besides pixels."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Tiling(msgspec.Struct, frozen=True, tag=True):
    """How the tiles of an image lie. The first one shows all of the image.

    rows, columns: of the others. height, width: how many rows and columns of their embeddings the image covers, in
    the middle of them all; what is around it is padding.
    """

    rows: int
    columns: int
    height: int
    width: int


class Pieces(msgspec.Struct, frozen=True, tag=True):
    """Rows and columns of patches of an image's pieces. The pixels are patches side by side, piece by piece."""

    grids: tuple[tuple[int, int], ...]


class NamedArray(msgspec.Struct, frozen=True):
    """A small array, as a model's own code calls it. dtype: numpy's name. data: its bytes, row by row."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class FurtherInputs(msgspec.Struct, frozen=True, tag=True):
    """Inputs of a tower that transformers' code runs. num_embeddings: of the whole image."""

    num_embeddings: int
    arrays: tuple[NamedArray, ...]


class SquareGrids(msgspec.Struct, frozen=True, tag=True):
    """Rows and columns of the squares of each part of an image. Each square becomes an embedding."""

    grids: tuple[tuple[int, int], ...]


TowerInputs: TypeAlias = Pieces | Tiling | FurtherInputs | SquareGrids
