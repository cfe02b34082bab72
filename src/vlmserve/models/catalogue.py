"""The table of supported families."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vlmserve.families.family import LanguageFamily, VisionFamily
from vlmserve.families.registry import LANGUAGE_FAMILIES, families

HEADINGS = ("Models", "Architecture", "Takes", "With")


class Entry(NamedTuple):
    """A row, in the order of `HEADINGS`.

    models: well-known names of the family. takes: what a prompt may hold. options: how weights can be quantized at
    load, whether there can be LoRA adapters, and whether attention slides where a checkpoint asks for it.
    """

    models: str
    architecture: str
    takes: str
    options: str


def catalogue() -> Iterator[Entry]:
    """All families: those that take images, then language models."""
    for family in families():
        if family.architecture is not None:
            yield Entry(family.models, family.architecture, family.takes, _options(family))


def markdown() -> str:
    """The table as it stands in the documentation."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *catalogue()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _options(family: LanguageFamily | VisionFamily) -> str:
    options = ["int8", "int4"]
    if isinstance(family, VisionFamily):
        # Models without a placeholder attend to their image by cross-attention, which takes no adapters.
        options += ["LoRA"] * (family.image_token_id is not None)
        defaults = LANGUAGE_FAMILIES[family.text_type].defaults
    else:
        options += ["LoRA"]
        defaults = family.defaults
    return ", ".join(options + ["sliding window"] * ("sliding_window" in defaults))
