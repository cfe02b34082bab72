"""Contents of an image: items on a 3 x 3 grid, one big item, a number or a word. Deterministic from a seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final, Literal

from vlmserve.pixie.fonts import advance, available_fonts, load_font
from vlmserve.pixie.vocabulary import COLOUR_ANCHORS, COLOURS, DIGITS, LETTERS, SHAPES, WORDS, Rgb

Kind = Literal["grid", "one", "number", "word"]

#: Seeds from here on are held out; training never uses them.
HELD_OUT_SEEDS: Final[int] = 1 << 40

#: Maximum items in an image.
MOST_ITEMS: Final[int] = 6

#: A centre closer to a border between places than this fraction of the image belongs to no place.
PLACE_MARGIN: Final[float] = 0.04

#: Minimum Euclidean RGB distance between an item and the background.
LEAST_CONTRAST: Final[float] = 100.0


@dataclass(frozen=True, slots=True)
class Item:
    shape: str
    colour: str
    rgb: Rgb
    centre: tuple[float, float]
    """Pixels of the image."""
    size: tuple[float, float]
    """Pixels of the image."""
    angle: float
    detail: float
    outline: Rgb | None
    place: int | None
    """None near a border between places."""

    @property
    def name(self) -> str:
        """The name with its article, such as ``"an orange star"``."""
        return f"{'an' if self.colour == 'orange' else 'a'} {self.colour} {self.shape}"


@dataclass(frozen=True, slots=True)
class Writing:
    text: str
    colour: str
    rgb: Rgb
    font: str
    font_size: int
    origin: tuple[int, int]
    """Start of the ink box, in pixels."""
    boxes: tuple[tuple[float, float, float, float], ...]
    """Boxes of the characters, in pixels."""


@dataclass(frozen=True, slots=True)
class Scene:
    """An image before drawing: items in reading order, or a writing, on a background."""

    kind: Kind
    size: tuple[int, int]
    background: Rgb
    gradient: Rgb | None
    items: tuple[Item, ...]
    writing: Writing | None
    noise: float
    jpeg_quality: int | None
    antialias: bool
    seed: int


def jittered(rng: random.Random, anchor: Rgb, spread: int) -> Rgb:
    """An anchor, mostly with up to `spread` more or less in each channel."""
    if rng.random() < 0.3:
        return anchor
    red, green, blue = (min(255, max(0, channel + rng.randint(-spread, spread))) for channel in anchor)
    return red, green, blue


def _contrast(one: Rgb, other: Rgb) -> float:
    return math.dist(one, other)


def _background(rng: random.Random) -> Rgb:
    draw = rng.random()
    if draw < 0.25:
        return 255, 255, 255
    if draw < 0.45:
        grey = rng.randint(40, 245)
        return grey, grey, min(255, grey + rng.choice((0, 0, 5)))
    if draw < 0.52:
        return 0, 0, 0
    if draw < 0.75:
        return rng.randint(190, 255), rng.randint(190, 255), rng.randint(190, 255)
    if draw < 0.85:
        return rng.randint(0, 70), rng.randint(0, 70), rng.randint(0, 70)
    return jittered(rng, rng.choice(COLOUR_ANCHORS[rng.choice(COLOURS)]), 12)


def ink_on(rng: random.Random, backgrounds: tuple[Rgb, ...], colours: tuple[str, ...] = COLOURS) -> tuple[str, Rgb]:
    """Choose a colour that contrasts with all backgrounds."""
    for _ in range(200):
        colour = rng.choice(colours)
        rgb = jittered(rng, rng.choice(COLOUR_ANCHORS[colour]), 12)
        if all(_contrast(rgb, background) >= LEAST_CONTRAST for background in backgrounds):
            return colour, rgb
    return ink_on(rng, backgrounds)


def _native_size(rng: random.Random) -> tuple[int, int]:
    """Sample width and height: mostly small, rarely up to 1,000 pixels, aspect ratio 0.6 to 1.7."""
    low, high = (80, 320) if rng.random() < 0.95 else (320, 1000)
    side = math.exp(rng.uniform(math.log(low), math.log(high)))
    if rng.random() < 0.45:
        return round(side), round(side)
    root = math.sqrt(math.exp(rng.uniform(math.log(0.6), math.log(1.7))))
    return round(side * root), round(side / root)


_TILT: Final[dict[str, float]] = {
    "circle": 0,
    "ring": 0,
    "square": 10,
    "triangle": 14,
    "star": 36,
    "cross": 12,
    "heart": 14,
    "diamond": 8,
}


def _item(
    rng: random.Random, shape: str, colour: str, rgb: Rgb, centre: tuple[float, float], side: float, place: int | None
) -> Item:
    stretch = math.sqrt(math.exp(rng.uniform(-0.22, 0.22))) if rng.random() < 0.6 else 1.0
    width, height = side * min(1.0, stretch * stretch), side * min(1.0, 1 / (stretch * stretch))
    if shape == "diamond":
        width = height * rng.uniform(0.6, 0.95)
    tilt = _TILT[shape]
    angle = rng.uniform(-tilt, tilt) if tilt and rng.random() < 0.5 else 0.0
    if shape == "triangle" and rng.random() < 0.2:
        angle += rng.choice((90, 180, 270))
    outline = None
    if rng.random() < 0.12:
        outline = rng.choice(((0, 0, 0), (60, 60, 60), (rgb[0] // 2, rgb[1] // 2, rgb[2] // 2)))
    return Item(shape, colour, rgb, centre, (width, height), angle, rng.random(), outline, place)


def place_of(x: float, y: float) -> int | None:
    """Return the place of a centre at fractions `x`, `y` of the image; None near a border."""
    if any(abs(v - border) < PLACE_MARGIN for v in (x, y) for border in (1 / 3, 2 / 3)):
        return None
    return 3 * min(2, int(y * 3)) + min(2, int(x * 3))


def _grid_items(rng: random.Random, size: tuple[int, int], backgrounds: tuple[Rgb, ...]) -> tuple[Item, ...]:
    width, height = size
    count = rng.choices(range(1, MOST_ITEMS + 1), (10, 22, 24, 20, 14, 10))[0]
    # Few colours and shapes give interesting counts and "no" answers.
    colours = tuple(rng.sample(COLOURS, rng.choice((1, 2, 2, 3, 10, 10))))
    shapes = tuple(rng.sample(SHAPES, rng.choice((1, 2, 2, 3, 8, 8))))
    items = []
    for place in sorted(rng.sample(range(9), count)):
        colour, rgb = ink_on(rng, backgrounds, colours)
        side = rng.uniform(0.17, 0.3)
        free = (1 / 3 - side) / 2
        x = (place % 3 + 0.5) / 3 + rng.uniform(-free, free)
        y = (place // 3 + 0.5) / 3 + rng.uniform(-free, free)
        pixels = side * min(width, height)
        items.append(_item(rng, rng.choice(shapes), colour, rgb, (x * width, y * height), pixels, place))
    return tuple(items)


def _one_item(rng: random.Random, size: tuple[int, int], backgrounds: tuple[Rgb, ...]) -> tuple[Item, ...]:
    width, height = size
    colour, rgb = ink_on(rng, backgrounds)
    side = rng.uniform(0.2, 0.9) * min(width, height)
    x, y = 0.5, 0.5
    if rng.random() < 0.7:
        x, y = (rng.uniform(side / 2, length - side / 2) / length for length in (width, height))
    return (_item(rng, rng.choice(SHAPES), colour, rgb, (x * width, y * height), side, place_of(x, y)),)


def _text(rng: random.Random, kind: Kind, listed_words: bool) -> str:
    if kind == "number":
        length = rng.choice((1, 2, 3, 4))
        first = rng.choice(DIGITS if length == 1 else DIGITS[1:])
        return first + "".join(rng.choice(DIGITS) for _ in range(length - 1))
    if listed_words or rng.random() < 0.4:
        length = rng.choice((2, 3, 4, 5, 6))
        return rng.choice([word for word in WORDS if len(word) == length])
    return "".join(rng.choice(LETTERS) for _ in range(rng.choice((2, 3, 4, 5, 6))))


def _writing(rng: random.Random, text: str, size: tuple[int, int], backgrounds: tuple[Rgb, ...]) -> Writing:
    width, height = size
    colours = ("black", "white") if rng.random() < 0.4 else COLOURS
    colour, rgb = ink_on(rng, backgrounds, colours)
    name = rng.choice(available_fonts())
    ems = [advance(name, character) for character in text]
    # Longer texts fill more of the width, so that characters stay legible.
    widest = 0.94 * width / sum(ems)
    least = min(widest, max(0.13 * width * len(text) / sum(ems), 0.2 * height))
    most = max(least, min(widest, 0.95 * height))
    font_size = max(8, round(math.exp(rng.uniform(math.log(least), math.log(most)))))
    font = load_font(name, font_size)
    left, top, right, bottom = font.getbbox(text)
    x = rng.uniform(0.02 * width, max(0.02 * width, 0.98 * width - (right - left)))
    y = rng.uniform(0.02 * height, max(0.02 * height, 0.98 * height - (bottom - top)))
    origin = round(x - left), round(y - top)
    boxes, pen = [], float(origin[0])
    for character in text:
        step = font.getlength(character)
        boxes.append((pen, origin[1] + top, pen + step, origin[1] + bottom))
        pen += step
    return Writing(text, colour, rgb, name, font_size, origin, tuple(boxes))


def sample_scene(seed: int, kind: Kind | None = None, *, listed_words: bool = False) -> Scene:
    """Equal arguments give equal scenes on machines with the same fonts.

    kind: of the scene; None: any. listed_words: use only words of the vocabulary, no random letters.
    """
    rng = random.Random(seed)
    kinds: tuple[Kind, ...] = ("grid", "one", "number", "word")
    drawn: Kind = rng.choices(kinds, (46, 14, 18, 22))[0] if kind is None else kind
    size = _native_size(rng)
    background = _background(rng)
    gradient = None
    if rng.random() < 0.08:
        shift = rng.randint(-30, 30)
        red, green, blue = (min(255, max(0, channel + shift)) for channel in background)
        gradient = red, green, blue
    backgrounds = (background,) if gradient is None else (background, gradient)
    items: tuple[Item, ...] = ()
    writing = None
    if drawn == "grid":
        items = _grid_items(rng, size, backgrounds)
    elif drawn == "one":
        items = _one_item(rng, size, backgrounds)
    else:
        writing = _writing(rng, _text(rng, drawn, listed_words), size, backgrounds)
    noise = rng.uniform(1, 8) if rng.random() < 0.1 else 0.0
    jpeg_quality = rng.randint(60, 95) if rng.random() < 0.12 else None
    antialias = max(size) <= 320 and rng.random() < 0.15
    return Scene(drawn, size, background, gradient, items, writing, noise, jpeg_quality, antialias, seed)
