"""Training data made ahead of time by worker processes, in a ring of memory-mapped arrays.

Images come with their dense labels and with several packed rows of questions. A row says what is common to its
questions once (the images, mostly) and lets each question branch off from there, seeing that and itself only: one
look at an image teaches ten answers.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image
from tokenizers import Tokenizer

from training.pixie.export import IMAGE_SIZE, IMAGE_TOKENS
from training.pixie.labels import GRID, LABELS, dense_labels
from training.pixie.tokenizer import BOS, IMAGE, encode_example
from vlmserve.pixie.drawing import draw_scene
from vlmserve.pixie.phrasings import SYSTEM_PROMPTS
from vlmserve.pixie.questions import Example, matching_pair, pair, single, text_only
from vlmserve.pixie.scenes import Kind, Scene, sample_scene

ROW_LENGTH: Final = 256
ROWS_PER_IMAGE: Final = 3
IMAGES_PER_ROW: Final = 3
PADDING_GROUP: Final = 254
KINDS: Final[tuple[Kind, ...]] = ("grid", "one", "number", "word")
PAIR_SHARE: Final = 0.14
REFUSAL_SHARE: Final = 0.02


@dataclass(frozen=True, slots=True)
class Mixture:
    """How often a part of training shows each kind of image, in the order of `KINDS`, and asks what about it."""

    kinds: tuple[float, ...]
    tasks: dict[Kind, dict[str, float]]


BROAD: Final = Mixture(
    (0.62, 0.12, 0.11, 0.15),
    {
        "grid": {"place": 5, "attribute": 13, "count": 30, "describe": 12, "where": 26, "exists": 14, "follow_up": 8},
        "one": {"place": 6, "attribute": 20, "count": 6, "describe": 22, "where": 30, "exists": 12, "follow_up": 6},
        "number": {"number": 68, "describe": 18, "exists": 7, "follow_up": 7},
        "word": {"word": 68, "describe": 18, "exists": 7, "follow_up": 7},
    },
)
"""More of what takes long to learn."""
COUNTING: Final = Mixture(
    (0.84, 0.06, 0.04, 0.06),
    BROAD.tasks
    | {"grid": {"place": 3, "attribute": 7, "count": 39, "describe": 3, "where": 26, "exists": 18, "follow_up": 4}},
)
"""Mostly what takes longest, when the rest is nearly always right."""
READING: Final = Mixture(
    (0.53, 0.07, 0.21, 0.19),
    BROAD.tasks
    | {"grid": {"place": 5, "attribute": 10, "count": 28, "describe": 22, "where": 16, "exists": 13, "follow_up": 6}},
)
"""What fell behind meanwhile: characters and whole lists."""

Encoded = tuple[list[int], list[bool]]
Group = tuple[list[int], list[Encoded]]
"""Tokens that all its branches see, and the branches, each with which of its tokens the model is to say. An image is a
single placeholder."""


def squash(scene: Scene) -> npt.NDArray[np.uint8]:
    """The image of a scene as the image processor resizes it, ``[height, width, 3]``."""
    return np.asarray(draw_scene(scene).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC))


class Pool:
    """A ring of `size` images with their labels and rows. Workers write it, the trainer reads it."""

    ROW_FIELDS: Final = {"tokens": np.int16, "positions": np.int16, "groups": np.uint8, "branches": np.uint8}

    def __init__(self, folder: Path, size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.size = folder, size
        self.made: Synchronized[int] = multiprocessing.Value("q", 0)
        """Images made so far."""
        rows = size * ROWS_PER_IMAGE
        self.shapes: dict[str, tuple[tuple[int, ...], Any]] = {
            "images": ((size, IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8),
            "labels": ((size, len(LABELS), GRID, GRID), np.uint8),
            "row_images": ((rows, IMAGES_PER_ROW), np.int32),
            "said": ((rows, ROW_LENGTH), np.bool_),
            **{name: ((rows, ROW_LENGTH), kind) for name, kind in self.ROW_FIELDS.items()},
        }
        for name, (shape, kind) in self.shapes.items():
            np.memmap(folder / name, kind, "w+", shape=shape)

    def open(self, mode: Any) -> dict[str, npt.NDArray[Any]]:
        """All arrays; ``mode`` is numpy's ("r" or "r+")."""
        return {name: np.memmap(self.folder / name, kind, mode, shape=s) for name, (s, kind) in self.shapes.items()}

    @property
    def available(self) -> int:
        """Images that may be read."""
        return min(self.made.value, self.size)


def _expand(encoded: Encoded) -> Encoded:
    ids, said = [], []
    for token, speaks in zip(*encoded, strict=True):
        count = IMAGE_TOKENS if token == IMAGE else 1
        ids += [token] * count
        said += [speaks] * count
    return ids, said


