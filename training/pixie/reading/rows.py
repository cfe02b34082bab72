"""Images with questions for the decoder, and flat batches of them.

Images come once, and their questions branch off behind them, as in `training.pixie.rows`. Answers about documents are
written character by character, so that the model copies what patches name.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor

from training.pixie.form_rows import FormRowMaker
from training.pixie.reading.labels import READING_LABELS, patch_labels, truth_of_document, truth_of_scene
from training.pixie.reading.tower import ReadingTower
from training.pixie.rows import Encoded, Group, branching
from training.pixie.segments import Flat, flatten
from training.pixie.skills import sample_questions
from training.pixie.tokenizer import ASSISTANT, BOS, EOS, IMAGE, SYSTEM, USER
from vlmserve.pixie.document_drawing import draw_document
from vlmserve.pixie.documents import LARGEST_SIDE, PATCH, Document, DocumentKind, Style, sample_document
from vlmserve.pixie.drawing import draw_scene
from vlmserve.pixie.phrasings import SYSTEM_PROMPTS
from vlmserve.pixie.reading import ReadingQuestion, ask_document
from vlmserve.pixie.scenes import Scene

DOCUMENT_SHARE: Final = 0.62
EARLIER_SHARE: Final = 0.4
"""Of samples about scenes, which ask only what pixie knew before; the others are mixed as in `FormRowMaker.rows`."""
KINDS: Final[dict[DocumentKind, float]] = {
    "page": 5, "lines": 9, "sign": 2.5, "receipt": 3, "chart": 1.5, "gauge": 0.7,
}  # fmt: skip
HEIGHTS: Final = (14, 48)
"""Bounds of capital letters in documents, in pixels."""
PAGE_HEIGHTS: Final = (14, 22)
"""Those of pages, which teach many characters at once."""
SMALL_SHARE: Final = 0.75
"""Of documents; their patches cost most of a step."""
QUESTIONS: Final = 10
"""About each document."""
TEXT_FIRST_SHARE: Final = 0.12
"""Of documents, behind a question."""
SYSTEM_SHARE: Final = 0.08
LEAST_PIXELS: Final = 144**2
"""Smaller images are enlarged, so that they have at least as many patches as images of the first pixie."""
LONGEST: Final = 200
"""Tokens of a question about a document with its answer."""
MOST_TEXT: Final = 420
"""Tokens of all questions of a sample with their answers."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Questions about images."""

    grids: tuple[tuple[int, int], ...]
    """Rows and columns of patches of each image."""
    shown: tuple[int, ...]
    """The image of each placeholder, in the order of tokens."""
    groups: list[Group]

    @property
    def length(self) -> int:
        """Tokens, with one for each patch."""
        text = sum(len(common) + sum(len(ids) for ids, _ in branches) for common, branches in self.groups)
        return text + sum(self.grids[image][0] * self.grids[image][1] - 1 for image in self.shown)


class Drawn(NamedTuple):
    """A sample with its images."""

    sample: Sample
    images: tuple[npt.NDArray[np.uint8], ...]
    """``[height, width, 3]`` each."""
    labels: tuple[npt.NDArray[np.uint8], ...]
    """What the tower is to name, ``[kinds, patches]`` each."""


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


def encode_question(tokenizer: Tokenizer, question: ReadingQuestion, *, image: bool = False) -> Encoded:
    """A question and its answer. Names that a schema decides stay whole, and are not learned.

    image: with a placeholder behind the question.
    """
    asked = [*tokenizer.encode(question.question, add_special_tokens=False).ids, *[IMAGE] * image, ASSISTANT]
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
    """The size in whole patches to which Qwen2-VL's image processor resizes an image, width first."""
    width, height = (max(PATCH, round(side / PATCH) * PATCH) for side in size)
    pixels = size[0] * size[1]
    if width * height > LARGEST_SIDE**2:
        scale = (pixels / LARGEST_SIDE**2) ** 0.5
        width, height = (max(PATCH, int(side / scale / PATCH) * PATCH) for side in size)
    elif width * height < LEAST_PIXELS:
        scale = (LEAST_PIXELS / pixels) ** 0.5
        width, height = (int(np.ceil(side * scale / PATCH)) * PATCH for side in size)
    return width, height


