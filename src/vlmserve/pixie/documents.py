"""Printed documents: lines of text, signs, receipts, bar charts and gauges. Deterministic from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from vlmserve.pixie.fonts import document_fonts, load_font
from vlmserve.pixie.printed_text import ITEM_NAMES, STORES, UNITS, price, text_of, text_to_fill
from vlmserve.pixie.scenes import ink_on, jittered
from vlmserve.pixie.vocabulary import COLOUR_ANCHORS, COLOURS, Rgb

DocumentKind = Literal["page", "lines", "sign", "receipt", "chart", "gauge"]
Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels of the image."""

#: Kinds that questions are asked about. Pages are dense text for the vision tower only.
DOCUMENT_KINDS: Final[tuple[DocumentKind, ...]] = ("lines", "sign", "receipt", "chart", "gauge")

#: Images have sides of whole patches, in pixels.
PATCH: Final = 16
SMALLEST_SIDE: Final = 96
LARGEST_SIDE: Final = 448

#: Maximum lines of a document, receipts excepted.
MOST_LINES: Final = 5

_MOST_TRIES: Final = 300

#: Minimum gap between two texts of a row, in heights of capital letters.
_SMALLEST_GAP: Final = 0.5

#: Height of capital letters, in ems, where a font file does not say it.
_CAP_HEIGHT: Final = 0.7


@dataclass(frozen=True, slots=True)
class PrintedLine:
    """A line of text. All its characters have boxes of the height of capital letters."""

    text: str
    colour: str
    rgb: Rgb
    font: str
    font_size: int
    origin: tuple[int, int]
    """Start of the baseline, in pixels."""
    boxes: tuple[Box, ...]
    """Boxes of the characters."""

    @property
    def box(self) -> Box:
        return self.boxes[0][0], self.boxes[0][1], self.boxes[-1][2], self.boxes[-1][3]


@dataclass(frozen=True, slots=True)
class Background:
    """The surface behind the text. Both colours contrast with the ink."""

    style: Literal["plain", "gradient", "stripes", "blobs", "noise"]
    first: Rgb
    second: Rgb


@dataclass(frozen=True, slots=True)
class Mark:
    """A drawing without text. box: the box of its outline."""

    kind: Literal["rectangle", "frame", "rule", "dial", "needle"]
    box: Box
    rgb: Rgb
    value: float = 0.0
    """A needle's value, 0 to 1; 1 for a dashed rule."""


@dataclass(slots=True)
class Document:
    """An image of a document before drawing. Lines are in reading order."""

    kind: DocumentKind
    size: tuple[int, int]
    background: Background
    seed: int
    lines: list[PrintedLine] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """Contents by name, such as ``total``, ``items`` and ``bars``."""
    noise: float = 0.0
    jpeg_quality: int | None = None


@dataclass(frozen=True, slots=True)
class Style:
    """How documents look. heights: bounds of capital letters, in pixels. new: fonts and layouts that training never
    shows."""

    heights: tuple[float, float] = (14, 40)
    new: bool = False


def cap_height(font: str, size: int) -> float:
    """In pixels."""
    return float(-load_font(font, size).getbbox("H", anchor="ls")[1])


def font_size_for(font: str, height: float) -> int:
    """Pixels per em. height: of capital letters, in pixels."""
    share = cap_height(font, 100) / 100 or _CAP_HEIGHT
    return max(8, round(height / share))


def print_line(text: str, colour: str, rgb: Rgb, font: str, size: int, origin: tuple[int, int]) -> PrintedLine:
    """Lay a text out from the start of its baseline."""
    loaded = load_font(font, size)
    ends = [loaded.getlength(text[: count + 1]) for count in range(len(text))]
    top, bottom = origin[1] - cap_height(font, size), origin[1]
    starts = [0.0, *ends[:-1]]
    boxes = tuple((origin[0] + a, top, origin[0] + b, bottom) for a, b in zip(starts, ends, strict=True))
    return PrintedLine(text, colour, rgb, font, size, origin, boxes)


