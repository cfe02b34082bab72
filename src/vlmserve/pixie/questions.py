"""Convert scenes to examples: conversations about zero to two images, with one right answer to each question."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final, Literal

from vlmserve.pixie.conversations import ask_pair, follow_up_turns
from vlmserve.pixie.phrasings import SYSTEM_PROMPTS
from vlmserve.pixie.refusals import ask_refused
from vlmserve.pixie.scenes import HELD_OUT_SEEDS, Kind, Scene, sample_scene
from vlmserve.pixie.tasks import ASK, Turn

#: All tasks. Core tasks are the purpose of the model.
TASKS: Final[dict[str, Literal["core", "further"]]] = {
    "place": "core",
    "attribute": "core",
    "count": "core",
    "describe": "core",
    "number": "core",
    "where": "core",
    "exists": "core",
    "word": "further",
    "pair": "further",
    "follow_up": "further",
    "refusal": "further",
}

#: Tasks whose answers have a form: JSON that fits a schema, calls of functions, and answers after a result. The names,
#: enums, functions and phrasings of new ones are never in training.
FORM_TASKS: Final[tuple[str, ...]] = ("form", "new_form", "call", "new_call", "result")

#: Tasks about documents, in fonts, layouts, phrasings and field names that are never in training. ``receipt`` is a form
#: with the total, ``box`` the place of a text.
READING_TASKS: Final[tuple[str, ...]] = ("text", "receipt", "total", "price", "bar", "gauge", "box")

#: The scene kinds that suit each task.
TASK_KINDS: Final[dict[str, tuple[Kind, ...]]] = {
    "place": ("grid", "one"),
    "attribute": ("grid", "one"),
    "count": ("grid", "one"),
    "describe": ("grid", "one", "number", "word"),
    "number": ("number",),
    "where": ("grid", "one"),
    "exists": ("grid", "one", "number", "word"),
    "word": ("word",),
    "pair": ("grid", "one", "number", "word"),
    "follow_up": ("grid", "one", "number", "word"),
    "refusal": ("grid", "one", "number", "word"),
}

#: Relative frequency of tasks for each kind of image.
TASK_WEIGHTS: Final[dict[Kind, dict[str, float]]] = {
    "grid": {
        "place": 24, "attribute": 8, "count": 18, "describe": 20, "where": 14, "exists": 11,
        "follow_up": 8, "refusal": 3,
    },
    "one": {
        "place": 12, "attribute": 16, "count": 6, "describe": 34, "where": 12, "exists": 10,
        "follow_up": 8, "refusal": 3,
    },
    "number": {"number": 62, "describe": 22, "exists": 5, "follow_up": 8, "refusal": 3},
    "word": {"word": 62, "describe": 22, "exists": 5, "follow_up": 8, "refusal": 3},
}  # fmt: skip

#: Number of scene seeds for each example seed.
_SCENES_PER_EXAMPLE: Final = 64


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation with right answers. Images belong to the first question."""

    task: str
    scenes: tuple[Scene, ...]
    turns: tuple[Turn, ...]
    """Questions with their right answers."""
    system: str | None = None
    """The system prompt, if any."""
    text_first: bool = False
    """The first question's text comes before its images."""


def _example(task: str, scenes: tuple[Scene, ...], turns: tuple[Turn, ...], rng: random.Random) -> Example:
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.08 else None
    return Example(task, scenes, turns, system, text_first=bool(scenes) and rng.random() < 0.25)