def fitted(image: Image.Image) -> npt.NDArray[np.uint8]:
    """An image as the image processor resizes it."""
    size = fitting_size(image.size)
    return np.asarray(image if size == image.size else image.resize(size, Image.Resampling.BICUBIC))


def small_size(kind: DocumentKind, rng: random.Random) -> tuple[int, int]:
    """A size with about half as many patches as documents have on average, width first."""
    least, most = {"page": (128, 224), "lines": (112, 240), "sign": (112, 240)}.get(kind, (208, 288))
    sides = [rng.randrange(least, most + 1, PATCH) for _ in range(2)]
    return max(sides), min(sides)


def _kept(branches: Sequence[Encoded], most: int) -> list[Encoded]:
    """The first branches, of at most so many tokens together."""
    kept: list[Encoded] = []
    for branch in branches:
        most -= len(branch[0])
        if most >= 0 or not kept:
            kept.append(branch)
    return kept


def _about_document(document: Document, tokenizer: Tokenizer, rng: random.Random) -> Group:
    asked = [ask_document(document, rng) for _ in range(QUESTIONS)]
    # An answer that the document has already taught teaches nothing more.
    questions = list({(one.answer, one.schema): one for one in asked if one is not None}.values())
    start = [BOS]
    if rng.random() < SYSTEM_SHARE:
        start += [SYSTEM, *tokenizer.encode(rng.choice(SYSTEM_PROMPTS), add_special_tokens=False).ids]
    start.append(USER)
    if questions and rng.random() < TEXT_FIRST_SHARE:
        ids, said = encode_question(tokenizer, questions[0], image=True)
        return [], [([*start, *ids], [*[False] * len(start), *said])]
    branches = [encode_question(tokenizer, one) for one in questions]
    return [*start, IMAGE], _kept([branch for branch in branches if len(branch[0]) <= LONGEST], MOST_TEXT)


def sample_row(seed: int, tokenizer: Tokenizer, documents: float = DOCUMENT_SHARE) -> Drawn:
    """Sample images and ask about them. documents: share of samples about documents; the others are about scenes."""
    rng = random.Random(seed)
    if rng.random() < documents:
        kind = rng.choices(tuple(KINDS), tuple(KINDS.values()))[0]
        while True:
            size = small_size(kind, rng) if kind == "page" or rng.random() < SMALL_SHARE else None
            heights = PAGE_HEIGHTS if kind == "page" else HEIGHTS
            document = sample_document(rng.getrandbits(33), kind, size, Style(heights))
            group = _about_document(document, tokenizer, rng)
            if group[1]:
                return _drawn([document], (0,), [group])
    maker = FormRowMaker(tokenizer)
    scenes = maker.scenes(rng.getrandbits(32))
    groups, shown = maker.earlier(scenes, rng) if rng.random() < EARLIER_SHARE else rng.choice(maker.rows(scenes, rng))
    used = sorted(set(shown))
    newline = tokenizer.encode("\n", add_special_tokens=False).ids
    kept = [
        (
            separate_images((common, [False] * len(common)), newline)[0],
            [separate_images(branch, newline) for branch in _kept(branches, MOST_TEXT)],
        )
        for common, branches in groups
    ]
    return _drawn([scenes[index] for index in used], [used.index(index) for index in shown], kept)


def separate_images(encoded: Encoded, between: Sequence[int]) -> Encoded:
    """Write tokens between an image and the next, as `export.TEMPLATE` does."""
    ids: list[int] = []
    said: list[bool] = []
    for token, speaks in zip(*encoded, strict=True):
        added = [*between, token] if token == IMAGE and ids and ids[-1] == IMAGE else [token]
        ids += added
        said += [speaks] * len(added)
    return ids, said


def sample_skill_row(seed: int, skill: str, tokenizer: Tokenizer) -> Drawn:
    """Sample an image with questions that an adapter answers."""
    examples = sample_questions(seed, skill, 10)
    return _drawn([examples[0].scenes[0]], (0,), [branching(tokenizer, examples)])


