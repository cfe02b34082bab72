"""Fields of forms about an image: names as people write them, the JSON schema of a value, and the true value."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from vlmserve.pixie import phrasings
from vlmserve.pixie.phrasings import AT_PLACE
from vlmserve.pixie.scenes import Item, Scene
from vlmserve.pixie.tasks import description, item_at, unique_names, with_article
from vlmserve.pixie.vocabulary import COLOURS, PLACES, PLURALS, SHAPES

Schema = dict[str, Any]
Sort = Literal["colour", "shape", "place", "row", "column", "words", "digits", "count", "flag", "colours", "shapes"]

#: The value of a topic that has no clear answer.
UNCLEAR: Final = object()
#: The text for what is not in the image, if the schema has no null.
ABSENT: Final = "none"
_ABSENT_ENUMS: Final = ("none", "unknown", "other", "nothing", "n/a")
_NEW_ABSENT_ENUMS: Final = ("absent", "missing")
ABSENT_TEXTS: Final = frozenset((*_ABSENT_ENUMS, *_NEW_ABSENT_ENUMS))

_ROWS: Final = ("top", "middle", "bottom")
_COLUMNS: Final = ("left", "middle", "right")
_VALUES: Final[dict[str, tuple[str, ...]]] = {
    "colour": COLOURS,
    "shape": SHAPES,
    "place": PLACES,
    "row": _ROWS,
    "column": _COLUMNS,
}


@dataclass(frozen=True, slots=True)
class Subject:
    """Things in a scene that a field may name."""

    scene: Scene
    item: Item | None
    """The object that the form describes."""
    colour: str
    shape: str
    place: int


class Topic(NamedTuple):
    """A kind of field. Names and questions have the placeholders {colour}, {shape}, {plural}, {place} and {at}."""

    sort: Sort
    names: tuple[str, ...]
    new_names: tuple[str, ...]
    """For evaluation only."""
    value: Callable[[Subject], Any]
    """None: not in the image. UNCLEAR: the image has no clear answer."""
    questions: tuple[str, ...] = ()
    of_item: bool = False
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Field:
    """A property of an object: its name, its schema, its true value, and a question with the value as the answer."""

    name: str
    schema: Schema
    value: Any
    question: str | None


def _count(subject: Subject, colour: str | None = None, shape: str | None = None) -> int:
    return sum(colour in (None, item.colour) and shape in (None, item.shape) for item in subject.scene.items)


def _only(subject: Subject, name: str, attribute: Callable[[Item], Any]) -> Any:
    found = [item for name_, item in unique_names(subject.scene) if name_ == name]
    if found:
        value = attribute(found[0])
        return UNCLEAR if value is None else value
    words = {word for item in subject.scene.items for word in (item.shape, f"{item.colour} object")}
    return UNCLEAR if name in words else None


def _place(item: Item) -> str | None:
    return None if item.place is None else PLACES[item.place]


def _at(subject: Subject, attribute: Callable[[Item], str]) -> Any:
    item, clear = item_at(subject.scene, subject.place)
    if not clear:
        return UNCLEAR
    return None if item is None else attribute(item)


def _writing(subject: Subject, kind: str | None = None) -> str | None:
    writing = subject.scene.writing
    return None if writing is None or kind not in (None, subject.scene.kind) else writing.text


def _distinct(values: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _of(attribute: Callable[[Item], Any]) -> Callable[[Subject], Any]:
    def value(subject: Subject) -> Any:
        if subject.item is None:
            return None
        found = attribute(subject.item)
        return UNCLEAR if found is None else found

    return value


def _colour(subject: Subject) -> Any:
    writing = subject.scene.writing
    return writing.colour if writing is not None else _of(lambda item: item.colour)(subject)


OF_ITEM: Final[tuple[Topic, ...]] = (
    Topic("colour", ("color", "color", "color", "object color", "shape color", "fill color", "main color", "color name",
                     "dominant color", "item color"), ("hue", "fill", "paint color", "color of object", "tint"),
          _colour, of_item=True, weight=3),
    Topic("shape", ("shape", "shape", "shape", "object", "form", "kind", "type", "figure", "object type", "shape name",
                    "class", "category"), ("geometry", "shape type", "object kind", "outline", "object class"),
          _of(lambda item: item.shape), of_item=True, weight=3),
    Topic("place", ("position", "position", "location", "place", "where", "region", "area", "position in image"),
          ("spot", "placement", "object position", "location in image"), _of(_place), of_item=True, weight=2),
    Topic("words", ("name", "label", "object name", "title"), ("full name", "designation", "item name"),
          _of(lambda item: f"{item.colour} {item.shape}"), of_item=True, weight=0.8),
    Topic("row", ("row", "vertical position", "vertical"), ("v position", "height in image"),
          _of(lambda item: None if item.place is None else _ROWS[item.place // 3]), of_item=True, weight=0.5),
    Topic("column", ("column", "horizontal position", "horizontal"), ("h position", "side of image"),
          _of(lambda item: None if item.place is None else _COLUMNS[item.place % 3]), of_item=True, weight=0.5),
    Topic("flag", ("is {colour}", "is it {colour}"), ("looks {colour}", "color is {colour}"),
          lambda s: s.item is not None and s.item.colour == s.colour, of_item=True),
    Topic("flag", ("is {shape}", "is a {shape}", "is it a {shape}"), ("looks like a {shape}", "shape is {shape}"),
          lambda s: s.item is not None and s.item.shape == s.shape, of_item=True),
)  # fmt: skip
"""Topics of one object."""

OF_SCENE: Final[tuple[Topic, ...]] = (
    Topic("count", ("count", "count", "number of objects", "object count", "num objects", "total", "total count",
                    "how many", "shape count", "quantity", "n objects", "num shapes"),
          ("objects total", "number of shapes", "amount", "how many objects", "items count"),
          lambda s: _count(s) if s.scene.items else UNCLEAR,
          tuple(text.replace("{what}", "objects") for text in phrasings.HOW_MANY), weight=2.5),
    Topic("count", ("number of {plural}", "{shape} count", "num {plural}", "{plural}", "count of {plural}",
                    "how many {plural}", "n {plural}", "{plural} count"),
          ("{plural} total", "total {plural}", "amount of {plural}", "{shape} number"),
          lambda s: _count(s, shape=s.shape),
          tuple(text.replace("{what}", "{plural}") for text in phrasings.HOW_MANY), weight=3),
    Topic("count", ("number of {colour} objects", "{colour} count", "{colour} objects", "num {colour}",
                    "how many {colour}", "{colour} shapes"),
          ("total {colour} objects", "{colour} things", "amount of {colour}"),
          lambda s: _count(s, s.colour),
          tuple(text.replace("{what}", "{colour} objects") for text in phrasings.HOW_MANY), weight=2),
    Topic("count", ("number of {colour} {plural}", "{colour} {plural}", "num {colour} {plural}"),
          ("total {colour} {plural}", "how many {colour} {plural}"),
          lambda s: _count(s, s.colour, s.shape), weight=0.8),
    Topic("flag", ("has {shape}", "contains {shape}", "{shape} present", "is there a {shape}", "any {shape}",
                   "{shape} exists", "shows {shape}", "has {plural}", "has a {shape}"),
          ("includes {shape}", "{shape} visible", "with {shape}", "{shape} found"),
          lambda s: _count(s, shape=s.shape) > 0,
          tuple(text.replace("{what}", "{a_shape}") for text in phrasings.EXISTS), weight=3),
    Topic("flag", ("has {colour}", "contains {colour}", "any {colour}", "has {colour} object", "{colour} present"),
          ("includes {colour}", "{colour} visible", "{colour} found"), lambda s: _has_colour(s), weight=1.5),
    Topic("flag", ("has {colour} {shape}", "contains {colour} {shape}", "{colour} {shape} present"),
          ("includes {colour} {shape}", "{colour} {shape} visible"),
          lambda s: _count(s, s.colour, s.shape) > 0, weight=1.5),
    Topic("flag", ("has text", "contains text", "has writing"), ("includes text", "text visible"),
          lambda s: s.scene.writing is not None, weight=0.7),
    Topic("words", ("text", "text", "written text", "writing", "content"), ("inscription", "text content", "text read"),
          lambda s: _writing(s), weight=1),
    Topic("words", ("word", "written word"), ("word read", "the word"), lambda s: _writing(s, "word"), weight=0.7),
    Topic("digits", ("number", "value", "digits", "written number"), ("number read", "the number"),
          lambda s: _writing(s, "number"), weight=0.7),
    Topic("words", ("description", "caption", "summary"), ("alt text", "image description"),
          lambda s: description(s.scene), phrasings.DESCRIBE, weight=1),
    Topic("colours", ("colors", "color list", "all colors", "object colors"), ("palette", "colors present"),
          lambda s: _distinct([item.colour for item in s.scene.items]), phrasings.WHICH_COLOURS, weight=1.5),
    Topic("shapes", ("shapes", "shape names", "kinds", "all shapes", "shape list"), ("shapes found", "forms"),
          lambda s: _distinct([item.shape for item in s.scene.items]), weight=1.5),
    Topic("colour", ("{shape} color", "color of {shape}", "{shape}", "color of the {shape}", "color {shape}"),
          ("{shape} fill", "which color is the {shape}", "{shape} hue"),
          lambda s: _only(s, s.shape, lambda item: item.colour),
          tuple(text.replace("{what}", "{shape}") for text in phrasings.COLOUR_OF), weight=3),
    Topic("place", ("{shape} position", "position of {shape}", "{shape} location", "where is the {shape}",
                    "{shape} place"), ("{shape} spot", "location of the {shape}", "{shape} placement"),
          lambda s: _only(s, s.shape, _place),
          tuple(text.replace("{what}", "{shape}") for text in phrasings.WHERE), weight=2),
    Topic("shape", ("{colour} shape", "{colour} object", "shape of {colour} object", "{colour} thing"),
          ("{colour} figure", "what is {colour}"), lambda s: _only(s, f"{s.colour} object", lambda item: item.shape),
          tuple(text.replace("{what}", "{colour} object") for text in phrasings.SHAPE_OF), weight=2),
    Topic("words", ("{place}", "{place} object", "object at {place}"), ("what is {place}", "{place} thing"),
          lambda s: _at(s, lambda item: f"{item.colour} {item.shape}"), phrasings.WHAT_AT, weight=1),
    Topic("colour", ("{place} color", "color at {place}"), ("{place} object color",),
          lambda s: _at(s, lambda item: item.colour), phrasings.COLOUR_AT, weight=1),
    Topic("shape", ("{place} shape", "shape at {place}"), ("{place} object shape",),
          lambda s: _at(s, lambda item: item.shape), phrasings.SHAPE_AT, weight=1),
)  # fmt: skip
"""Topics of the whole image."""

OF_WRITING: Final = (OF_ITEM[0], *(topic for topic in OF_SCENE if topic.sort in ("words", "digits")))
"""Topics of a number or a word."""

_ABSENT_TOPICS: Final[tuple[Topic, ...]] = (
    Topic("words", ("brand", "author", "title", "person name", "vendor", "date", "address", "license plate", "weather",
                    "currency", "language", "city", "material", "animal"),
          ("merchant", "invoice date", "street", "email", "customer name"), lambda s: None),
    Topic("count", ("number of people", "car count", "dogs", "num cats", "price", "age", "total price", "year"),
          ("number of birds", "horse count", "tax", "temperature"), lambda s: 0),
    Topic("flag", ("has dog", "contains people", "is outdoor", "has car", "is damaged", "is person", "has face"),
          ("has cat", "contains animals", "is blurry", "has tree"), lambda s: False),
)  # fmt: skip
"""Fields about things outside of pixie's world."""


