"""Questions about one image, with answers that follow from what was drawn."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Final

from vlmserve.pixie import phrasings
from vlmserve.pixie.phrasings import AT_PLACE, ask
from vlmserve.pixie.scenes import Item, Scene
from vlmserve.pixie.vocabulary import COLOURS, PLACES, PLURALS, SHAPES

#: A question and its answer.
Turn = tuple[str, str]

#: The cells that a place's name may mean: "on the left" is the whole left side.
PLACE_CELLS: Final[tuple[frozenset[int], ...]] = tuple(
    frozenset(cells) for cells in ((0,), (0, 1, 2), (2,), (0, 3, 6), (4,), (2, 5, 8), (6,), (6, 7, 8), (8,))
)


def with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def description(scene: Scene) -> str:
    """Describe the image: its items in reading order, or the writing."""
    if scene.writing is not None:
        return f"the {scene.kind} {scene.writing.text}"
    names = [item.name for item in scene.items]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def unique_names(scene: Scene) -> list[tuple[str, Item]]:
    """Names ("star", "blue object", "blue star") that fit exactly one item of the image, with the item."""
    named: list[tuple[str, Item]] = []
    for item in scene.items:
        named += [(item.shape, item), (f"{item.colour} object", item), (f"{item.colour} {item.shape}", item)]
    counts = Counter(name for name, _ in named)
    return [(name, item) for name, item in named if counts[name] == 1]


def item_at(scene: Scene, place: int) -> tuple[Item | None, bool]:
    """Return the only item at `place` (a name for one or three cells), and whether the question has one answer."""
    found = [item for item in scene.items if item.place in PLACE_CELLS[place]]
    if any(item.place is None for item in scene.items) or len(found) > 1:
        return None, False
    # A big object reaches into other cells, so "nothing" is an answer only in grids.
    return (found[0], True) if found else (None, scene.kind == "grid")


def ask_place(scene: Scene, rng: random.Random) -> Turn | None:
    """Ask which object, colour or shape is at a place."""
    if not scene.items:
        return None
    places = [(place, item) for place in range(9) for item, clear in (item_at(scene, place),) if clear]
    taken = [(place, item) for place, item in places if item is not None]
    if not taken:
        return None
    place, item = rng.choice(places if rng.random() < 0.25 else taken)
    at = rng.choice(AT_PLACE[place])
    if item is None:
        return ask(rng, phrasings.WHAT_AT, "nothing", at=at)
    draw = rng.random()
    if draw < 0.5:
        return ask(rng, phrasings.WHAT_AT, item.name, at=at)
    if draw < 0.78:
        return ask(rng, phrasings.COLOUR_AT, item.colour, at=at)
    return ask(rng, phrasings.SHAPE_AT, item.shape, at=at)


def ask_attribute(scene: Scene, rng: random.Random) -> Turn | None:
    """Ask for the colour of an object named by its shape, or the shape of one named by its colour."""
    if len(scene.items) == 1 and rng.random() < 0.5:
        what = rng.choice(("object", "shape", "object in the picture", "thing"))
        if rng.random() < 0.5:
            return ask(rng, phrasings.COLOUR_OF, scene.items[0].colour, what=what)
        what = "object" if what == "shape" else what
        return ask(rng, phrasings.SHAPE_OF, scene.items[0].shape, what=what)
    names = [(name, item) for name, item in unique_names(scene) if name != f"{item.colour} {item.shape}"]
    if not names:
        return None
    name, item = rng.choice(names)
    if name == item.shape:
        return ask(rng, phrasings.COLOUR_OF, item.colour, what=name)
    return ask(rng, phrasings.SHAPE_OF, item.shape, what=name)


def _colour_and_shape(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """Choose a colour and a shape to ask for, mostly from the image, but not always of one item."""
    colours, shapes = [item.colour for item in scene.items], [item.shape for item in scene.items]
    colour = rng.choice(colours) if colours and rng.random() < 0.7 else rng.choice(COLOURS)
    shape = rng.choice(shapes) if shapes and rng.random() < 0.7 else rng.choice(SHAPES)
    return colour, shape


def ask_count(scene: Scene, rng: random.Random) -> Turn | None:
    """Ask for the number of all objects, or of one colour, shape or both."""
    if not scene.items:
        return None
    colour, shape = _colour_and_shape(scene, rng)
    draw = rng.random()
    if draw < 0.35:
        what, count = rng.choice(("objects", "objects", "shapes", "things")), len(scene.items)
    elif draw < 0.62:
        what = f"{colour} {rng.choice(('objects', 'objects', 'shapes', 'things'))}"
        count = sum(item.colour == colour for item in scene.items)
    elif draw < 0.86:
        what, count = PLURALS[shape], sum(item.shape == shape for item in scene.items)
    else:
        what = f"{colour} {PLURALS[shape]}"
        count = sum(item.colour == colour and item.shape == shape for item in scene.items)
    return ask(rng, phrasings.HOW_MANY, str(count), what=what)


def ask_describe(scene: Scene, rng: random.Random) -> Turn | None:
    templates: tuple[str, ...] = phrasings.DESCRIBE
    if len(scene.items) > 1 and rng.random() < 0.35:
        templates = phrasings.DESCRIBE_OBJECTS
    return ask(rng, templates, description(scene))


def ask_number(scene: Scene, rng: random.Random) -> Turn | None:
    """Ask for the written number, rarely for its colour."""
    if scene.writing is None or scene.kind != "number":
        return None
    if rng.random() < 0.1:
        return ask(rng, phrasings.COLOUR_OF, scene.writing.colour, what="number")
    templates = phrasings.WHICH_TEXT if rng.random() < 0.25 else phrasings.WHICH_NUMBER
    return ask(rng, templates, scene.writing.text)


def ask_word(scene: Scene, rng: random.Random) -> Turn | None:
    """Ask for the written word, rarely for its colour."""
    if scene.writing is None or scene.kind != "word":
        return None
    if rng.random() < 0.1:
        return ask(rng, phrasings.COLOUR_OF, scene.writing.colour, what="word")
    templates = phrasings.WHICH_TEXT if rng.random() < 0.5 else phrasings.WHICH_WORD
    return ask(rng, templates, scene.writing.text)


def ask_where(scene: Scene, rng: random.Random) -> Turn | None:
    names = [(name, item) for name, item in unique_names(scene) if item.place is not None]
    if not names:
        return None
    name, item = rng.choice(names)
    if len(scene.items) == 1 and rng.random() < 0.25:
        name = "object"
    assert item.place is not None
    return ask(rng, phrasings.WHERE, PLACES[item.place], what=name)


def ask_exists(scene: Scene, rng: random.Random) -> Turn | None:
    """Ask whether the image has an object of a colour, a shape or both, or a number or a word."""
    if rng.random() < (0.06 if scene.items else 0.6):
        kind = rng.choice(("number", "word"))
        return ask(rng, phrasings.EXISTS, "yes" if kind == scene.kind else "no", what=f"a {kind}")
    wanted = rng.random() < 0.5
    by_name = rng.random()
    for _ in range(20):
        colour, shape = _colour_and_shape(scene, rng)
        if by_name < 0.55 or not scene.items:
            name, found = f"{colour} {shape}", any((i.colour, i.shape) == (colour, shape) for i in scene.items)
        elif by_name < 0.8:
            name, found = shape, any(item.shape == shape for item in scene.items)
        else:
            name, found = f"{colour} object", any(item.colour == colour for item in scene.items)
        if found == wanted or not scene.items:
            break
    return ask(rng, phrasings.EXISTS, "yes" if found else "no", what=with_article(name))


#: Every question about one image in one turn, by task.
ASK: Final[dict[str, Callable[[Scene, random.Random], Turn | None]]] = {
    "place": ask_place,
    "attribute": ask_attribute,
    "count": ask_count,
    "describe": ask_describe,
    "number": ask_number,
    "where": ask_where,
    "exists": ask_exists,
    "word": ask_word,
}
