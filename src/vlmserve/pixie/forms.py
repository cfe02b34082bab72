"""Forms about an image: a question, the JSON schema of its answer, and the right answer in compact JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vlmserve.pixie import phrasings
from vlmserve.pixie.fields import (
    ABSENT_TEXTS,
    OF_ITEM,
    OF_SCENE,
    OF_WRITING,
    Field,
    Schema,
    sample_field,
    some_fields,
    subject_of,
)
from vlmserve.pixie.phrasings import AT_PLACE, ask, vary
from vlmserve.pixie.refusals import REFUSAL
from vlmserve.pixie.scenes import Item, Scene
from vlmserve.pixie.tasks import ASK, Turn, description, item_at, unique_names

Span = tuple[int, int]

NO_TEXT: Final = "I do not see any text."


@dataclass(frozen=True, slots=True)
class Form:
    """A question whose answer is JSON."""

    question: str
    schema: str | None
    """JSON schema of the answer as text; None: any JSON object."""
    answer: str
    given: tuple[Span, ...] = ()
    """Characters of the answer that the schema decides, not the model."""
    optional: bool = False
    """The schema lets an answer leave properties out."""


_ANY: Final = (
    "Describe the picture.", "What is in the picture?", "What do you see?", "Fill in the form.", "Extract the fields.",
    "Extract the data.", "Return the data as JSON.", "Answer in the given format.", "Describe the picture as JSON.",
    "Describe the picture in JSON.", "Report what you see.", "Look at the picture and fill in the fields.",
    "Read the picture.", "What does the picture show?", "Give me the details.", "Answer with a JSON object.",
    "Tell me about the picture.", "Inspect the picture.", "Return JSON.",
)  # fmt: skip
_NEW_ANY: Final = (
    "Convert the picture to JSON.", "Complete the record.", "Analyse the picture.", "Populate the schema.",
    "Give me a structured description.", "Summarize the picture as JSON.", "Parse this picture.",
    "Write down all the fields.",
)  # fmt: skip
_ABOUT: Final = (
    "Describe the {what}.", "Tell me about the {what}.", "Describe the {what} as JSON.", "What is the {what} like?",
    "Fill in the form for the {what}.", "Extract the data of the {what}.", "Look at the {what}.", "The {what}, please.",
    "Give me the details of the {what}.",
)  # fmt: skip
_NEW_ABOUT: Final = (
    "Complete the record of the {what}.", "Convert the {what} to JSON.", "Analyse the {what}.", "Summarize the {what}.",
)  # fmt: skip
_LIST: Final = (
    "List the objects.", "List all objects in the picture.", "Which objects are there?", "Find all objects.",
    "List the shapes.", "What shapes are in the picture?", "Detect the objects.", "Describe every object.",
    "List the objects as JSON.", "Name all objects in the picture.",
)  # fmt: skip
_NEW_LIST: Final = (
    "Enumerate the objects.", "Make an inventory.", "Give me one entry for each object.", "Locate every shape.",
)  # fmt: skip
_LIST_NAMES: Final = ("objects", "items", "shapes", "elements", "things", "figures", "detections", "results", "list")
_NEW_LIST_NAMES: Final = ("entities", "parts", "entries", "shapeList")
_GROUP_NAMES: Final = ("result", "image", "scene", "data", "picture", "details", "summary", "info")
_NEW_GROUP_NAMES: Final = ("record", "contents", "report", "payload")
_ITEM_GROUP_NAMES: Final = ("object", "shape", "item", "first", "target", "figure")
_NEW_ITEM_GROUP_NAMES: Final = ("entity", "subject", "main_object")
_ANSWER_NAMES: Final = ("answer", "answer", "answer", "result", "response", "value", "reply")
_NEW_ANSWER_NAMES: Final = ("output", "final_answer", "solution")
_KEYS: Final = (
    "{ask} Use the keys {keys}.", "{ask} Answer as JSON with the keys {keys}.", "{ask} The keys are {keys}.",
    "Return a JSON object with {keys}.", "Give me {keys} as JSON.", "JSON with the keys {keys}, please.",
)  # fmt: skip
_NEW_KEYS: Final = ("{ask} Respond with a JSON object that has {keys}.", "{ask} Write JSON with {keys}.")


def _choose(rng: random.Random, usual: Sequence[str], new_ones: Sequence[str], *, new: bool) -> str:
    return rng.choice(new_ones if new else usual)


class _Writer:
    """Writes compact JSON and remembers what a schema decides."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.text = ""
        self.given: list[Span] = []

    def write(self, value: Any) -> None:
        if isinstance(value, dict):
            for index, (name, inner) in enumerate(value.items()):
                self.text += "," if index else "{"
                key = json.dumps(name, ensure_ascii=False)
                self.given.append((len(self.text) + 1, len(self.text) + len(key) - 1))
                self.text += f"{key}:"
                self.write(inner)
            self._end()
        elif isinstance(value, list):
            self.text += "["
            for index, inner in enumerate(value):
                self.text += "," if index else ""
                self.write(inner)
            self.text += "]"
        else:
            if isinstance(value, str) and value.lower() in ABSENT_TEXTS:
                # A model that is free says null.
                self.given.append((len(self.text), len(self.text) + 1))
            self.text += json.dumps(value, ensure_ascii=False)

    def _end(self) -> None:
        # A schema without optional properties decides where an object ends, but not where its last number does.
        if not (self.text[-1].isdigit() and self._rng.random() < 0.3):
            self.given.append((len(self.text), len(self.text) + 1))
        self.text += "}"