def _has_colour(subject: Subject) -> bool:
    writing = subject.scene.writing
    return _count(subject, subject.colour) > 0 or (writing is not None and writing.colour == subject.colour)


def subject_of(scene: Scene, item: Item | None, rng: random.Random) -> Subject:
    """Choose what a field is about, mostly something in the image."""
    items = scene.items
    colour, shape, place = rng.choice(COLOURS), rng.choice(SHAPES), rng.randrange(9)
    if items and rng.random() < 0.65:
        colour = (item or rng.choice(items)).colour
    if items and rng.random() < 0.65:
        shape = (item or rng.choice(items)).shape
    if items and rng.random() < 0.75:
        place = rng.choice([one.place for one in items if one.place is not None] or [place])
    return Subject(scene, item, colour, shape, place)


def sample_field(topic: Topic, subject: Subject, rng: random.Random, *, new: bool = False) -> Field | None:
    """Make a field of a topic; None if the image has no clear answer. new: with names that training never sees."""
    value = topic.value(subject)
    if value is UNCLEAR:
        return None
    words = {
        "colour": subject.colour,
        "shape": subject.shape,
        "plural": PLURALS[subject.shape],
        "place": PLACES[subject.place],
        "at": rng.choice(AT_PLACE[subject.place]),
        "a_shape": with_article(subject.shape),
    }
    name = rng.choice(topic.new_names if new else topic.names).format(**words)
    styled = _styled(name, rng)
    question = rng.choice(topic.questions).format(**words) if topic.questions else None
    schema, written = _typed(topic.sort, value, rng, new=new)
    if rng.random() < 0.15:
        schema = {**schema, "description": name}
    return Field(styled, schema, written, question)