def single(scene: Scene, rng: random.Random, task: str | None = None) -> Example:
    """Ask about one image.

    task: must suit the scene's kind (`TASK_KINDS`), else ValueError; None: a random one.

    If the scene has no clear question of the task, the example describes the image, and its `task` says so.
    """
    if task is None:
        weights = TASK_WEIGHTS[scene.kind]
        task = rng.choices(tuple(weights), tuple(weights.values()))[0]
    if task == "pair" or scene.kind not in TASK_KINDS[task]:
        raise ValueError(f"no question of task {task!r} about one picture of kind {scene.kind!r}")
    if task == "refusal":
        turn = ask_refused(rng, image=True, held_out=scene.seed >= HELD_OUT_SEEDS)
        return _example(task, (scene,), (turn,), rng)
    if task == "follow_up":
        turns = follow_up_turns(scene, rng)
        if len(turns) > 1:
            return _example(task, (scene,), turns, rng)
    else:
        found = ASK[task](scene, rng)
        if found is not None:
            return _example(task, (scene,), (found,), rng)
    found = ASK["describe"](scene, rng)
    assert found is not None
    return _example("describe", (scene,), (found,), rng)


def pair(first: Scene, second: Scene, rng: random.Random) -> Example:
    return _example("pair", (first, second), (ask_pair(first, second, rng),), rng)


def text_only(rng: random.Random, *, held_out: bool = False) -> Example:
    """held_out: use questions that training never sees."""
    return _example("refusal", (), (ask_refused(rng, image=False, held_out=held_out),), rng)


def scene_seed(seed: int, index: int) -> int:
    """Return the seed of an example's scene. Only seeds from `HELD_OUT_SEEDS` on give held-out scenes.

    Raises ValueError for a training seed that is too large.
    """
    if seed >= HELD_OUT_SEEDS:
        return HELD_OUT_SEEDS + (seed - HELD_OUT_SEEDS) * _SCENES_PER_EXAMPLE + index
    if (seed + 1) * _SCENES_PER_EXAMPLE > HELD_OUT_SEEDS:
        raise ValueError(f"training seeds end at {HELD_OUT_SEEDS // _SCENES_PER_EXAMPLE}")
    return seed * _SCENES_PER_EXAMPLE + index


def matching_pair(seed: int, rng: random.Random, *, listed_words: bool = False) -> tuple[Scene, Scene]:
    """Sample two scenes to compare. Half of the pairs of single objects share a colour or a shape."""
    kinds: tuple[Kind, Kind] = rng.choices((("one", "one"), ("grid", "grid"), ("one", "grid")), (5, 4, 1))[0]
    if rng.random() < 0.2:
        kinds = rng.choice(("grid", "one", "number", "word")), rng.choice(("grid", "one", "number", "word"))
    first = sample_scene(scene_seed(seed, 0), kinds[0], listed_words=listed_words)
    match = rng.choice(("colour", "shape", None, None))
    second = first
    for index in range(1, _SCENES_PER_EXAMPLE):
        second = sample_scene(scene_seed(seed, index), kinds[1], listed_words=listed_words)
        if match is None or kinds != ("one", "one"):
            break
        if getattr(first.items[0], match) == getattr(second.items[0], match):
            break
    return first, second


def sample_example(seed: int, task: str | None = None, *, listed_words: bool = False) -> Example:
    """Sample scenes and ask about them. Equal arguments give equal examples.

    task: skip scenes without a clear question of this task. listed_words: see `sample_scene`. Seeds from
    `HELD_OUT_SEEDS` on are for evaluation.
    """
    rng = random.Random(seed)
    if task is None:
        drawn = rng.random()
        task = "pair" if drawn < 0.1 else "refusal" if drawn < 0.14 else None
    if task == "pair":
        first, second = matching_pair(seed, rng, listed_words=listed_words)
        return pair(first, second, rng)
    if task == "refusal" and rng.random() < 0.6:
        return text_only(rng, held_out=seed >= HELD_OUT_SEEDS)
    for index in range(_SCENES_PER_EXAMPLE):
        kind = None if task is None else rng.choice(TASK_KINDS[task])
        if task in ("place", "attribute", "count", "where", "exists", "describe", "follow_up") and rng.random() < 0.6:
            kind = "grid"
        example = single(sample_scene(scene_seed(seed, index), kind, listed_words=listed_words), rng, task)
        if task is None or example.task == task:
            return example
    raise RuntimeError(f"no scene of seed {seed} has a question of task {task!r}")
