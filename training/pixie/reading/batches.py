"""Images with labels, drawn ahead by a process of their own, in a ring of memory-mapped arrays for each size."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from training.pixie.labels import CELL_SIZE
from training.pixie.reading.labels import (
    CHARACTER_FIELDS,
    MOST_CHARACTERS,
    NUM_MAPS,
    Truth,
    patch_labels,
    truth_of_document,
    truth_of_scene,
)
from vlmserve.pixie.document_drawing import draw_document
from vlmserve.pixie.documents import PATCH, DocumentKind, Style, sample_document
from vlmserve.pixie.drawing import draw_scene
from vlmserve.pixie.scenes import sample_scene

SLACK: Final = 8
"""Pixels that images are wider and higher than their grid, so that each use crops them differently."""
GRIDS: Final = ((7, 8), (6, 12), (14, 14), (9, 21), (21, 12), (28, 28), (9, 9), (12, 12))
"""Rows and columns of patches."""
SCENE_GRIDS: Final = ((9, 9), (12, 12))
"""Those that nearly always show scenes, whose ranks and counts take longest to learn."""
SCENE_SHARE: Final = 0.9


STRETCHED: Final = 0.87, 1.15
"""By which sides of half the documents are shorter or longer than those of their images."""


@dataclass(frozen=True, slots=True)
class Phase:
    """What a part of training shows. end: of all steps, 0 to 1."""

    end: float
    grids: tuple[float, ...]
    """How many patches are in images of each of `GRIDS`."""
    heights: tuple[float, float]
    """Bounds of capital letters, in pixels."""
    kinds: dict[DocumentKind | str, float]
    """How often each kind of document, or a scene, is drawn."""


PHASES: Final = (
    Phase(0.2, (4, 2, 1, 0, 0, 0, 1, 1), (20, 44), {"page": 8, "scene": 3}),
    Phase(0.55, (2, 2, 2, 1, 1, 0, 2, 2), (16, 56), {"page": 7, "scene": 3, "lines": 1, "sign": 0.5}),
    Phase(
        1.0,
        (2, 2, 4, 2, 2, 2, 9, 5),
        (13, 80),
        {"page": 6, "scene": 3, "lines": 1, "sign": 0.5, "receipt": 1, "chart": 0.5, "gauge": 0.3},
    ),
)


def phase_at(share: float) -> Phase:
    """The phase after a share of all steps."""
    return next((phase for phase in PHASES if share < phase.end), PHASES[-1])


def draw_image(seed: int, grid: tuple[int, int], phase: Phase) -> tuple[npt.NDArray[np.uint8], Truth]:
    """An image with `SLACK` and what is known of it."""
    rng = random.Random(seed)
    size = grid[1] * PATCH + SLACK, grid[0] * PATCH + SLACK
    kind: Any = rng.choices(tuple(phase.kinds), tuple(phase.kinds.values()))[0]
    if grid in SCENE_GRIDS and rng.random() < SCENE_SHARE:
        kind = "scene"
    if kind in ("receipt", "chart", "gauge") and min(grid) < 12:
        kind = "lines"
    if kind == "scene":
        scene = sample_scene(rng.getrandbits(33))
        return np.asarray(draw_scene(scene).resize(size, Image.Resampling.BICUBIC)), truth_of_scene(scene, size)
    # Letters become wider or narrower than their font has them.
    drawn_size = size if rng.random() < 0.5 else tuple(round(side * rng.uniform(*STRETCHED)) for side in size)
    document = sample_document(rng.getrandbits(33), kind, drawn_size, Style(phase.heights))
    image = draw_document(document).resize(size, Image.Resampling.BICUBIC)
    return np.asarray(image), truth_of_document(document, size)


class ImagePool:
    """A ring of images for each grid. One process writes it, the trainer reads it."""

    def __init__(self, folder: Path, patches: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.sizes = [max(4, patches // (rows * columns)) for rows, columns in GRIDS]
        """Images in each ring."""
        self.made = [multiprocessing.Value("q", 0) for _ in GRIDS]
        self.progress = multiprocessing.Value("d", 0.0)
        """Share of the steps that are done, which the trainer writes."""
        for number in range(len(GRIDS)):
            for name, (shape, kind) in self._shapes(number).items():
                np.memmap(folder / f"{number}-{name}", kind, "w+", shape=shape)

    def _shapes(self, number: int) -> dict[str, tuple[tuple[int, ...], Any]]:
        (rows, columns), count = GRIDS[number], self.sizes[number]
        height, width = rows * PATCH + SLACK, columns * PATCH + SLACK
        return {
            "images": ((count, height, width, 3), np.uint8),
            "maps": ((count, NUM_MAPS, height // CELL_SIZE, width // CELL_SIZE), np.uint8),
            "characters": ((count, MOST_CHARACTERS, CHARACTER_FIELDS), np.int16),
        }

    def open(self, mode: Any) -> list[dict[str, npt.NDArray[Any]]]:
        """The arrays of all grids; mode is numpy's ("r" or "r+")."""
        return [
            {
                name: np.memmap(self._folder / f"{number}-{name}", kind, mode, shape=shape)
                for name, (shape, kind) in self._shapes(number).items()
            }
            for number in range(len(GRIDS))
        ]

    def available(self, number: int) -> int:
        """Images of a grid that may be read."""
        return min(self.made[number].value, self.sizes[number])


def fill(pool: ImagePool, first_seed: int, share: float) -> None:
    """Draw images without end. share: of the time, once the rings that are in use are full."""
    arrays = pool.open("r+")
    for seed in itertools.count(first_seed):
        started = time.monotonic()
        phase = phase_at(pool.progress.value)
        # Not the draws of `draw_image`: kinds and sizes of images are independent.
        rng = random.Random(f"grid {seed}")
        used = [number for number, weight in enumerate(phase.grids) if weight]
        empty = [number for number in used if pool.made[number].value < pool.sizes[number]]
        if empty:
            number = min(empty, key=lambda one: pool.made[one].value / pool.sizes[one])
        else:
            number = rng.choices(range(len(GRIDS)), [w / r / c for w, (r, c) in zip(phase.grids, GRIDS, strict=True)])[
                0
            ]
        image, truth = draw_image(seed, GRIDS[number], phase)
        place = pool.made[number].value % pool.sizes[number]
        for name, value in (("images", image), ("maps", truth.maps), ("characters", truth.characters)):
            arrays[number][name][place] = value
        pool.made[number].value += 1
        if not empty:
            time.sleep((time.monotonic() - started) * (1 / share - 1))


def cropped(
    arrays: dict[str, npt.NDArray[Any]], grid: tuple[int, int], indices: Any, shift: tuple[int, int]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Images and labels of a batch; see `patch_labels`."""
    rows, columns = grid
    x, y = shift
    images = arrays["images"][indices][:, y : y + rows * PATCH, x : x + columns * PATCH]
    return images, patch_labels(arrays["maps"][indices], arrays["characters"][indices], shift, grid)