def some_fields(
    topics: Sequence[Topic], scene: Scene, item: Item | None, count: int, rng: random.Random, *, new: bool = False
) -> list[Field]:
    """Sample up to `count` fields with different names."""
    fields: dict[str, Field] = {}
    for topic in rng.choices(topics, [topic.weight for topic in topics], k=3 * count):
        if rng.random() < 0.06:
            topic = rng.choice(_ABSENT_TOPICS)
        field = sample_field(topic, subject_of(scene, item, rng), rng, new=new)
        if field is not None and len(fields) < count:
            fields.setdefault(field.name, field)
    return list(fields.values())


def _styled(name: str, rng: random.Random) -> str:
    """Join the words of a name as a programmer would."""
    if rng.random() < 0.3:
        name = name.replace("color", "colour")
    words = name.split()
    draw = rng.random()
    if draw < 0.62:
        return "_".join(words)
    if draw < 0.82:
        return words[0] + "".join(word.capitalize() for word in words[1:])
    if draw < 0.89:
        return "".join(word.capitalize() for word in words)
    return " ".join(words) if draw < 0.95 else "-".join(words)


def _typed(sort: Sort, value: Any, rng: random.Random, *, new: bool) -> tuple[Schema, Any]:
    if sort in ("colours", "shapes"):
        items: Schema = {"type": "string"}
        if rng.random() < 0.5:
            items = _enum("colour" if sort == "colours" else "shape", None, rng, new=new, only=value)
        written = [_as_in(one, items) for one in value]
        bound = {"maxItems": 9} if rng.random() < 0.2 else {}
        return {"type": "array", "items": items, **bound}, written
    nullable = rng.random() < (0.45 if value is None else 0.15)
    if value is None and nullable:
        schema, _ = _typed_scalar(sort, None, rng, new=new)
        return _nullable(schema, rng), None
    schema, written = _typed_scalar(sort, value, rng, new=new)
    return (_nullable(schema, rng) if nullable else schema), written