def form_of(question: str, schema: Schema, value: Any, rng: random.Random) -> Form:
    """Marks what the schema decides."""
    writer = _Writer(rng)
    writer.write(value)
    text = json.dumps(schema, ensure_ascii=False)
    # The brace is given, too: without a schema, the same question wants an answer in words.
    return Form(question, text, writer.text, ((0, 1), *writer.given), optional=_has_optional(schema))


def _has_optional(schema: Mapping[str, Any]) -> bool:
    properties = schema.get("properties", {})
    inner = [*properties.values(), *([schema["items"]] if "items" in schema else [])]
    return set(properties) != set(schema.get("required", ())) or any(_has_optional(one) for one in inner)


def object_of(fields: Mapping[str, tuple[Schema, Any]], rng: random.Random) -> tuple[Schema, dict[str, Any]]:
    required = list(fields)
    if rng.random() < 0.1:
        required = [name for name in fields if rng.random() < 0.7]
    schema: Schema = {"type": "object", "properties": {name: schema for name, (schema, _) in fields.items()}}
    if required or rng.random() < 0.5:
        schema["required"] = required
    if rng.random() < 0.3:
        schema["additionalProperties"] = False
    return schema, {name: value for name, (_, value) in fields.items()}


def _typed(fields: Sequence[Field]) -> dict[str, tuple[Schema, Any]]:
    return {field.name: (field.schema, field.value) for field in fields}


def targets(scene: Scene) -> list[tuple[str, Item]]:
    """Phrases that name exactly one object, with the object."""
    found = list(unique_names(scene))
    for place in range(9):
        item, clear = item_at(scene, place)
        if item is not None and clear:
            found.append((f"object {AT_PLACE[place][0]}", item))
    return found


def _about_scene(scene: Scene, rng: random.Random, *, new: bool) -> Form | None:
    """Properties of the image. The question may name each."""
    reads = scene.writing is not None and rng.random() < 0.65
    topics = OF_WRITING if reads else OF_SCENE
    fields = some_fields(topics, scene, None, rng.choice((1, 1, 2, 2, 3, 3, 4, 5)), rng, new=new)
    if not fields:
        return None
    asked = [field.question for field in fields if field.question is not None]
    question = _choose(rng, _ANY, _NEW_ANY, new=new)
    if len(asked) == len(fields) and len(fields) < 4 and rng.random() < 0.55:
        question = " ".join(asked)
    return form_of(vary(rng, question, " "), *object_of(_typed(fields), rng), rng)


