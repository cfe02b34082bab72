"""What the generator knows of every 16-pixel patch of a document or a scene: characters, colours, shapes and ranks."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from training.pixie.labels import CELL_SIZE, dense_labels
from vlmserve.pixie.documents import PATCH, Document
from vlmserve.pixie.printed_text import CHARACTERS
from vlmserve.pixie.scenes import MOST_ITEMS, Scene
from vlmserve.pixie.vocabulary import COLOURS, DIGITS, LETTERS, PLACES, SHAPES

SLOTS: Final = 3
"""Characters whose centres lie in the same patch and that it is to name, from left to right."""
MOST_CHARACTERS: Final = 320
"""Of an image; labels leave further ones out."""
MOST_RANKS: Final = 15
LONGEST_LINE: Final = 31
CHARACTER_FIELDS: Final = 5
IGNORED: Final = 255
"""Class of a label that says nothing of a patch."""


class ReadingLabel(NamedTuple):
    """One thing to say of every patch; class 0 is "nothing". weight: its share of the loss."""

    name: str
    num_classes: int
    weight: float


_NUM_CHARACTERS: Final = len(CHARACTERS) + 1
READING_LABELS: Final = (
    *(ReadingLabel(f"character {slot}", _NUM_CHARACTERS, weight) for slot, weight in enumerate((3.0, 2.0, 0.6))),
    ReadingLabel("place in line", LONGEST_LINE + 1, 1.0),
    # The one before the first character of the patch: an answer finds its next character behind those that it has.
    ReadingLabel("character before", _NUM_CHARACTERS + 1, 1.0),
    # Those from here on are read from the map of cells at the centre of the patch.
    ReadingLabel("shape", len(SHAPES) + 2, 1.0),
    ReadingLabel("colour", len(COLOURS) + 1, 1.0),
    ReadingLabel("covering character", _NUM_CHARACTERS, 1.5),
    ReadingLabel("rank", MOST_RANKS + 1, 1.0),
    *(ReadingLabel(f"rank of {kind}", MOST_ITEMS + 1, 1.0) for kind in ("colour", "shape", "both")),
    *(ReadingLabel(f"count of {kind}", MOST_ITEMS + 1, 0.7) for kind in ("colour", "shape", "both")),
    # Of an item in a scene; "nothing" if it is near a border between places.
    ReadingLabel("place", len(PLACES) + 1, 1.0),
)
FIRST_OF_MAP: Final = SLOTS + 2
NUM_MAPS: Final = len(READING_LABELS) - FIRST_OF_MAP
_SCENE_CLASSES: Final = np.array([0, *(CHARACTERS.index(one) + 1 for one in DIGITS + LETTERS)], np.uint8)
_WRITING: Final = len(SHAPES) + 1


class Truth(NamedTuple):
    """What is known of an image before it is cropped."""

    maps: npt.NDArray[np.uint8]
    """Classes of cells, ``[NUM_MAPS, rows of cells, columns of cells]``."""
    characters: npt.NDArray[np.int16]
    """Of each character the centre in pixels (x, y), its class, its place in the line and the class of the character
    before it, ``[MOST_CHARACTERS, CHARACTER_FIELDS]``; class 0 for none."""


def truth_of_document(document: Document, size: tuple[int, int] | None = None) -> Truth:
    """What is known of a document that is resized to a size in pixels, width first; None: its own."""
    width, height = size or document.size
    x_scale, y_scale = width / document.size[0], height / document.size[1]
    maps = np.zeros((NUM_MAPS, height // CELL_SIZE, width // CELL_SIZE), np.uint8)
    rows: list[tuple[int, int, int, int, int]] = []
    for rank, line in enumerate(document.lines, start=1):
        colour = COLOURS.index(line.colour) + 1
        known = rank if rank <= MOST_RANKS else IGNORED
        for place, (character, box) in enumerate(zip(line.text, line.boxes, strict=True), start=1):
            left, top, right, bottom = box[0] * x_scale, box[1] * y_scale, box[2] * x_scale, box[3] * y_scale
            number = CHARACTERS.find(character) + 1
            if not number:
                continue
            cells = _cells(top, bottom), _cells(left, right)
            maps[:4, *cells] = np.array((_WRITING, colour, number, known), np.uint8)[:, None, None]
            centre = int((left + right) / 2), int((top + bottom) / 2)
            rows.append((*centre, number, min(place, LONGEST_LINE), _class_before(line.text, place)))
    return Truth(maps, _padded(rows))


def truth_of_scene(scene: Scene, size: tuple[int, int]) -> Truth:
    """What is known of a scene that is resized to a size in pixels, width first."""
    width, height = size
    labels = dense_labels(scene, height // CELL_SIZE, width // CELL_SIZE)
    labels[2] = _SCENE_CLASSES[labels[2]]
    places = np.array([0, *(0 if item.place is None else item.place + 1 for item in scene.items)], np.uint8)
    place = places[labels[3]] if scene.items else np.zeros_like(labels[3])
    labels = np.concatenate((labels, place[None]))
    rows: list[tuple[int, int, int, int, int]] = []
    if scene.writing is not None:
        x_scale, y_scale = width / scene.size[0], height / scene.size[1]
        boxes = zip(scene.writing.text, scene.writing.boxes, strict=True)
        for place, (character, (left, top, right, bottom)) in enumerate(boxes, start=1):
            centre = int((left + right) / 2 * x_scale), int((top + bottom) / 2 * y_scale)
            before = _class_before(scene.writing.text, place)
            rows.append((*centre, CHARACTERS.index(character) + 1, place, before))
    return Truth(labels, _padded(rows))


def _class_before(text: str, place: int) -> int:
    """The class of the character before a place, which counts from 1; spaces and the start of a line have one too."""
    found = CHARACTERS.find(text[place - 2]) if place > 1 else -1
    return _NUM_CHARACTERS if found < 0 else found + 1


def _cells(start: float, end: float) -> slice:
    first = max(0, round(start / CELL_SIZE))
    return slice(first, max(first + 1, round(end / CELL_SIZE)))


def _padded(rows: list[tuple[int, int, int, int, int]]) -> npt.NDArray[np.int16]:
    characters = np.zeros((MOST_CHARACTERS, CHARACTER_FIELDS), np.int16)
    if rows:
        characters[: len(rows)] = rows[:MOST_CHARACTERS]
    return characters


def _at_centres(maps: npt.NDArray[np.uint8], shift: tuple[int, int], grid: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Classes of the cells at the centres of patches, or beside them if nothing is there."""
    x, y = (np.arange(count) * PATCH + PATCH // 2 + first for count, first in zip(grid[::-1], shift, strict=True))
    found = maps[:, :, y[:, None] // CELL_SIZE, x // CELL_SIZE]
    for step in (-1, 1):
        for side in (-1, 1):
            beside = maps[:, :, y[:, None] // CELL_SIZE + step, x // CELL_SIZE + side]
            found = np.where(found[:, :1] > 0, found, beside)
    return found


def patch_labels(
    maps: npt.NDArray[np.uint8], characters: npt.NDArray[np.int16], shift: tuple[int, int], grid: tuple[int, int]
) -> npt.NDArray[np.uint8]:
    """``[labels, images, rows, columns]`` of images that are cropped to a grid of patches.

    maps, characters: of a batch, see `Truth`. shift: of the crop from the left and the top, in pixels. grid: rows and
    columns.
    """
    rows, columns = grid
    labels = np.zeros((len(READING_LABELS), len(maps), rows, columns), np.uint8)
    labels[FIRST_OF_MAP:] = _at_centres(maps, shift, grid).transpose(1, 0, 2, 3)
    image, number = np.nonzero(characters[:, :, 2])
    x, y, kind, place, before = characters[image, number].T
    x, y = x - shift[0], y - shift[1]
    inside = (x >= 0) & (y >= 0) & (x < columns * PATCH) & (y < rows * PATCH)
    image, x, y, kind, place, before = (one[inside] for one in (image, x, y, kind, place, before))
    patch = (image * rows + y // PATCH) * columns + x // PATCH
    order = np.lexsort((x, patch))
    patch, kind, place, before = (one[order] for one in (patch, kind, place, before))
    starts = np.flatnonzero(np.diff(patch, prepend=-1))
    slot = np.arange(len(patch)) - np.repeat(starts, np.diff(starts, append=len(patch)))
    kept = slot < SLOTS
    flat = labels.reshape(len(READING_LABELS), -1)
    flat[slot[kept], patch[kept]] = kind[kept]
    flat[SLOTS:FIRST_OF_MAP, patch[starts]] = place[starts], before[starts]
    return labels
