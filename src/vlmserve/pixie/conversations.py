"""Questions about two images, and follow-up questions about one."""

from __future__ import annotations

import random

from vlmserve.pixie import phrasings
from vlmserve.pixie.phrasings import AT_PLACE, ask, vary
from vlmserve.pixie.scenes import Item, Scene
from vlmserve.pixie.tasks import ASK, Turn, description, item_at, unique_names
from vlmserve.pixie.vocabulary import PLACES, PLURALS


def ask_pair(first: Scene, second: Scene, rng: random.Random) -> Turn:
    """Ask about two images: same colour, same shape, which has more objects, or the content of one."""
    kinds = ["content"]
    if len(first.items) == len(second.items) == 1:
        kinds = ["content", "colour", "colour", "shape", "shape"]
    elif first.items and second.items:
        kinds = ["content", "more", "more"]
    kind = rng.choice(kinds)
    if kind == "colour":
        same = first.items[0].colour == second.items[0].colour
        return ask(rng, phrasings.SAME_COLOUR, "yes" if same else "no")
    if kind == "shape":
        same = first.items[0].shape == second.items[0].shape
        return ask(rng, phrasings.SAME_SHAPE, "yes" if same else "no")
    if kind == "more":
        difference = len(first.items) - len(second.items)
        answer = "the first" if difference > 0 else "the second" if difference < 0 else "the same number"
        return ask(rng, phrasings.WHICH_MORE, answer)
    nth, scene = rng.choice((("first", first), ("second", second)))
    return ask(rng, phrasings.IN_IMAGE, description(scene), nth=nth)


def _about_it(item: Item, rng: random.Random, *, colour: bool, shape: bool, place: bool) -> list[Turn]:
    """Ask about attributes of the last item that were not mentioned yet."""
    turns = []
    if colour:
        turns.append(ask(rng, ("What colour is it?", "Which colour is it?", "And its colour?"), item.colour))
    if shape:
        turns.append(ask(rng, ("What shape is it?", "Which shape is it?", "And its shape?"), item.shape))
    if place and item.place is not None:
        turns.append(ask(rng, ("Where is it?", "And where is it?", "Where do you see it?"), PLACES[item.place]))
    rng.shuffle(turns)
    return turns


def _place_chain(scene: Scene, rng: random.Random) -> list[Turn]:
    clear = [(place, item) for place in range(9) for item, ok in (item_at(scene, place),) if ok]
    taken = [(place, item) for place, item in clear if item is not None]
    if not taken:
        return []
    place, item = rng.choice(taken)
    turns = [ask(rng, phrasings.WHAT_AT, item.name, at=rng.choice(AT_PLACE[place]))]
    if rng.random() < 0.5:
        turns += _about_it(item, rng, colour=True, shape=True, place=False)[:1]
    others = [(other, found) for other, found in clear if other != place]
    if others and scene.kind == "grid":
        other, found = rng.choice(others)
        templates = ("And {at}?", "And what is {at}?", "What about {at}?", "And what do you see {at}?")
        answer = "nothing" if found is None else found.name
        turns.append(ask(rng, templates, answer, at=rng.choice(AT_PLACE[other])))
    return turns


def _where_chain(scene: Scene, rng: random.Random) -> list[Turn]:
    names = [(name, item) for name, item in unique_names(scene) if item.place is not None]
    if not names:
        return []
    name, item = rng.choice(names)
    assert item.place is not None
    templates = ("And where is the {what}?", *phrasings.WHERE)
    turns = [ask(rng, templates, PLACES[item.place], what=name)]
    colour, shape = not name.startswith(item.colour), not name.endswith(item.shape)
    return turns + _about_it(item, rng, colour=colour, shape=shape, place=False)


def _count_chain(scene: Scene, rng: random.Random) -> list[Turn]:
    def of_colour(colour: str) -> str:
        return str(sum(item.colour == colour for item in scene.items))

    def of_shape(shape: str) -> str:
        return str(sum(item.shape == shape for item in scene.items))

    colour, shape = rng.choice(scene.items).colour, rng.choice(scene.items).shape
    turns = [ask(rng, phrasings.HOW_MANY, str(len(scene.items)), what=rng.choice(("objects", "shapes")))]
    if rng.random() < 0.5:
        templates = ("How many of them are {what}?", "And how many are {what}?", "How many are {what}?")
        turns.append(ask(rng, templates, of_colour(colour), what=colour))
    else:
        templates = ("How many of them are {what}?", "And how many {what}?", "And how many {what} are there?")
        turns.append(ask(rng, templates, of_shape(shape), what=PLURALS[shape]))
    return turns


def _exists_chain(scene: Scene, rng: random.Random) -> list[Turn]:
    names = [(name, item) for name, item in unique_names(scene) if name == f"{item.colour} {item.shape}"]
    if not names:
        return []
    name, item = rng.choice(names)
    article = item.name.split()[0]
    turns = [ask(rng, phrasings.EXISTS, "yes", what=f"{article} {name}")]
    return turns + _about_it(item, rng, colour=False, shape=False, place=True)


def _one_chain(scene: Scene, rng: random.Random) -> list[Turn]:
    item = scene.items[0]
    turns = [ask(rng, phrasings.DESCRIBE, description(scene))]
    return turns + _about_it(item, rng, colour=True, shape=True, place=True)


def _writing_chain(scene: Scene, rng: random.Random) -> list[Turn]:
    assert scene.writing is not None
    turn = ASK["describe" if rng.random() < 0.3 else scene.kind](scene, rng)
    assert turn is not None
    turns = [turn]
    if turn[1] != scene.writing.colour:
        turns.append(ask(rng, ("What colour is it?", "Which colour is it?", "And its colour?"), scene.writing.colour))
    other = "word" if scene.kind == "number" else "number"
    turns.append((vary(rng, f"Is there a {other}?", "no"), "no"))
    if rng.random() < 0.5:
        turns.append((vary(rng, f"Is it a {scene.kind}?", "yes"), "yes"))
    return turns


def follow_up_turns(scene: Scene, rng: random.Random) -> tuple[Turn, ...]:
    """Ask two to four questions about one image; later ones refer to earlier answers."""
    if scene.writing is not None:
        return tuple(_writing_chain(scene, rng)[: rng.choice((2, 2, 3, 4))])
    chains = [_place_chain, _where_chain, _count_chain, _exists_chain]
    rng.shuffle(chains)
    if len(scene.items) == 1:
        chains = [_one_chain, *chains]
    wanted = rng.choice((2, 2, 3, 4))
    turns: list[Turn] = []
    for chain in chains:
        turns += chain(scene, rng)
        if len(turns) >= wanted:
            break
    return tuple(turns[:4])
