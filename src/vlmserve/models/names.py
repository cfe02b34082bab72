"""Short names of models on the Hugging Face hub. Imports no torch."""

from __future__ import annotations

import difflib

from vlmserve.families.registry import families
from vlmserve.settings.config import BUILT_IN_MODEL

_SUGGESTED = 4
MODELS = tuple(model for family in families() for model in family.short_names)
REPOSITORIES = {model.name: model.repository for model in MODELS}


def repository_of(name: str) -> str | None:
    return REPOSITORIES.get(name.lower())


def name_of(repository: str) -> str | None:
    return next((name for name, known in REPOSITORIES.items() if known == repository), None)


def is_short(name: str) -> bool:
    """Return whether a name has a short name's form: a family, or a name with a colon and a size."""
    return "/" not in name and (":" in name or any(known.startswith(f"{name.lower()}:") for known in REPOSITORIES))


def suggestion(name: str) -> str:
    """The end of an error message: similar short names, if there are any."""
    name = name.lower().rpartition("/")[2]
    family = name.partition(":")[0]
    near = [known for known in REPOSITORIES if known.startswith(f"{family}:")]
    near = near or difflib.get_close_matches(name, (BUILT_IN_MODEL, *REPOSITORIES), n=_SUGGESTED, cutoff=0.7)
    return f"; did you mean {' or '.join(near[:_SUGGESTED])}?" if near else ""