def _item_and_question(scene: Scene, rng: random.Random, *, new: bool) -> tuple[Item | None, str] | None:
    named = targets(scene)
    if scene.writing is not None or len(scene.items) == 1 or not named or rng.random() < 0.1:
        item = scene.items[0] if scene.items else None
        return item, _choose(rng, _ANY, _NEW_ANY, new=new)
    name, item = rng.choice(named)
    return item, _choose(rng, _ABOUT, _NEW_ABOUT, new=new).format(what=name)


def _about_item(scene: Scene, rng: random.Random, *, new: bool) -> Form | None:
    found = _item_and_question(scene, rng, new=new)
    if found is None:
        return None
    item, question = found
    topics = OF_ITEM[:4] if scene.writing is not None else OF_ITEM
    fields = some_fields(topics, scene, item, rng.choice((1, 2, 2, 3, 3, 4)), rng, new=new)
    if not fields:
        return None
    schema, value = object_of(_typed(fields), rng)
    if rng.random() < 0.15:
        group = _choose(rng, _ITEM_GROUP_NAMES, _NEW_ITEM_GROUP_NAMES, new=new)
        schema, value = object_of({group: (schema, value)}, rng)
    return form_of(vary(rng, question, " "), schema, value, rng)


def _listed(scene: Scene, rng: random.Random, *, new: bool) -> tuple[Schema, list[Any]] | None:
    """A list with an object for each item."""
    topics = [topic for topic in OF_ITEM if topic.sort in ("colour", "shape", "place", "words")]
    chosen = rng.sample(topics[:3], rng.choice((1, 2, 2, 2, 3))) if rng.random() < 0.93 else [topics[3]]
    seed = rng.random()
    entries: list[dict[str, Any]] = []
    schema: Schema = {}
    for item in scene.items or (None,):
        subject = subject_of(scene, item, random.Random(0))
        fields: dict[str, Field] = {}
        for index, topic in enumerate(chosen):
            # The same name, type and spelling for each item.
            field = sample_field(topic, subject, random.Random(f"{seed} {index}"), new=new)
            if field is not None and (item is None or field.value is not None):
                fields[field.name] = field
        if item is not None and len(fields) < len(chosen):
            return None
        if fields:
            schema = _merged(schema, object_of(_typed([*fields.values()]), random.Random(1))[0])
            entries.append({name: field.value for name, field in fields.items()})
    if not schema:
        schema = {"type": "object", "properties": {"shape": {"type": "string"}}, "required": ["shape"]}
    return {"type": "array", "items": schema}, entries if scene.items else []


def _merged(schema: Schema, other: Schema) -> Schema:
    """Join enums, which differ by the item."""
    if not schema:
        return other
    for name, field in other["properties"].items():
        mine = schema["properties"][name]
        if "enum" in field and "enum" in mine:
            mine["enum"] = list(dict.fromkeys([*mine["enum"], *field["enum"]]))
        elif field != mine:
            schema["properties"][name] = {"type": "string"}
    return schema


def _about_all(scene: Scene, rng: random.Random, *, new: bool) -> Form | None:
    """A list of the objects, maybe beside properties of the image or in a group."""
    listed = _listed(scene, rng, new=new)
    if listed is None:
        return None
    parts = {_choose(rng, _LIST_NAMES, _NEW_LIST_NAMES, new=new): listed}
    if rng.random() < 0.3:
        parts = _typed(some_fields(OF_SCENE, scene, None, 1, rng, new=new)) | parts
    schema, value = object_of(parts, rng)
    if rng.random() < 0.12:
        schema, value = object_of({_choose(rng, _GROUP_NAMES, _NEW_GROUP_NAMES, new=new): (schema, value)}, rng)
    usual, new_ones = (_LIST, _NEW_LIST) if rng.random() < 0.6 else (_ANY, _NEW_ANY)
    return form_of(vary(rng, _choose(rng, usual, new_ones, new=new), " "), schema, value, rng)


