"""What the generator knows of every part of an image: the dense labels that the vision tower learns first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from training.pixie.export import IMAGE_SIZE, PATCH_SIZE
from vlmserve.pixie.drawing import outline_points, ring_width
from vlmserve.pixie.scenes import MOST_ITEMS, Item, Scene
from vlmserve.pixie.vocabulary import COLOURS, DIGITS, LETTERS, SHAPES

CELLS_PER_PATCH: Final = 3
"""Along each side of a patch."""
CELL_SIZE: Final = PATCH_SIZE // CELLS_PER_PATCH
GRID: Final = IMAGE_SIZE // CELL_SIZE

_CHARACTERS: Final = DIGITS + LETTERS
_WRITING: Final = len(SHAPES) + 1


class LabelKind(NamedTuple):
    """One thing to say of every cell; class 0 is "nothing". weight: its share of the loss. late: not for the tower
    alone, but when it learns with the whole model."""

    name: str
    num_classes: int
    weight: float
    late: bool = False


LABELS: Final = (
    LabelKind("shape", len(SHAPES) + 2, 1.0),
    LabelKind("colour", len(COLOURS) + 1, 1.0),
    # Characters are the hardest to tell apart, and numbers and words hang on them.
    LabelKind("character", len(_CHARACTERS) + 1, 2.0),
    # Which item in reading order, or which character of the text: listing and counting become looking it up.
    LabelKind("rank", MOST_ITEMS + 1, 1.0),
    # The same among items of its colour, of its shape, and of both: counting those is finding the last one.
    LabelKind("rank of colour", MOST_ITEMS + 1, 1.0),
    LabelKind("rank of shape", MOST_ITEMS + 1, 1.0),
    LabelKind("rank of both", MOST_ITEMS + 1, 1.0),
    # How many there are of its colour, of its shape, and of both: counting is asking any one of them.
    LabelKind("count of colour", MOST_ITEMS + 1, 0.7, late=True),
    LabelKind("count of shape", MOST_ITEMS + 1, 0.7, late=True),
    LabelKind("count of both", MOST_ITEMS + 1, 0.7, late=True),
)


def dense_labels(scene: Scene, rows: int = GRID, columns: int = GRID) -> npt.NDArray[np.uint8]:
    """``[labels, rows, columns]``: for each cell of the resized image, the class of each kind in `LABELS`."""
    labels = np.zeros((len(LABELS), rows, columns), np.uint8)
    width, height = scene.size
    if scene.items:
        mask = Image.new("L", (columns * CELL_SIZE, rows * CELL_SIZE), 0)
        draw = ImageDraw.Draw(mask)
        for rank, item in enumerate(scene.items, start=1):
            _draw_mask(draw, item, rank, columns * CELL_SIZE / width, rows * CELL_SIZE / height)
        shown = np.asarray(mask)[CELL_SIZE // 2 :: CELL_SIZE, CELL_SIZE // 2 :: CELL_SIZE]
        for rank, item in enumerate(scene.items, start=1):
            alike = (*_alike(item, scene.items[:rank]), *_alike(item, scene.items))
            described = (SHAPES.index(item.shape) + 1, COLOURS.index(item.colour) + 1, 0, rank, *alike)
            labels[:, shown == rank] = _column(*described)
    if scene.writing is not None:
        colour = COLOURS.index(scene.writing.colour) + 1
        boxes = zip(scene.writing.text, scene.writing.boxes, strict=True)
        for rank, (character, (left, top, right, bottom)) in enumerate(boxes, start=1):
            covered = _cells(top, bottom, height, rows), _cells(left, right, width, columns)
            described = (_WRITING, colour, _CHARACTERS.index(character) + 1, rank, *6 * (0,))
            labels[:, *covered] = _column(*described)[..., None]
    return labels


def _alike(item: Item, among: Sequence[Item]) -> tuple[int, int, int]:
    """How many have the item's colour, its shape, and both."""
    return (
        sum(other.colour == item.colour for other in among),
        sum(other.shape == item.shape for other in among),
        sum((other.colour, other.shape) == (item.colour, item.shape) for other in among),
    )


def _column(*classes: int) -> npt.NDArray[np.uint8]:
    return np.array(classes, np.uint8)[:, None]


def _cells(start: float, end: float, length: int, count: int) -> slice:
    first = round(start * count / length)
    return slice(max(0, first), max(first + 1, round(end * count / length)))


def _draw_mask(draw: ImageDraw.ImageDraw, item: Item, value: int, x_scale: float, y_scale: float) -> None:
    draw.polygon([(x * x_scale, y * y_scale) for x, y in outline_points(item)], fill=value)
    if item.shape == "ring":
        (x, y), (width, height) = item.centre, item.size
        inner_width, inner_height = width / 2 - ring_width(item), height / 2 - ring_width(item)
        box = (x - inner_width, y - inner_height, x + inner_width, y + inner_height)
        draw.ellipse(tuple(v * scale for v, scale in zip(box, (x_scale, y_scale) * 2, strict=True)), fill=0)
