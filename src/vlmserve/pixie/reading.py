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
        "Write down its text.", "Copy the text.", "Read the image.", "Read all the text.", "Read everything.",
        "What is the text?", "What does the picture say?", "What does the text say?", "Which words are written here?",
        "Type out the text.", "Give me the text.", "Show me the text of this picture.", "Extract the text.", "OCR",
        "Return all text in the picture.", "Can you read this?", "Read this out.", "What words do you see?",
        "Write what you see as text.", "Repeat the text of the image.", "Text?",
    ),
    "describe": (
        *DESCRIBE, "What is this document about?", "What is on this page?", "Describe the page.", "Describe it.",
        "What is this document?", "What kind of picture is this?", "What do we have here?", "Explain the picture.",
        "What does this document show?", "Describe the document in one sentence.", "What sort of page is this?",
        "Give a short description.", "Give a summary.", "Summarize the picture.", "What is it?",
    ),
    "line": (
        "Read line {n}.", "What does line {n} say?", "What is in line {n}?", "Read line number {n}.", "Line {n}?",
        "Give me line {n}.", "Copy line {n}.", "What is line {n}?", "Which text is in line {n}?",
        "Write down line {n}.", "What do you read in line {n}?", "Tell me what line {n} says.", "Extract line {n}.",
        "What can you read in line {n}?", "Only read line {n}.",
    ),
    "where": (
        "Where is {text}?", "Give the box of {text}.", "Find {text}.", "Where is the text {text}?", "Locate {text}.",
        "Give the bounding box of {text}.", "Where can I find {text}?", "Box of {text}?", "Show where {text} is.",
        "Where does it say {text}?", "Detect {text}.", "What is the position of {text}?", "Where is {text} written?",
        "Return the box around {text}.", "Tell me where {text} is.", "Mark {text}.",
    ),
    "colour": (
        "What colour is {text}?", "Which colour is {text}?", "What is the colour of {text}?", "What colour has {text}?",
        "Which colour does {text} have?", "What colour is the text {text}?", "Tell me the colour of {text}.",
        "Name the colour of {text}.", "Which colour is {text} written in?", "What colour are the letters of {text}?",
    ),
    "total": (
        "What is the total?", "How much is the total?", "Read the total.", "What is the total amount?", "Total?",
        "What is the total price?", "What does it all cost?", "How much does everything cost?", "Tell me the total.",
        "How much do I have to pay?", "What was paid?", "Give me the total.", "What is the total of the receipt?",
        "How much is it all together?", "How much is to pay?", "Extract the total.", "What is the full price?",
        "How high is the total?", "What amount is due?", "How much money was spent?",
    ),
    "price": (
        "What does {text} cost?", "How much is {text}?", "What is the price of {text}?", "How much does {text} cost?",
        "Price of {text}?", "Tell me the price of {text}.", "Read the price of {text}.", "What did {text} cost?",
        "How much did {text} cost?", "Which price has {text}?", "What is the cost of {text}?",
        "Find the price of {text}.", "How much do I pay for {text}?", "How expensive is {text}?",
        "What price is {text}?",
    ),
    "store": (
        "Which shop is it?", "What is the name of the shop?", "What shop is it?", "Which store is it?", "Which shop?",
        "What is the store called?", "Who is the seller?", "Where was this bought?", "What is the name of the store?",
        "Name the shop.", "Tell me the name of the shop.", "Whose receipt is it?", "Which shop printed the receipt?",
        "In which shop was it bought?",
    ),
    "date": (
        "What is the date?", "Which date is on the receipt?", "Read the date.", "Date?", "Tell me the date.",
        "What date is it from?", "Which day was it?", "On which day was it bought?", "What is the date of the receipt?",
        "When was it printed?", "Give me the date.", "Find the date.",
    ),
    "bar": (
        "What is the value of {text}?", "How high is {text}?", "Read the bar {text}.", "What value does {text} have?",
        "How tall is the bar {text}?", "Value of {text}?", "How many for {text}?", "What number is {text}?",
        "What does the bar {text} show?", "How much is {text}?", "Tell me the value of {text}.", "What is {text}?",
        "Read the value of {text}.", "Which number belongs to {text}?", "Give the value for {text}.",
        "What does the chart say for {text}?",
    ),
    "title": (
        "What is the title?", "What does the chart show?", "Read the title.", "What is the title of the chart?",
        "What is the chart called?", "Which title does the chart have?", "Title?", "What is charted here?",
        "Tell me the title.", "What is the heading?",
    ),
    "gauge": (
        "What does the gauge show?", "What is the value?", "Read the gauge.", "What value is it?", "Read the value.",
        "Which number does the gauge show?", "What does the needle show?", "What does the meter show?", "Value?",
        "What is the reading?", "Where is the needle?", "How much does the gauge show?",
        "Tell me the value of the gauge.", "What number does the needle point to?", "Read the meter.",
        "What does the dial say?",
    ),
    "board": (
        "What colour is the sign?", "Which colour is the sign?", "What is the colour of the sign?",
        "Colour of the sign?", "Which colour does the sign have?", "What colour is the board?",
        "Tell me the colour of the sign.", "What colour is behind the text?", "Name the colour of the sign.",
        "Is the sign red, green or which colour?",
    ),
    "receipt": (
        "Read the receipt.", "Fill in the form.", "Extract the data.", "Return the receipt as JSON.",
        "Fill in the fields.", "Extract the fields.", "What is on the receipt?", "Give me the data of the receipt.",
        "Write it as JSON.", "JSON", "Extract all values.", "Turn it into JSON.", "Return the data.",
        "Read the values of this receipt.", "Extract the receipt.", "Please fill in the JSON.", "Answer as JSON.",
        "Structured data of this receipt, please.", "Read the bill.", "Copy the receipt into the form.",
        "What was bought?",
    ),
    "boxes": (
        "Find all lines.", "Where is the text?", "Give a box for each line.", "Detect the lines of text.",
        "Find the text.", "Give the boxes of all lines.", "Detect the text.", "Return the text with boxes.",
        "Find all the text.", "Box every line.", "Where are the lines?", "Read each line and its box.",
        "Give the text and its place.", "List the lines with boxes.", "Return all lines with their positions.",
    ),
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
        question = vary(self.rng, self.rng.choice(phrasings), " ").format(**words)
        return ReadingQuestion(task, question, answer)

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
    "page": {"read": 8, "line": 5, "where": 1},
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
