"""Short names of models on the Hugging Face hub. Imports no torch."""

from __future__ import annotations

import difflib

from vlmserve.families.family import BYTES
from vlmserve.families.registry import families

_SUGGESTED = 4
MODELS = tuple(model for family in families() for model in family.short_names)
_REPOSITORIES = {model.name: model.repository for model in MODELS}


def repository_of(name: str) -> str | None:
    """The repository that a short name stands for; None for what is no short name."""
    return _REPOSITORIES.get(name.lower())


def is_short(name: str) -> bool:
    """Whether a name can be nothing but a short one, known or not: a family, or what has a size behind a colon."""
    return "/" not in name and (":" in name or any(known.startswith(f"{name.lower()}:") for known in _REPOSITORIES))


def suggestion(name: str) -> str:
    """Short names like another name, as the end of an error message; empty if there are none."""
    name = name.lower().rpartition("/")[2]
    family = name.partition(":")[0]
    near = [known for known in _REPOSITORIES if known.startswith(f"{family}:")]
    near = near or difflib.get_close_matches(name, _REPOSITORIES, n=_SUGGESTED, cutoff=0.7)
    return f"; did you mean {' or '.join(near[:_SUGGESTED])}?" if near else ""


HEADINGS = ("Name", "Repository", "Takes", "Billion parameters", *(f"GB in {weights}" for weights in BYTES))


def rows() -> list[tuple[str, ...]]:
    """The table as text, in the order of `HEADINGS`. GB: 10^9 bytes of weights."""
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


def markdown() -> str:
    """The table as it stands in the documentation."""
    lines = [HEADINGS, ("---",) * 3 + ("---:",) * (len(HEADINGS) - 3), *rows()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