def _nested(scene: Scene, rng: random.Random, *, new: bool) -> Form | None:
    """Groups of properties: of the image, and of objects under their shapes' names."""
    parts: dict[str, tuple[Schema, Any]] = {}
    for name, item in rng.sample(unique_names(scene), min(2, len(unique_names(scene)))):
        fields = some_fields(
            [t for t in OF_ITEM if t.sort in ("colour", "shape", "place")], scene, item, 2, rng, new=new
        )
        if fields and name == item.shape:
            parts[item.shape] = object_of(_typed(fields), rng)
    if not parts or rng.random() < 0.4:
        fields = some_fields(OF_SCENE, scene, None, 2, rng, new=new)
        if fields:
            parts[_choose(rng, _GROUP_NAMES, _NEW_GROUP_NAMES, new=new)] = object_of(_typed(fields), rng)
    if not parts:
        return None
    return form_of(vary(rng, _choose(rng, _ANY, _NEW_ANY, new=new), " "), *object_of(parts, rng), rng)


def _one_answer(scene: Scene, rng: random.Random, *, new: bool) -> Form | None:
    """A question that pixie knows, with its answer under one key."""
    tasks: tuple[str, ...] = (scene.kind, "describe", "exists")
    if scene.items:
        tasks = ("place", "attribute", "attribute", "count", "count", "where", "exists", "exists")
    found = ASK[rng.choice(tasks)](scene, rng)
    if found is None:
        return None
    question, answer = found
    value: Any = answer
    schema: Schema = {"type": "string"}
    if answer in ("yes", "no"):
        draw = rng.random()
        if draw < 0.75:
            schema, value = {"type": "boolean"}, answer == "yes"
        elif draw < 0.9:
            schema["enum"] = ["yes", "no"]
    elif answer.isdigit() and rng.random() < 0.8:
        schema, value = {"type": "integer"}, int(answer)
    name = _choose(rng, _ANSWER_NAMES, _NEW_ANSWER_NAMES, new=new)
    return form_of(question, *object_of({name: (schema, value)}, rng), rng)


_ATTRIBUTES: Final = {"colour": phrasings.COLOUR_OF, "shape": phrasings.SHAPE_OF, "place": phrasings.WHERE}


def _one_attribute(scene: Scene, rng: random.Random, *, new: bool) -> Form | None:
    """An attribute of a named object under the attribute's name."""
    named = [("object", scene.items[0])] if len(scene.items) == 1 else targets(scene)
    if not named:
        return None
    name, item = rng.choice(named)
    topic = rng.choice(OF_ITEM[:3])
    field = sample_field(topic, subject_of(scene, item, rng), rng, new=new)
    if field is None:
        return None
    question = rng.choice(_ATTRIBUTES[topic.sort]).format(what=name)
    return form_of(vary(rng, question, " "), *object_of(_typed([field]), rng), rng)


def _one_count(scene: Scene, rng: random.Random, *, new: bool) -> Form | None:
    """A question for a number or for existence under a general name."""
    task = rng.choice(("count", "exists"))
    found = ASK[task](scene, rng)
    if found is None:
        return None
    question, answer = found
    if task == "count":
        name = rng.choice(("amount", "num_found") if new else ("count", "count", "number", "total", "how_many", "n"))
        return form_of(question, *object_of({name: ({"type": "integer"}, int(answer))}, rng), rng)
    name = rng.choice(
        ("is_there", "visible") if new else ("present", "exists", "found", "is_present", "yes", "contains")
    )
    return form_of(question, *object_of({name: ({"type": "boolean"}, answer == "yes")}, rng), rng)