class _Canvas:
    def __init__(self, kind: DocumentKind, seed: int, rng: random.Random, size: tuple[int, int], style: Style) -> None:
        self.rng, self.style = rng, style
        plain = kind in ("receipt", "chart", "gauge")
        look = (
            "plain" if plain and rng.random() < 0.7 else rng.choice(("plain", "gradient", "stripes", "blobs", "noise"))
        )
        first = _paper(rng, light=kind == "receipt")
        shift = rng.choice((-1, 1)) * rng.randint(12, 45)
        second: Rgb = tuple(min(255, max(0, channel + shift + rng.randint(-8, 8))) for channel in first)  # type: ignore[assignment]
        self.document = Document(kind, size, Background(look, first, second), seed)  # type: ignore[arg-type]
        self.fonts = document_fonts(new=style.new)
        self.font = rng.choice(self.fonts)
        self.colour, self.rgb = self.ink()
        self.fits = True
        """False after a line that did not fit."""

    def ink(self, *, plain: bool = False) -> tuple[str, Rgb]:
        """A colour that contrasts with the background."""
        behind = (self.document.background.first, self.document.background.second)
        colours = ("black", "white", "blue") if plain or self.rng.random() < 0.5 else COLOURS
        return ink_on(self.rng, behind, colours)

    def height(self, most: float = 1e9) -> float:
        low, high = self.style.heights
        high = max(low, min(high, most))
        return float(low * (high / low) ** self.rng.random())

    def line(
        self,
        text: str,
        at: tuple[float, float],
        height: float,
        anchor: str = "left",
        ink: tuple[str, Rgb] | None = None,
        font: str | None = None,
    ) -> PrintedLine | None:
        """Print a line whose capital letters have their top at `at`; None if it does not fit.

        anchor: which end or middle of the line is there.
        """
        font = font or self.font
        size = font_size_for(font, height)
        width = load_font(font, size).getlength(text)
        x = at[0] - {"left": 0.0, "middle": width / 2, "right": width}[anchor]
        colour, rgb = ink or (self.colour, self.rgb)
        origin = round(x), round(at[1] + cap_height(font, size))
        right, bottom = self.document.size[0] - 1, self.document.size[1] - 2
        if x < 1 or x + width > right or at[1] < 1 or origin[1] > bottom:
            self.fits = False
            return None
        made = print_line(text, colour, rgb, font, size, origin)
        self.document.lines.append(made)
        return made

    def row(self, texts: tuple[str, str], margin: float, y: float, height: float) -> None:
        """Print two texts at the ends of a row. Without a gap between them, the document does not fit."""
        left = self.line(texts[0], (margin, y), height)
        right = self.line(texts[1], (self.document.size[0] - margin, y), height, "right")
        if left and right and right.box[0] - left.box[2] < _SMALLEST_GAP * height:
            self.fits = False

    def mark(self, *arguments: Any) -> None:
        self.document.marks.append(Mark(*arguments))


def _paper(rng: random.Random, *, light: bool) -> Rgb:
    draw = rng.random()
    if light or draw < 0.5:
        grey = rng.choice((255, 255, rng.randint(205, 250)))
        return grey, grey, max(0, grey - rng.choice((0, 0, 15)))
    if draw < 0.68:
        return rng.randint(0, 60), rng.randint(0, 60), rng.randint(0, 60)
    if draw < 0.86:
        return rng.randint(170, 255), rng.randint(170, 255), rng.randint(170, 255)
    return jittered(rng, rng.choice(COLOUR_ANCHORS[rng.choice(COLOURS)]), 12)


def _fill_page(canvas: _Canvas) -> None:
    """Text everywhere, in many fonts and sizes."""
    rng, (width, height) = canvas.rng, canvas.document.size
    y = rng.uniform(2, 10)
    while True:
        letter = canvas.height(0.6 * height)
        if y + letter > height - 3:
            return
        font, ink = rng.choice(canvas.fonts), canvas.ink() if rng.random() < 0.5 else None
        size = font_size_for(font, letter)
        x = rng.uniform(2, 14)
        while x < width - 0.5 * letter:
            text = text_to_fill(rng, width - 3 - x, lambda one: load_font(font, size).getlength(one))  # noqa: B023
            if not text:
                break
            made = canvas.line(text, (x, y), letter, ink=ink, font=font)
            x = (made.box[2] if made else width) + letter * rng.uniform(0.8, 2.0)
        y += letter * rng.uniform(1.55, 2.2)