def pack(groups: Sequence[Group], length: int = ROW_LENGTH) -> dict[str, npt.NDArray[Any]]:
    """Lay groups behind each other into one row of `length` tokens; what does not fit is left out. An image takes
    `IMAGE_TOKENS` placeholders.

    groups: who belongs together. branches: 0 for what all of a group see, else the branch. positions: those that a
    token would have if its branch were alone.
    """
    row: dict[str, npt.NDArray[Any]] = {name: np.zeros(length, kind) for name, kind in Pool.ROW_FIELDS.items()}
    row["said"] = np.zeros(length, np.bool_)
    filled = 0
    for number, group in enumerate(groups):
        common = _expand((group[0], [False] * len(group[0])))[0]
        branches = [_expand(branch) for branch in group[1]]
        if filled + len(common) + min(len(ids) for ids, _ in branches) > length:
            break
        parts = [(0, common, [False] * len(common), 0)]
        parts += [(index, ids, said, len(common)) for index, (ids, said) in enumerate(branches, start=1)]
        for branch, ids, said, first in parts:
            end = filled + len(ids)
            if end > length:
                continue
            row["tokens"][filled:end] = ids
            row["positions"][filled:end] = range(first, first + len(ids))
            row["groups"][filled:end] = number
            row["branches"][filled:end] = branch
            row["said"][filled:end] = said
            filled = end
    row["groups"][filled:] = PADDING_GROUP
    return row


def apart(tokenizer: Tokenizer, example: Example) -> Group:
    """A conversation of its own, its images behind the question's text."""
    return [], [encode_example(tokenizer, replace(example, text_first=True))]


def branching(tokenizer: Tokenizer, examples: Iterable[Example]) -> Group:
    """Conversations that begin with the same images and branch off behind them."""
    common: list[int] = []
    branches = []
    for example in examples:
        ids, said = encode_example(tokenizer, replace(example, text_first=False))
        start = len(ids) - ids[::-1].index(IMAGE)
        common = ids[:start]
        branches.append((ids[start:], said[start:]))
    return common, branches


class RowMaker:
    """Draws scenes and asks about them, deterministically from each seed."""

    def __init__(self, tokenizer: Tokenizer, mixture: Mixture = BROAD) -> None:
        self._tokenizer, self._mixture = tokenizer, mixture

    def scenes(self, seed: int, rng: random.Random) -> tuple[Scene, ...]:
        """One scene, or two to compare."""
        if rng.random() < PAIR_SHARE:
            return matching_pair(seed, rng)
        return (sample_scene(seed, rng.choices(KINDS, self._mixture.kinds)[0]),)

    def row(self, scenes: tuple[Scene, ...], index: int, rng: random.Random) -> tuple[list[Group], tuple[int, ...]]:
        """Groups of a row about the scene with that index, and the indices of the images in their order."""
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.1 else None
        drawn = rng.random()
        if len(scenes) == 2 and drawn < 0.5:
            if rng.random() < 0.25:
                return [apart(self._tokenizer, replace(pair(*scenes, rng), system=system))], (0, 1)
            return self._branching(lambda: pair(*scenes, rng), system, 7), (0, 1)
        scene = scenes[index]
        drawn = rng.random()
        if drawn < 0.14:
            twice = [apart(self._tokenizer, replace(self._ask(scene, rng), system=system)) for _ in range(2)]
            return twice, (index, index)
        if drawn < 0.18:
            texts = [encode_example(self._tokenizer, text_only(rng)) for _ in range(12)]
            return [([BOS], [(ids[1:], said[1:]) for ids, said in texts])], ()
        return self._branching(lambda: self._ask(scene, rng), system, 12), (index,)

    def _ask(self, scene: Scene, rng: random.Random) -> Example:
        shares = self._mixture.tasks[scene.kind]
        task = rng.choices(tuple(shares), tuple(shares.values()))[0]
        return single(scene, rng, "refusal" if rng.random() < REFUSAL_SHARE else task)

    def _branching(self, ask: Callable[[], Example], system: str | None, count: int) -> list[Group]:
        return [branching(self._tokenizer, (replace(ask(), system=system) for _ in range(count)))]


def fill(pool: Pool, tokenizer_file: Path, first_seed: int, pause: float, mixture: Mixture) -> None:
    """A worker: fills the ring as fast as it can, then goes round with `pause` seconds between images."""
    # Whoever draws waits for whoever learns: one thread that is late holds up all others of a product.
    os.nice(10)
    maker = RowMaker(Tokenizer.from_file(str(tokenizer_file)), mixture)
    arrays = pool.open("r+")
    made = 0
    for seed in itertools.count(first_seed):
        rng = random.Random(seed)
        scenes = maker.scenes(seed, rng)
        slots = [(made + offset) % pool.size for offset in range(len(scenes))]
        for slot, scene in zip(slots, scenes, strict=True):
            arrays["images"][slot] = squash(scene)
            arrays["labels"][slot] = dense_labels(scene)
        for index, slot in enumerate(slots):
            for number in range(slot * ROWS_PER_IMAGE, (slot + 1) * ROWS_PER_IMAGE):
                groups, images = maker.row(scenes, index, rng)
                row = pack(groups)
                count = int((row["tokens"] == IMAGE).sum()) // IMAGE_TOKENS
                used = [slots[image] for image in images[:count]]
                arrays["row_images"][number] = used + [-1] * (IMAGES_PER_ROW - len(used))
                for name, values in row.items():
                    arrays[name][number] = values
        made += len(slots)
        pool.made.value = made
        if made > pool.size:
            time.sleep(pause)
