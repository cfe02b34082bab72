"""The tables of short names and of supported families."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vlmserve.families.family import BYTES, LanguageFamily, VisionFamily
from vlmserve.families.registry import LANGUAGE_FAMILIES, families

NAME_HEADINGS = ("Name", "Repository", "Takes", "Billion parameters", *(f"GB in {weights}" for weights in BYTES))
"""GB are 10^9 bytes of weights."""
FAMILY_HEADINGS = ("Models", "Architecture", "Takes", "With")


def name_rows() -> list[tuple[str, ...]]:
    return [
        (
            model.name,
            model.repository,
            family.takes,
            f"{model.parameters / 1e9:.2f}",
            *(f"{model.memory(weights) / 1e9:.1f}" for weights in BYTES),
        )
        for family in families()
        for model in family.short_names
    ]


def family_rows() -> list[tuple[str, str, str, str]]:
    return [
        (family.models, family.architecture, family.takes, _options(family))
        for family in families()
        if family.architecture is not None
    ]


def markdown() -> str:
    return f"{_table(NAME_HEADINGS, name_rows(), numbers=4)}\n{_table(FAMILY_HEADINGS, family_rows())}"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0) -> str:
    lines = [headings, ("---",) * (len(headings) - numbers) + ("---:",) * numbers, *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _options(family: LanguageFamily | VisionFamily) -> str:
    decoder = LANGUAGE_FAMILIES[family.text_type] if isinstance(family, VisionFamily) else family
    # Cross-attention takes no adapters.
    adapters = family.takes != "text, one image"
    return ", ".join(
        ["int8", "int4"] + ["LoRA"] * adapters + ["sliding window"] * ("sliding_window" in decoder.defaults)
    )
