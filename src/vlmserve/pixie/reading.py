"""Questions about documents, each with one right answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from vlmserve.pixie.documents import Box, Document, PrintedLine
from vlmserve.pixie.forms import Span, form_of
from vlmserve.pixie.phrasings import DESCRIBE, vary

#: Boxes count this many steps from the left or the top to the right or the bottom of an image.
BOX_STEPS: Final = 100


@dataclass(frozen=True, slots=True)
class ReadingQuestion:
    """A question about a document."""

    task: str
    question: str
    answer: str
    schema: str | None = None
    """JSON schema of the answer as text."""
    given: tuple[Span, ...] = ()
    """Characters of the answer that the schema decides, not the model."""


_PHRASINGS: Final[dict[str, tuple[str, ...]]] = {
    "read": (
        "Read the text.", "What does it say?", "What is written here?", "Read it.", "What text is in the image?",
        "Write down its text.", "Copy the text.",
    ),
    "describe": (*DESCRIBE, "What is this document about?", "What is on this page?"),
    "line": ("Read line {n}.", "What does line {n} say?", "What is in line {n}?"),
    "where": ("Where is {text}?", "Give the box of {text}.", "Find {text}."),
    "colour": ("What colour is {text}?", "Which colour is {text}?"),
    "total": ("What is the total?", "How much is the total?", "Read the total."),
    "price": ("What does {text} cost?", "How much is {text}?", "What is the price of {text}?"),
    "store": ("Which shop is it?", "What is the name of the shop?"),
    "date": ("What is the date?", "Which date is on the receipt?"),
    "bar": ("What is the value of {text}?", "How high is {text}?", "Read the bar {text}."),
    "title": ("What is the title?", "What does the chart show?"),
    "gauge": ("What does the gauge show?", "What is the value?", "Read the gauge."),
    "board": ("What colour is the sign?", "Which colour is the sign?"),
    "receipt": ("Read the receipt.", "Fill in the form.", "Extract the data.", "Return the receipt as JSON."),
    "boxes": ("Find all lines.", "Where is the text?", "Give a box for each line.", "Detect the lines of text."),
}  # fmt: skip
_NEW_PHRASINGS: Final[dict[str, tuple[str, ...]]] = {
    "read": ("Tell me what it says.", "What can you read?", "Transcribe the image."),
    "describe": ("What kind of document is this?", "Summarize the page."),
    "line": ("What is written in line {n}?",),
    "where": ("Where do you see {text}?",),
    "colour": ("In which colour is {text}?",),
    "total": ("How much was it in total?", "What is the sum?"),
    "price": ("How much was {text}?",),
    "store": ("From which shop is it?",),
    "date": ("When was it?",),
    "bar": ("Which value has {text}?",),
    "title": ("What is the chart about?",),
    "gauge": ("Which value does the gauge show?",),
    "board": ("In which colour is the sign?",),
    "receipt": ("Convert the receipt to JSON.", "Parse this receipt."),
    "boxes": ("Locate each line.", "Mark all the text."),
}

_FIELD_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "store": ("store", "shop", "store_name", "name", "merchant"),
    "date": ("date", "receipt_date", "day"),
    "total": ("total", "sum", "total_price", "total_amount", "amount"),
    "items": ("items", "products", "lines", "articles"),
    "item": ("name", "item", "product", "description"),
    "price": ("price", "cost", "item_price"),
}
_NEW_FIELD_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "store": ("vendor", "seller"),
    "date": ("purchase_date", "issued_on"),
    "total": ("grand_total", "amount_due", "to_pay"),
    "items": ("positions", "goods"),
    "item": ("article", "title"),
    "price": ("amount", "unit_price"),
}

#: Names of the field with the total of a receipt.
TOTAL_NAMES: Final[frozenset[str]] = frozenset((*_FIELD_NAMES["total"], *_NEW_FIELD_NAMES["total"]))


def box_in_steps(box: Box, size: tuple[int, int]) -> list[int]:
    """A box as answers write it: left, top, right and bottom, 0 to `BOX_STEPS` of the image."""
    return [round(value * BOX_STEPS / side) for value, side in zip(box, size * 2, strict=True)]


class _Asker:
    """Asks about a document. new: with phrasings and names that training never sees."""

    def __init__(self, document: Document, rng: random.Random, *, new: bool) -> None:
        self.document, self.rng, self.new = document, rng, new
        self.facts = document.facts

    def ask(self, task: str, answer: str, **words: Any) -> ReadingQuestion:
        phrasings = (_NEW_PHRASINGS if self.new else _PHRASINGS)[task]
        question = self.rng.choice(phrasings).format(**words)
        return ReadingQuestion(task, vary(self.rng, question, " "), answer)

    def fill_in(self, task: str, schema: dict[str, Any], value: Any) -> ReadingQuestion:
        form = form_of(self.ask(task, "").question, schema, value, self.rng)
        return ReadingQuestion(task, form.question, form.answer, form.schema, form.given)

    def line(self) -> PrintedLine:
        return self.rng.choice(self.document.lines)

    def name(self, field: str) -> str:
        return self.rng.choice((_NEW_FIELD_NAMES if self.new else _FIELD_NAMES)[field])


def _read(asker: _Asker) -> ReadingQuestion:
    return asker.ask("read", "\n".join(line.text for line in asker.document.lines))


def _describe(asker: _Asker) -> ReadingQuestion:
    facts, text = asker.facts, " ".join(line.text for line in asker.document.lines)
    shown = {
        "lines": lambda: f"the text {text}",
        "sign": lambda: f"a {facts['board']} sign that says {text}",
        "receipt": lambda: f"a receipt from {facts['store']} with a total of {facts['total']}",
        "chart": lambda: f"a bar chart of {facts['title']} with {len(facts['bars'])} bars",
        "gauge": lambda: f"a gauge that shows {facts['value']}",
    }
    return asker.ask("describe", shown[asker.document.kind]())


def _line(asker: _Asker) -> ReadingQuestion:
    number = asker.rng.randrange(len(asker.document.lines))
    return asker.ask("line", asker.document.lines[number].text, n=number + 1)


def _where(asker: _Asker) -> ReadingQuestion | None:
    line = asker.line()
    if sum(other.text == line.text for other in asker.document.lines) > 1:
        return None
    box = box_in_steps(line.box, asker.document.size)
    return asker.ask("where", str(box).replace(" ", ""), text=line.text)


def _colour(asker: _Asker) -> ReadingQuestion:
    line = asker.line()
    return asker.ask("colour", line.colour, text=line.text)


def _boxes(asker: _Asker) -> ReadingQuestion:
    inner = {"type": "array", "items": {"type": "integer"}, "minItems": 4, "maxItems": 4}
    entry = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "box": inner},
        "required": ["text", "box"],
        "additionalProperties": False,
    }
    schema = {
        "type": "object",
        "properties": {"lines": {"type": "array", "items": entry}},
        "required": ["lines"],
        "additionalProperties": False,
    }
    size = asker.document.size
    lines = [{"text": line.text, "box": box_in_steps(line.box, size)} for line in asker.document.lines]
    return asker.fill_in("boxes", schema, {"lines": lines})


def _receipt(asker: _Asker) -> ReadingQuestion:
    rng, facts = asker.rng, asker.facts
    number = rng.random() < 0.6
    amount: dict[str, Any] = {"type": "number"} if number else {"type": "string"}

    def written(price: str) -> Any:
        return float(price) if number else price

    text = {"type": "string"}
    item_name, price_name = asker.name("item"), asker.name("price")
    entry = {
        "type": "object",
        "properties": {item_name: text, price_name: amount},
        "required": [item_name, price_name],
        "additionalProperties": False,
    }
    items = [{item_name: name, price_name: written(price)} for name, price in facts["items"]]
    fields: list[tuple[str, dict[str, Any], Any]] = [
        (asker.name("store"), text, facts["store"]),
        (asker.name("date"), {"type": ["string", "null"]}, facts["date"]),
        (asker.name("items"), {"type": "array", "items": entry}, items),
        (asker.name("total"), amount, written(facts["total"])),
    ]
    kept = [field for field in fields[:3] if rng.random() < 0.4]
    kept.insert(rng.randint(0, len(kept)), fields[3])
    schema = {
        "type": "object",
        "properties": {name: inner for name, inner, _ in kept},
        "required": [name for name, _, _ in kept],
        "additionalProperties": False,
    }
    return asker.fill_in("receipt", schema, {name: value for name, _, value in kept})


def _price(asker: _Asker) -> ReadingQuestion:
    name, price = asker.rng.choice(asker.facts["items"])
    return asker.ask("price", price, text=name)


def _bar(asker: _Asker) -> ReadingQuestion:
    label, value, _ = asker.rng.choice(asker.facts["bars"])
    return asker.ask("bar", str(value), text=label)


def _date(asker: _Asker) -> ReadingQuestion | None:
    date = asker.facts["date"]
    return None if date is None else asker.ask("date", date)


_ASK: Final[dict[str, Callable[[_Asker], ReadingQuestion | None]]] = {
    "read": _read,
    "describe": _describe,
    "line": _line,
    "where": _where,
    "colour": _colour,
    "boxes": _boxes,
    "receipt": _receipt,
    "price": _price,
    "bar": _bar,
    "date": _date,
    "total": lambda asker: asker.ask("total", asker.facts["total"]),
    "store": lambda asker: asker.ask("store", asker.facts["store"]),
    "title": lambda asker: asker.ask("title", asker.facts["title"]),
    "gauge": lambda asker: asker.ask("gauge", asker.facts["value"]),
    "board": lambda asker: asker.ask("board", asker.facts["board"]),
}

#: Tasks of each kind of document, and how often training asks them.
DOCUMENT_TASKS: Final[dict[str, dict[str, float]]] = {
    "lines": {"describe": 1.5, "read": 10, "line": 3, "where": 1.5, "boxes": 1.5, "colour": 1},
    "sign": {"describe": 1, "read": 8, "board": 1, "line": 1, "where": 1, "boxes": 1},
    "receipt": {"describe": 1, "total": 4, "price": 3, "receipt": 5, "store": 1, "date": 1, "read": 1},
    "chart": {"describe": 0.8, "bar": 5, "title": 1, "read": 0.5},
    "gauge": {"describe": 0.6, "gauge": 3, "read": 1},
}


def ask_document(
    document: Document, rng: random.Random, task: str | None = None, *, new: bool = False
) -> ReadingQuestion | None:
    """Ask about a document; None if it has no clear answer.

    task: one of `DOCUMENT_TASKS` of its kind; None: any. new: use phrasings and field names that training never sees.
    """
    if task is None:
        weights = DOCUMENT_TASKS[document.kind]
        task = rng.choices(tuple(weights), tuple(weights.values()))[0]
    return _ASK[task](_Asker(document, rng, new=new))