def _nullable(schema: Schema, rng: random.Random) -> Schema:
    if "enum" not in schema and rng.random() < 0.5:
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def _typed_scalar(sort: Sort, value: Any, rng: random.Random, *, new: bool) -> tuple[Schema, Any]:
    draw = rng.random()
    if sort == "flag":
        if draw < 0.88:
            return {"type": "boolean"}, value
        yes, no = rng.choice((("True", "False"),) if new else (("yes", "no"), ("Yes", "No"), ("true", "false")))
        return {"type": "string", "enum": [yes, no]}, yes if value else no
    if sort in ("count", "digits"):
        number = 0 if value is None else int(value)
        if draw < (0.1 if sort == "count" else 0.35):
            return {"type": "string"}, ABSENT if value is None else str(value)
        bounds: Schema = {"minimum": 0} if rng.random() < 0.2 else {}
        if sort == "count" and rng.random() < 0.15:
            bounds["maximum"] = rng.choice((9, 10, 20, 100))
        return {"type": "number" if draw < 0.25 else "integer", **bounds}, number
    if sort == "words" or draw < 0.5:
        return {"type": "string"}, ABSENT if value is None else value
    schema = _enum(sort, value, rng, new=new)
    return schema, _as_in(value, schema)


def _enum(sort: str, value: Any, rng: random.Random, *, new: bool, only: Sequence[str] = ()) -> Schema:
    """A schema of some of the possible values, spelled alike. only: values that it has to have."""
    known = list(_VALUES[sort])
    # First, so that equal seeds spell different values alike.
    spell, middle = rng.choice(_NEW_SPELLINGS if new else _SPELLINGS), rng.choice(_MIDDLES)
    wanted = set(rng.sample(known, rng.randint(1, len(known)))) | set(only)
    if value is not None and not (rng.random() < 0.05 and wanted - {value}):
        wanted.add(value)
    chosen = [one for one in known if one in wanted]
    rng.shuffle(chosen)
    spelled = [spell(middle if one == "middle" else one) for one in chosen]
    needs_absent = not only and (value is None or value not in wanted)
    if needs_absent or rng.random() < 0.15:
        spelled.append(spell(rng.choice(_NEW_ABSENT_ENUMS if new else _ABSENT_ENUMS)))
    return {"type": "string", "enum": list(dict.fromkeys(spelled))}


_SPELLINGS: Final[tuple[Callable[[str], str], ...]] = (
    lambda text: text,
    lambda text: text,
    lambda text: text,
    lambda text: text.replace(" ", "-"),
    lambda text: text.replace(" ", "_"),
    str.upper,
    lambda text: text.upper().replace(" ", "_"),
    str.capitalize,
)
_NEW_SPELLINGS: Final[tuple[Callable[[str], str], ...]] = (
    str.title,
    lambda text: text.upper().replace(" ", "-"),
    lambda text: text.replace(" ", "/"),
)
_MIDDLES: Final = ("middle", "middle", "center", "centre")


def _plain(value: str) -> str:
    text = value.lower()
    for mark in "-_/":
        text = text.replace(mark, " ")
    return "middle" if text in ("center", "centre") else text


def _as_in(value: Any, schema: Schema) -> str:
    """A value as an enum spells it; without an enum, the value."""
    if "enum" not in schema:
        return ABSENT if value is None else str(value)
    spelled: list[str] = schema["enum"]
    same = [one for one in spelled if value is not None and _plain(one) == value]
    return (same or [one for one in spelled if one.lower() in ABSENT_TEXTS])[0]
