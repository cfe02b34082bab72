"""The table of supported families."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vlmserve.families.family import VisionFamily
from vlmserve.families.registry import LANGUAGE_FAMILIES, VISION_FAMILIES

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
    for family in VISION_FAMILIES.values():
        # Those without a placeholder attend to their image by cross-attention.
        options = _options(family.text_type, adapters=family.image_token_id is not None)
        yield Entry(family.models, family.architecture, _takes(family), options)
    for name, language in LANGUAGE_FAMILIES.items():
        if language.architecture is not None:
            yield Entry(language.models, language.architecture, "text", _options(name))


def markdown() -> str:
    """The table as it stands in the documentation."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *catalogue()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _takes(family: VisionFamily) -> str:
    if family.image_token_id is None:
        return "text, one image"
    return "text, images, videos" if family.videos else "text, images"


def _options(text_type: str, *, adapters: bool = True) -> str:
    options = ["int8", "int4"] + ["LoRA"] * adapters
    return ", ".join(options + ["sliding window"] * ("sliding_window" in LANGUAGE_FAMILIES[text_type].defaults))