def _keys_in_question(scene: Scene, rng: random.Random, *, new: bool) -> Form | None:
    """A JSON object without a schema: the question names its keys, or leaves them to the model."""
    if rng.random() < 0.25:
        return _default(scene, rng, new=new)
    found = _item_and_question(scene, rng, new=new) if rng.random() < 0.5 else (None, rng.choice(_ANY[:4]))
    if found is None:
        return None
    item, question = found
    topics = OF_ITEM if item is not None else OF_SCENE if scene.writing is None else OF_WRITING
    fields = [field for field in some_fields(topics, scene, item, rng.choice((1, 2, 2, 3)), rng, new=new)]
    if not fields or any("enum" in field.schema or field.schema.get("type") == "array" for field in fields):
        return None
    names = [field.name for field in fields]
    keys = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    question = _choose(rng, _KEYS, _NEW_KEYS, new=new).format(ask=question, keys=keys)
    writer = _Writer(rng)
    writer.write({field.name: field.value for field in fields})
    return Form(question, None, writer.text)


def _default(scene: Scene, rng: random.Random, *, new: bool) -> Form | None:
    """The form that pixie chooses itself."""
    usual = ("Describe the picture as JSON.", "Describe the picture in JSON.", "Return JSON.")
    says_json = new or rng.random() < 0.6
    question = vary(rng, _choose(rng, usual if says_json else _ANY[:4], _NEW_ANY[:1], new=new), " ")
    value: Any = {"objects": [{"color": item.colour, "shape": item.shape} for item in scene.items]}
    if scene.writing is not None:
        value = {"number": int(scene.writing.text)} if scene.kind == "number" else {"text": scene.writing.text}
    writer = _Writer(rng)
    writer.write(value)
    return Form(question, None, writer.text, () if says_json else ((0, 1),))


_LAYOUTS: Final[tuple[tuple[float, float, Callable[..., Form | None]], ...]] = (
    (26, 50, _about_scene), (16, 8, _about_item), (14, 3, _about_all), (9, 5, _nested), (10, 22, _one_answer),
    (13, 0, _one_attribute), (7, 3, _one_count), (8, 9, _keys_in_question),
)  # fmt: skip
"""Weights for images of objects and of writings."""


def ask_form(scene: Scene, rng: random.Random, *, new: bool = False) -> Form:
    """new: with names, enums and phrasings that training never sees."""
    of_objects, of_writings, layouts = zip(*_LAYOUTS, strict=True)
    weights = of_objects if scene.writing is None else of_writings
    while True:
        form: Form | None = rng.choices(layouts, weights)[0](scene, rng, new=new)
        if form is not None:
            return form


def ask_suggested(scene: Scene, rng: random.Random) -> Turn:
    """Ask what the web page and the documentation suggest, beyond pixie's tasks."""
    draw = rng.random()
    if draw < 0.5 and scene.items:
        colours = list(dict.fromkeys(item.colour for item in scene.items))
        answer = colours[0] if len(colours) == 1 else f"{', '.join(colours[:-1])} and {colours[-1]}"
        return ask(rng, phrasings.WHICH_COLOURS, answer)
    if draw < 0.75:
        question = rng.choice(("What is this document about?", "What is on this page?", "What is on the page?"))
        return question, description(scene)
    if draw < 0.9:
        question = rng.choice(("Write down its text.", "Write down the text.", "Copy the text."))
        return question, scene.writing.text if scene.writing is not None else NO_TEXT
    return rng.choice(("What do its tables say?", "Read the table.", "What is in the table?")), REFUSAL


def is_right(form: Form, answer: str) -> bool:
    """Compares values. The answer may lack optional properties."""
    try:
        return _same(json.loads(form.answer), json.loads(answer), optional=form.optional)
    except ValueError:
        return False


def _same(expected: Any, found: Any, *, optional: bool) -> bool:
    if isinstance(expected, dict) and isinstance(found, dict):
        names = found if optional and found else expected
        return set(found) <= set(expected) and all(
            name in found and _same(expected[name], found[name], optional=optional) for name in names
        )
    if isinstance(expected, list) and isinstance(found, list):
        pairs = list(zip(expected, found, strict=False))
        return len(expected) == len(found) and all(_same(one, two, optional=optional) for one, two in pairs)
    return type(expected) is type(found) and expected == found
