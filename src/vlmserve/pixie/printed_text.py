"""Texts that documents print: words, numbers, prices, dates, times and codes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, Literal

from vlmserve.pixie.vocabulary import DIGITS, LETTERS, WORDS

TextKind = Literal["word", "words", "letters", "number", "price", "date", "time", "code", "percent", "mixed"]

#: Characters that documents have, spaces excepted.
CHARACTERS: Final[str] = DIGITS + LETTERS + LETTERS.lower() + ".,:;-+/%$#&()!?'*@="

TEXT_KINDS: Final[dict[TextKind, float]] = {
    "word": 16, "words": 22, "letters": 14, "number": 10, "price": 12, "date": 7, "time": 4, "code": 7,
    "percent": 3, "mixed": 5,
}  # fmt: skip
"""How often each kind is printed."""

MONTHS: Final = tuple("Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split())
STORES: Final[tuple[str, ...]] = (
    "Corner Shop", "CITY MARKET", "Green Farm", "BOOK HOUSE", "Sun Cafe", "Lake Hotel", "RIVER BAKERY", "Moon Bar",
    "TOY WORLD", "Quick Stop", "Old Mill", "STAR FOODS", "Garden Inn", "Blue Door", "Park Kiosk", "FRESH & CO",
)  # fmt: skip
ITEM_NAMES: Final[tuple[str, ...]] = (
    "Tea", "Coffee", "Milk", "Bread", "Butter", "Cheese", "Apple", "Banana", "Lemon", "Juice", "Water", "Soup",
    "Cake", "Cookie", "Pizza", "Onion", "Potato", "Rice", "Eggs", "Sugar", "Salt", "Honey", "Pen", "Paper", "Candle",
    "Lamp", "Soap", "Towel", "Book", "Map", "Ticket", "Toy", "Ham", "Fish", "Salad", "Beer", "Wine", "Grapes",
)  # fmt: skip
UNITS: Final[tuple[tuple[str, str], ...]] = (
    ("Speed", "km/h"), ("Pressure", "bar"), ("Fuel", "%"), ("Load", "%"), ("Power", "kW"), ("Temp", "C"),
    ("Level", "cm"), ("Voltage", "V"),
)  # fmt: skip
_VOWELS, _CONSONANTS = "aeiou", "bcdfghjklmnpqrstvwxyz"


def price(cents: int) -> str:
    """Two digits after the point, such as ``"12.50"``."""
    return f"{cents // 100}.{cents % 100:02d}"


def _cased(word: str, rng: random.Random) -> str:
    return rng.choice((str.upper, str.lower, str.capitalize, str.capitalize))(word)


def _invented(rng: random.Random) -> str:
    """Invent a word that can be pronounced."""
    syllables = (rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.choice((1, 2, 2, 3))))
    return "".join(syllables) + rng.choice(("", "", rng.choice(_CONSONANTS)))


def _word(rng: random.Random) -> str:
    return _cased(rng.choice(WORDS) if rng.random() < 0.5 else _invented(rng), rng)


def _date(rng: random.Random) -> str:
    day, month, year = rng.randint(1, 28), rng.randint(1, 12), rng.randint(1990, 2039)
    return rng.choice(
        (
            f"{year}-{month:02d}-{day:02d}",
            f"{day:02d}.{month:02d}.{year}",
            f"{month:02d}/{day:02d}/{year}",
            f"{day} {MONTHS[month - 1]} {year}",
            f"{MONTHS[month - 1]} {day}, {year}",
        )
    )


def _price(rng: random.Random) -> str:
    shown = price(rng.choice((rng.randint(5, 999), rng.randint(100, 9999), rng.randint(1000, 99999))))
    return rng.choice(("", "$", "$")) + shown + rng.choice(("", "", " EUR"))


_TEXTS: Final[dict[TextKind, Callable[[random.Random], str]]] = {
    "word": _word,
    "words": lambda rng: " ".join(_word(rng) for _ in range(rng.choice((2, 2, 3, 4)))),
    "letters": lambda rng: "".join(rng.choice(CHARACTERS[:62]) for _ in range(rng.randint(1, 8))),
    "number": lambda rng: str(rng.randrange(10 ** rng.randint(1, 6))),
    "price": _price,
    "date": _date,
    "time": lambda rng: f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}{rng.choice(('', '', ' am', ' pm'))}",
    "code": lambda rng: (
        "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 3)))
        + rng.choice("-/#")
        + str(rng.randrange(10 ** rng.randint(2, 4)))
    ),
    "percent": lambda rng: f"{rng.choice(('', '+', '-'))}{rng.randint(0, 100)}%",
    "mixed": lambda rng: "".join(rng.choice(CHARACTERS) for _ in range(rng.randint(2, 7))),
}


def text_of(kind: TextKind, rng: random.Random) -> str:
    return _TEXTS[kind](rng)


def text_to_fill(rng: random.Random, width: float, measure: Callable[[str], float]) -> str:
    """Sample a text that is at most `width` pixels wide; empty if nothing fits. measure: the width of a text."""
    kinds, weights = tuple(TEXT_KINDS), tuple(TEXT_KINDS.values())
    for _ in range(5):
        text = text_of(rng.choices(kinds, weights)[0], rng)
        if measure(text) <= width:
            return text
    for count in (4, 2, 1):
        text = "".join(rng.choice(CHARACTERS[:62]) for _ in range(count))
        if measure(text) <= width:
            return text
    return ""