def draw_labelled(shown: Document | Scene) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """The image, ``[height, width, 3]``, and what the tower is to name, ``[kinds, patches]``."""
    pixels = fitted(draw_scene(shown) if isinstance(shown, Scene) else draw_document(shown))
    height, width, _ = pixels.shape
    size = width, height
    truth = truth_of_scene(shown, size) if isinstance(shown, Scene) else truth_of_document(shown, size)
    labels = patch_labels(truth.maps[None], truth.characters[None], (0, 0), (height // PATCH, width // PATCH))
    return pixels, labels.reshape(len(READING_LABELS), -1)


def _drawn(shown: Sequence[Document | Scene], order: Sequence[int], groups: list[Group]) -> Drawn:
    """Draw what a sample is about. order: which of it each placeholder shows."""
    images, labels = zip(*map(draw_labelled, shown), strict=True) if shown else ((), ())
    grids = tuple((pixels.shape[0] // PATCH, pixels.shape[1] // PATCH) for pixels in images)
    return Drawn(Sample(grids, tuple(order), groups), images, labels)


def image_positions(grid: tuple[int, int], first: int) -> npt.NDArray[np.int64]:
    """Positions of the patches of an image in time, rows and columns, ``[3, patches]``."""
    rows, columns = np.indices(grid).reshape(2, -1)
    return np.stack([np.full_like(rows, first), rows + first, columns + first])


class _Laid(NamedTuple):
    """Tokens with a placeholder for each patch, which of them are said, positions, and the next position."""

    tokens: list[int]
    said: list[bool]
    positions: list[npt.NDArray[np.int64]]
    end: int


def _lay(ids: Sequence[int], said: Sequence[bool], grids: Iterator[tuple[int, int]], first: int) -> _Laid:
    tokens: list[int] = []
    spoken: list[bool] = []
    positions: list[npt.NDArray[np.int64]] = []
    for token, speaks in zip(ids, said, strict=True):
        if token == IMAGE:
            grid = next(grids)
            count, step = grid[0] * grid[1], max(grid)
            positions.append(image_positions(grid, first))
        else:
            count = step = 1
            positions.append(np.full((3, 1), first))
        tokens += [token] * count
        spoken += [speaks] * count
        first += step
    return _Laid(tokens, spoken, positions, first)


def flat_batch(samples: Sequence[Sample], dtype: torch.dtype) -> Batch:
    """Lay samples behind each other."""
    tokens: list[int] = []
    said: list[bool] = []
    groups: list[int] = []
    branches: list[int] = []
    positions: list[npt.NDArray[Any]] = []
    number = 0
    for sample in samples:
        grids = iter([sample.grids[image] for image in sample.shown])
        for common, own in sample.groups:
            shared = _lay(common, [False] * len(common), grids, 0)
            for index, laid in enumerate((shared, *(_lay(*branch, grids, shared.end) for branch in own))):
                tokens += laid.tokens
                said += laid.said
                positions += laid.positions
                branches += [index] * len(laid.tokens)
            groups += [number] * (len(tokens) - len(groups))
            number += 1
    speaking = torch.tensor(said)
    ids = torch.tensor(tokens)
    flat = flatten(torch.tensor([groups]), torch.tensor([branches]), dtype)
    before = torch.cat((speaking[1:], torch.zeros(1, dtype=torch.bool)))
    return Batch(ids, torch.from_numpy(np.concatenate(positions, 1)), flat, before, ids[speaking])


def see(tower: ReadingTower, images: Sequence[npt.NDArray[np.uint8]]) -> list[Tensor]:
    """Features of images of any sizes, ``[patches, WIDTH]`` each; images of one size go together."""
    by_size: dict[tuple[int, ...], list[int]] = {}
    for index, image in enumerate(images):
        by_size.setdefault(image.shape, []).append(index)
    order = [index for indices in by_size.values() for index in indices]
    batches = [torch.from_numpy(np.stack([images[index] for index in indices])) for indices in by_size.values()]
    patches = [images[index].shape[0] * images[index].shape[1] // PATCH**2 for index in order]
    found = dict(zip(order, tower.encode(batches).split(patches), strict=True))
    return [found[index] for index in range(len(images))]
