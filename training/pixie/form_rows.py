"""Rows of forms, calls of functions and pixie's other questions, with the vision tower's features of their images."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.pixie.export import IMAGE_TOKENS
from training.pixie.rows import IMAGES_PER_ROW, READING, Group, Mixture, RowMaker, branching, pack, squash
from training.pixie.skills import sample_questions
from training.pixie.tokenizer import IMAGE, encode_example
from vlmserve.pixie.calls import Dialog, ask_all_with_tools
from vlmserve.pixie.forms import Form, Span, ask_form, ask_suggested
from vlmserve.pixie.phrasings import SYSTEM_PROMPTS
from vlmserve.pixie.questions import Example
from vlmserve.pixie.scenes import Scene

LENGTH: Final = 384
ROWS_PER_IMAGE: Final = 3
MIXTURE: Final = Mixture((0.59, 0.1, 0.14, 0.17), READING.tasks)
FORM_SHARE, CALL_SHARE, COPY_SHARE = 0.38, 0.18, 0.1
"""Of the rows; the others ask what pixie knew before."""
SUGGESTED_SHARE: Final = 0.08
FIRST_SEED: Final = 5_000_000_000
"""Scenes from here on are in no earlier stage."""
IMAGES_AT_ONCE: Final = 64


@dataclass(frozen=True)
class Rows:
    """Packed rows (`rows.pack`) in arrays, and the features of the images that they show."""

    arrays: dict[str, Tensor]
    features: Tensor
    """bfloat16 ``[images, patches, width]``."""

    def __len__(self) -> int:
        return len(self.arrays["tokens"])

    def save(self, path: Path) -> None:
        partial = path.with_suffix(".tmp")
        torch.save({"arrays": self.arrays, "features": self.features}, partial)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Rows:
        return cls(**torch.load(path, mmap=True))

    def batch(self, indices: Sequence[int]) -> tuple[list[Tensor], Tensor, Tensor]:
        """What `Decoder.forward` takes up to `said`, its features, and `said` itself."""
        chosen = torch.as_tensor(indices)
        taken = [self.arrays[name][chosen].long() for name in ("tokens", "positions", "groups", "branches")]
        used = self.arrays["row_images"][chosen].flatten()
        said = self.arrays["said"][chosen]
        return taken, self.features[used[used >= 0].long()], said


def encode_given(tokenizer: Tokenizer, example: Example, given: Sequence[Span]) -> tuple[list[int], list[bool]]:
    """`encode_example`, without what is given of the first answer."""
    ids, said = encode_example(tokenizer, example)
    first = said.index(True)
    offsets = tokenizer.encode(example.turns[0][1], add_special_tokens=False).offsets
    for index, (start, _) in enumerate(offsets):
        said[first + index] = not any(low <= start < high for low, high in given)
    return ids, said


def _form_example(scene: Scene, form: Form, system: str | None) -> Example:
    return Example("form", (scene,), ((form.question, form.answer),), system)


def _dialog_example(scene: Scene | None, dialog: Dialog) -> Example:
    return Example("call", () if scene is None else (scene,), dialog.turns, dialog.system)


def _branches(tokenizer: Tokenizer, asked: Sequence[tuple[Example, Sequence[Span]]]) -> Group:
    """Conversations that begin with the same system prompt and images. See `rows.branching`."""
    common, branches = branching(tokenizer, [example for example, _ in asked])
    trimmed = []
    for (example, given), (ids, said) in zip(asked, branches, strict=True):
        _, kept = encode_given(tokenizer, example, given)
        trimmed.append((ids, kept[len(kept) - len(said) :]))
    return common, trimmed


class FormRowMaker:
    """Makes rows about an image, deterministically from a seed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._others = RowMaker(tokenizer, MIXTURE)

    def scenes(self, seed: int) -> tuple[Scene, ...]:
        return self._others.scenes(seed, random.Random(seed))

    def rows(self, scenes: tuple[Scene, ...], rng: random.Random) -> list[tuple[list[Group], tuple[int, ...]]]:
        """Groups of each row, and the indices of the scenes whose images it shows."""
        made = []
        for number in range(ROWS_PER_IMAGE * len(scenes)):
            index = number % len(scenes)
            drawn = rng.random()
            if drawn < FORM_SHARE:
                made.append(self._forms(scenes[index], index, rng))
            elif drawn < FORM_SHARE + CALL_SHARE:
                made.append(self._calls(scenes[index], index, rng))
            elif drawn < FORM_SHARE + CALL_SHARE + COPY_SHARE:
                made.append((self._copies(rng), ()))
            else:
                made.append(self._others.row(scenes, index, rng))
        return made

    def earlier(self, scenes: tuple[Scene, ...], rng: random.Random) -> tuple[list[Group], tuple[int, ...]]:
        """A row of questions that pixie knew before, as `rows` makes them."""
        index = rng.randrange(len(scenes))
        return self._others.row(scenes, index, rng)

    def _forms(self, scene: Scene, index: int, rng: random.Random) -> tuple[list[Group], tuple[int, ...]]:
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.1 else None
        asked: list[tuple[Example, Sequence[Span]]] = []
        for _ in range(9):
            if rng.random() < SUGGESTED_SHARE:
                asked.append((Example("suggested", (scene,), (ask_suggested(scene, rng),), system), ()))
            else:
                form = ask_form(scene, rng)
                asked.append((_form_example(scene, form, system), form.given))
        if rng.random() < 0.12:
            groups = [self._apart(*one) for one in asked[:2]]
            return groups, (index, index)
        return [_branches(self._tokenizer, asked)], (index,)

    def _calls(self, scene: Scene, index: int, rng: random.Random) -> tuple[list[Group], tuple[int, ...]]:
        asked = [(_dialog_example(scene, dialog), dialog.given) for dialog in ask_all_with_tools(scene, rng)]
        return [_branches(self._tokenizer, asked)], (index,)

    def _copies(self, rng: random.Random) -> list[Group]:
        """Calls that repeat words of the question, and answers that repeat results, without an image."""
        groups = []
        for _ in range(8):
            dialogs = ask_all_with_tools(None, rng)
            dialogs.sort(key=lambda dialog: not dialog.calls)
            dialog = dialogs[0] if rng.random() < 0.85 else dialogs[-1]
            groups.append(self._apart(_dialog_example(None, dialog), dialog.given))
        return groups

    def _apart(self, example: Example, given: Sequence[Span]) -> Group:
        return [], [encode_given(self._tokenizer, replace(example, text_first=True), given)]