def _fill_lines(canvas: _Canvas) -> None:
    rng, (width, height) = canvas.rng, canvas.document.size
    count = rng.choices(range(1, MOST_LINES + 1), (4, 3, 2, 2, 1))[0]
    anchor = rng.choice(("left", "left", "middle", "right")) if not canvas.style.new else rng.choice(("left", "middle"))
    letter = canvas.height(0.8 * height / (1.8 * count))
    pitch = letter * rng.uniform(1.6, 2.2)
    free = height - 4 - pitch * (count - 1) - letter * 1.3
    y = 2 + rng.uniform(0.05, 0.95) * max(0.0, free)
    margin = rng.uniform(3, 0.12 * width)
    x = {"left": margin, "middle": width / 2, "right": width - margin}[anchor]
    size = font_size_for(canvas.font, letter)
    for _ in range(count):
        ink = canvas.ink() if rng.random() < 0.25 else None
        text = text_to_fill(rng, width - margin - 4, lambda one: load_font(canvas.font, size).getlength(one))
        if text:
            canvas.line(text, (x, y), letter, anchor, ink)
        y += pitch


def _fill_sign(canvas: _Canvas) -> None:
    """A coloured board with one to three centred lines."""
    rng, (width, height) = canvas.rng, canvas.document.size
    board, rgb = canvas.ink()
    left, top = rng.uniform(0.04, 0.12) * width, rng.uniform(0.04, 0.15) * height
    box = (left, top, width - left, height - top)
    canvas.mark("rectangle", box, rgb)
    ink = ink_on(rng, (rgb,), ("black", "white", "white", "yellow", "red", "blue"))
    if rng.random() < 0.5:
        inset = 0.02 * width + 2
        canvas.mark("frame", (left + inset, top + inset, width - left - inset, height - top - inset), ink[1])
    canvas.document.facts |= {"board": board}
    count = rng.choice((1, 2, 2, 3))
    letter = canvas.height((height - 2 * top) / (2.1 * count))
    y = top + ((height - 2 * top) - letter * (2 * count - 1)) / 2
    size = font_size_for(canvas.font, letter)
    for _ in range(count):
        text = text_to_fill(rng, width - 3 * left, lambda one: load_font(canvas.font, size).getlength(one))
        if text:
            canvas.line(text, (width / 2, y), letter, "middle", ink)
        y += 2 * letter


def _fill_receipt(canvas: _Canvas) -> None:
    """A shop, perhaps a date, items with prices, and the total."""
    rng, (width, height) = canvas.rng, canvas.document.size
    canvas.colour, canvas.rgb = canvas.ink(plain=True)
    store, date = rng.choice(STORES), text_of("date", rng) if rng.random() < 0.6 else None
    count = rng.choice((1, 2, 3, 4))
    rows = 2 + (date is not None) + count
    low = canvas.style.heights[0]
    letter = max(low, min(canvas.style.heights[1], 24.0, (height - 12) / (1.75 * (rows + 0.6))))
    pitch = (height - 10) / (rows + 0.6)
    y, margin = 5.0, rng.uniform(4, 0.08 * width)
    swapped = canvas.style.new and rng.random() < 0.3
    canvas.line(store, (margin if swapped else width / 2, y), letter, "left" if swapped else "middle")
    y += pitch
    if date is not None:
        canvas.line(date, (width / 2 if not swapped else margin, y), letter, "left" if swapped else "middle")
        y += pitch
    items = []
    total = 0
    for name in rng.sample(ITEM_NAMES, count):
        cents = rng.choice((rng.randint(50, 999), rng.randint(50, 2999)))
        canvas.row((name, price(cents)), margin, y, letter)
        items.append((name, price(cents)))
        total += cents
        y += pitch
    word = rng.choice(("SUM", "Amount", "TO PAY") if canvas.style.new else ("TOTAL", "Total", "TOTAL"))
    canvas.mark("rule", (margin, y - 0.2 * pitch, width - margin, y - 0.2 * pitch), canvas.rgb, rng.choice((0.0, 1.0)))
    y += 0.3 * pitch
    sign = rng.choice(("", "", "$"))
    canvas.row((word, sign + price(total)), margin, y, letter)
    canvas.document.facts |= {"store": store, "date": date, "items": items, "total": price(total)}


