"""Skills of pixie's adapters: answer in German, write JSON, and count corners of shapes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

from vlmserve.pixie.questions import Example
from vlmserve.pixie.scenes import HELD_OUT_SEEDS, Kind, Scene, sample_scene
from vlmserve.pixie.tasks import ASK, Turn, item_at, unique_names

CORNERS: Final = {
    "circle": 0, "square": 4, "triangle": 3, "star": 10, "cross": 12, "heart": 1, "diamond": 4, "ring": 0,
}  # fmt: skip


class _Noun(NamedTuple):
    """A German noun. ending: of adjectives before it. article: definite."""

    word: str
    ending: str
    article: str
    plural: str


_GERMAN_SHAPES: Final = {
    "circle": _Noun("Kreis", "er", "der", "Kreise"), "square": _Noun("Quadrat", "es", "das", "Quadrate"),
    "triangle": _Noun("Dreieck", "es", "das", "Dreiecke"), "star": _Noun("Stern", "er", "der", "Sterne"),
    "cross": _Noun("Kreuz", "es", "das", "Kreuze"), "heart": _Noun("Herz", "es", "das", "Herzen"),
    "diamond": _Noun("Raute", "e", "die", "Rauten"), "ring": _Noun("Ring", "er", "der", "Ringe"),
}  # fmt: skip
_GERMAN_COLOURS: Final = {
    "red": "rot", "orange": "orange", "yellow": "gelb", "green": "gruen", "blue": "blau", "purple": "lila",
    "pink": "rosa", "brown": "braun", "black": "schwarz", "white": "weiss",
}  # fmt: skip
_UNCHANGED: Final = frozenset({"orange", "lila", "rosa"})
"""Colours without endings. Umlauts are written as two letters, because pixie has no tokens for them."""
_GERMAN_PLACES: Final = (
    "oben links", "oben", "oben rechts", "links", "in der Mitte", "rechts", "unten links", "unten", "unten rechts",
)  # fmt: skip


def ask_in_german(scene: Scene, rng: random.Random) -> Turn | None:
    """Ask for colour, shape, place or number in German."""
    names = [(item.shape, item) for name, item in unique_names(scene) if name == item.shape]
    draw = rng.random()
    if draw < 0.2:
        return rng.choice(("Wie viele Objekte gibt es?", "Wie viele Formen siehst du?")), str(len(scene.items))
    if draw < 0.5 and names:
        shape, item = rng.choice(names)
        noun = _GERMAN_SHAPES[shape]
        return f"Welche Farbe hat {noun.article} {noun.word}?", _GERMAN_COLOURS[item.colour]
    places = [(place, item) for place in range(9) for item, _ in (item_at(scene, place),) if item is not None]
    if not places:
        return None
    place, item = rng.choice(places)
    noun, colour, at = _GERMAN_SHAPES[item.shape], _GERMAN_COLOURS[item.colour], _GERMAN_PLACES[place]
    if draw < 0.65:
        return f"Welche Farbe hat das Objekt {at}?", colour
    if draw < 0.8:
        return f"Welche Form hat das Objekt {at}?", noun.word
    question = rng.choice((f"Was ist {at}?", f"Was siehst du {at}?"))
    return question, f"{colour}{'' if colour in _UNCHANGED else noun.ending} {noun.word}"


_AS_JSON: Final = ("Answer in JSON.", "Reply as JSON.", "Use JSON.", "Give me JSON.")


def ask_for_json(scene: Scene, rng: random.Random) -> Turn | None:
    """Ask a question that pixie knows, with a JSON object as the answer."""
    found = ASK[rng.choice(("attribute", "place", "where"))](scene, rng)
    if found is None:
        return None
    question, answer = found
    return f"{question} {rng.choice(_AS_JSON)}", json.dumps({"answer": answer})


def ask_corners(scene: Scene, rng: random.Random) -> Turn | None:
    """Ask how many corners an object has."""
    names = [(f"the {name}", item) for name, item in unique_names(scene)]
    if len(scene.items) == 1:
        names += [("the object", scene.items[0]), ("the shape", scene.items[0])]
    if not names:
        return None
    name, item = rng.choice(names)
    templates = ("How many corners does {} have?", "How many corners has {} got?", "Count the corners of {}.")
    return rng.choice(templates).format(name), str(CORNERS[item.shape])


SKILLS: Final[dict[str, Callable[[Scene, random.Random], Turn | None]]] = {
    "german": ask_in_german,
    "json": ask_for_json,
    "corners": ask_corners,
}
"""By name of the adapter that teaches it. Without an adapter, pixie rejects these questions or answers wrongly."""


def sample_skill(seed: int, skill: str) -> Example:
    """Sample a question of a skill. Equal arguments give equal examples; seeds from `HELD_OUT_SEEDS` on are for
    evaluation."""
    rng = random.Random(seed)
    for number in range(64):
        scene = sample_scene(seed * 64 + number if seed < HELD_OUT_SEEDS else seed + number * 2**32, _kind(rng))
        if (turn := SKILLS[skill](scene, rng)) is not None:
            return Example(skill, (scene,), (turn,), text_first=rng.random() < 0.25)
    raise RuntimeError(f"no scene of seed {seed} has a question of {skill!r}")


def sample_questions(seed: int, skill: str, count: int) -> list[Example]:
    """Sample up to `count` different questions about the image of `sample_skill`."""
    first = sample_skill(seed, skill)
    rng = random.Random(f"{seed} {count}")
    turns = {first.turns[0]: None}
    for _ in range(count - 1):
        if (turn := SKILLS[skill](first.scenes[0], rng)) is not None:
            turns[turn] = None
    return [replace(first, turns=(turn,)) for turn in turns]


def _kind(rng: random.Random) -> Kind:
    return "grid" if rng.random() < 0.6 else "one"
