"""Images with questions for the decoder, and flat batches of them.

An image comes once, and its questions branch off behind it, as in `training.pixie.rows`. Answers about documents are
written character by character, so that the model copies what patches name.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor

from training.pixie.reading.tower import ReadingTower
from training.pixie.segments import Flat, flatten
from training.pixie.tokenizer import ASSISTANT, BOS, EOS, IMAGE, USER, encode_example
from vlmserve.pixie.document_drawing import draw_document
from vlmserve.pixie.documents import PATCH, SMALLEST_SIDE, Document, DocumentKind, Style, sample_document
from vlmserve.pixie.drawing import draw_scene
from vlmserve.pixie.questions import single
from vlmserve.pixie.reading import ReadingQuestion, ask_document
from vlmserve.pixie.scenes import sample_scene

SCENE_SHARE: Final = 0.25
KINDS: Final[dict[DocumentKind, float]] = {"lines": 6, "sign": 2, "receipt": 4, "chart": 1.5, "gauge": 1}
QUESTIONS: Final = 6
"""About each image."""
MOST_PATCHES: Final = 256
"""Of an image in training; larger ones cost too much."""
LONGEST: Final = 160
"""Tokens of a question with its answer."""

Branch = tuple[list[int], list[bool]]
"""Tokens, and which of them the model is to say."""


@dataclass(frozen=True, slots=True)
class Sample:
    """An image with its questions."""

    image: npt.NDArray[np.uint8]
    """``[height, width, 3]``, of whole patches."""
    branches: list[Branch]

    @property
    def grid(self) -> tuple[int, int]:
        return self.image.shape[0] // PATCH, self.image.shape[1] // PATCH


class Batch(NamedTuple):
    """What `ReadingDecoder.forward` takes except for features, and the tokens that it is to predict."""

    tokens: Tensor
    positions: Tensor
    flat: Flat
    said: Tensor
    targets: Tensor


def encode_by_character(tokenizer: Tokenizer, text: str) -> list[int]:
    """A token for each character (several for one that the tokenizer does not have)."""
    return [token for character in text for token in tokenizer.encode(character, add_special_tokens=False).ids]


def encode_question(tokenizer: Tokenizer, question: ReadingQuestion) -> Branch:
    """A question and its answer, behind the image. Names that a schema decides stay whole, and are not learned."""
    asked = [*tokenizer.encode(question.question, add_special_tokens=False).ids, ASSISTANT]
    ids, said = list(asked), [False] * len(asked)
    place = 0
    for start, end in (*question.given, (len(question.answer), len(question.answer))):
        free = encode_by_character(tokenizer, question.answer[place:start])
        given = tokenizer.encode(question.answer[start:end], add_special_tokens=False).ids
        ids += [*free, *given]
        said += [True] * len(free) + [False] * len(given)
        place = end
    return [*ids, EOS], [*said, True]


def fitting_size(size: tuple[int, int]) -> tuple[int, int]:
    """The size in whole patches to which Qwen2-VL's image processor resizes a small image, width first."""
    width, height = (max(PATCH, round(side / PATCH) * PATCH) for side in size)
    if width * height < SMALLEST_SIDE**2:
        scale = (SMALLEST_SIDE**2 / (size[0] * size[1])) ** 0.5
        width, height = (int(np.ceil(side * scale / PATCH)) * PATCH for side in size)
    return width, height


def _about_document(document: Document, tokenizer: Tokenizer, rng: random.Random) -> list[Branch]:
    asked = [ask_document(document, rng) for _ in range(QUESTIONS)]
    branches = [encode_question(tokenizer, one) for one in asked if one is not None]
    return [branch for branch in branches if len(branch[0]) <= LONGEST]


def sample_row(seed: int, tokenizer: Tokenizer, heights: tuple[float, float] = (14, 48)) -> Sample:
    """Sample an image and ask about it."""
    rng = random.Random(seed)
    while True:
        if rng.random() < SCENE_SHARE:
            scene = sample_scene(rng.getrandbits(33))
            size = fitting_size(scene.size)
            image = draw_scene(scene).resize(size, Image.Resampling.BICUBIC)
            branches = []
            for _ in range(2 * QUESTIONS):
                ids, said = encode_example(tokenizer, single(scene, rng))
                if ids.count(IMAGE) == 1 and ids[1] == USER and ids[2] == IMAGE:
                    branches.append((ids[3:], said[3:]))
        else:
            kind = rng.choices(tuple(KINDS), tuple(KINDS.values()))[0]
            document = sample_document(rng.getrandbits(33), kind, style=Style(heights))
            image, size = draw_document(document), document.size
            branches = _about_document(document, tokenizer, rng)
        if branches and size[0] * size[1] <= MOST_PATCHES * PATCH**2:
            return Sample(np.asarray(image), branches)


def image_positions(grid: tuple[int, int], first: int) -> npt.NDArray[np.int64]:
    """Positions of the patches of an image in time, rows and columns, ``[3, patches]``."""
    rows, columns = np.indices(grid).reshape(2, -1)
    return np.stack([np.full_like(rows, first), rows + first, columns + first])


def flat_batch(samples: Sequence[Sample], dtype: torch.dtype) -> Batch:
    """Lay samples behind each other; each is a group of its own."""
    tokens: list[int] = []
    said: list[bool] = []
    groups: list[int] = []
    branches: list[int] = []
    positions: list[npt.NDArray[Any]] = []
    for number, sample in enumerate(samples):
        patches = sample.grid[0] * sample.grid[1]
        common = [BOS, USER, *[IMAGE] * patches]
        tokens += common
        said += [False] * len(common)
        branches += [0] * len(common)
        start = np.broadcast_to(np.arange(2), (3, 2))
        positions += [start, image_positions(sample.grid, 2)]
        first = 2 + max(sample.grid)
        for index, (own, speaks) in enumerate(sample.branches, start=1):
            tokens += own
            said += speaks
            branches += [index] * len(own)
            positions.append(np.broadcast_to(np.arange(first, first + len(own)), (3, len(own))))
        groups += [number] * (len(tokens) - len(groups))
    speaking = torch.tensor(said)
    ids = torch.tensor(tokens)
    flat = flatten(torch.tensor([groups]), torch.tensor([branches]), dtype)
    before = torch.cat((speaking[1:], torch.zeros(1, dtype=torch.bool)))
    return Batch(ids, torch.from_numpy(np.concatenate(positions, 1)), flat, before, ids[speaking])


@torch.inference_mode()
def see(tower: ReadingTower, images: Sequence[npt.NDArray[np.uint8]]) -> list[Tensor]:
    """Features of images of any sizes, ``[patches, WIDTH]`` each; images of one size go together."""
    found: list[Tensor | None] = [None] * len(images)
    by_size: dict[tuple[int, ...], list[int]] = {}
    for index, image in enumerate(images):
        by_size.setdefault(image.shape, []).append(index)
    for indices in by_size.values():
        for start in range(0, len(indices), 32):
            some = indices[start : start + 32]
            features = tower(torch.from_numpy(np.stack([images[index] for index in some])))
            for index, one in zip(some, features, strict=True):
                found[index] = one.clone()
    return [one for one in found if one is not None]