def _fill_chart(canvas: _Canvas) -> None:
    """Bars with labels below and values above."""
    rng, (width, height) = canvas.rng, canvas.document.size
    low = canvas.style.heights[0]
    count = min(rng.choice((2, 3, 3, 4)), int(width // (4.2 * low)) or 1)
    letter = min(canvas.style.heights[1], max(low, min(0.055 * height, width / count / 4.2)))
    title = rng.choice(("Sales", "Visits", "Rain", "Points", "Cost", "Orders", "Output"))
    canvas.line(title, (width / 2, 4), letter, "middle")
    bottom, top = height - 2.2 * letter, 4.5 * letter
    step = width / count
    bars = []
    for index, label in enumerate(
        rng.sample(("Mon", "Tue", "Wed", "Thu", "Fri", "Jan", "Feb", "Mar", "A", "B", "C", "D"), count)
    ):
        value = rng.randint(1, 99)
        colour, rgb = canvas.ink()
        y = bottom - (bottom - top) * value / 99
        x = (index + 0.5) * step
        canvas.mark("rectangle", (x - 0.3 * step, y, x + 0.3 * step, bottom), rgb)
        canvas.line(str(value), (x, y - 1.5 * letter), letter, "middle")
        canvas.line(label, (x, bottom + 0.5 * letter), letter, "middle")
        bars.append((label, value, colour))
    canvas.mark("rule", (2, bottom, width - 2, bottom), canvas.rgb, 0.0)
    canvas.document.facts |= {"title": title, "bars": bars}


def _fill_gauge(canvas: _Canvas) -> None:
    """A dial with a needle, the value in figures, and what it measures."""
    rng, (width, height) = canvas.rng, canvas.document.size
    radius = 0.42 * min(width, 1.2 * height)
    x, y = width / 2, 0.52 * height
    value = rng.randint(0, 100)
    canvas.mark("dial", (x - radius, y - radius, x + radius, y + radius), canvas.rgb)
    canvas.mark("needle", (x - radius, y - radius, x + radius, y + radius), canvas.ink()[1], value / 100)
    name, unit = rng.choice(UNITS)
    letter = canvas.height(0.12 * height)
    shown = f"{value} {unit}" if rng.random() < 0.7 else str(value)
    canvas.line(shown, (x, y + 0.3 * radius), letter, "middle")
    canvas.line(name, (x, min(y + 0.3 * radius + 1.9 * letter, height - letter - 4)), letter, "middle")
    canvas.document.facts |= {"value": shown, "name": name}


_FILL: Final = {
    "page": _fill_page,
    "lines": _fill_lines,
    "sign": _fill_sign,
    "receipt": _fill_receipt,
    "chart": _fill_chart,
    "gauge": _fill_gauge,
}


def _sample_size(kind: DocumentKind, rng: random.Random, style: Style) -> tuple[int, int]:
    low = 208 if kind in ("receipt", "chart") else SMALLEST_SIDE
    if kind == "gauge":
        low = 160
    width, height = (rng.randrange(low, LARGEST_SIDE + 1, PATCH) for _ in range(2))
    if kind in ("lines", "sign") and rng.random() < 0.6:
        width, height = max(width, height), min(width, height)
    return width, height


def sample_document(
    seed: int,
    kind: DocumentKind,
    size: tuple[int, int] | None = None,
    style: Style = Style(),
) -> Document:
    """Equal arguments give equal documents on machines with the same fonts.

    size: width and height in pixels; None: any from `SMALLEST_SIDE` to `LARGEST_SIDE`, of whole patches. Raises
    ValueError if the document does not fit.
    """
    rng = random.Random(seed)
    for _ in range(_MOST_TRIES):
        canvas = _Canvas(kind, seed, rng, size or _sample_size(kind, rng, style), style)
        _FILL[kind](canvas)
        document = canvas.document
        if document.lines and (canvas.fits or kind in ("page", "lines", "sign")):
            break
    else:
        raise ValueError(f"a {kind} does not fit into {size} pixels")
    document.lines.sort(key=lambda line: (line.origin[1], line.origin[0]))
    document.noise = rng.uniform(1, 10) if rng.random() < 0.2 else 0.0
    document.jpeg_quality = rng.randint(55, 95) if rng.random() < 0.15 else None
    return document