def _packed(made: tuple[list[Group], tuple[int, ...]], first_image: int) -> dict[str, Any]:
    groups, images = made
    row = pack(groups, LENGTH)
    count = int((row["tokens"] == IMAGE).sum()) // IMAGE_TOKENS
    used = [first_image + image for image in images[:count]]
    row["row_images"] = np.array(used + [-1] * (IMAGES_PER_ROW - len(used)), np.int32)
    return row


def make_rows(tokenizer: Tokenizer, tower: nn.Module, count: int, advance: Callable[[int], None]) -> Rows:
    """Make rows about `count` images. advance: gets the number of images that are done."""
    maker = FormRowMaker(tokenizer)
    rows: list[dict[str, Any]] = []
    features: list[Tensor] = []
    images: list[Any] = []
    seed = FIRST_SEED
    while len(features) * IMAGES_AT_ONCE < count:
        scenes = maker.scenes(seed)
        first = len(features) * IMAGES_AT_ONCE + len(images)
        rows += [_packed(made, first) for made in maker.rows(scenes, random.Random(seed))]
        images += [squash(scene) for scene in scenes]
        seed += 1
        while len(images) >= IMAGES_AT_ONCE:
            features.append(_see(tower, images[:IMAGES_AT_ONCE]))
            del images[:IMAGES_AT_ONCE]
            advance(len(features) * IMAGES_AT_ONCE)
    available = len(features) * IMAGES_AT_ONCE
    kept = [row for row in rows if row["row_images"].max() < available]
    return Rows(_stacked(kept), torch.cat(features))


def make_skill_rows(tokenizer: Tokenizer, tower: nn.Module, skill: str, count: int) -> Rows:
    """Make rows of questions that an adapter answers."""
    rows, images = [], []
    for number in range(count):
        examples = sample_questions(FIRST_SEED // 64 + number, skill, 12)
        groups = [branching(tokenizer, examples)]
        rows.append(_packed((groups, (0,)), number))
        images.append(squash(examples[0].scenes[0]))
    parts = [_see(tower, images[start : start + IMAGES_AT_ONCE]) for start in range(0, count, IMAGES_AT_ONCE)]
    return Rows(_stacked(rows), torch.cat(parts))


def _see(tower: nn.Module, images: Sequence[Any]) -> Tensor:
    with torch.inference_mode():
        seen: Tensor = tower(torch.from_numpy(np.stack(images)))
    return seen.to(torch.bfloat16).clone()


def _stacked(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
