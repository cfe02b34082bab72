from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from vlmserve.errors import CheckpointNotFoundError
from vlmserve.gguf_header import PART

GGUF = ".gguf"
PROJECTOR = "mmproj"
"""Appears in the names of vision tower files."""
_PRECISIONS = ("f16", "bf16", "f32", "q8_0")
"""Precisions of vision towers, preferred first: 16-bit rounding does not change answers."""
_SHOWN = 8


class Choice(NamedTuple):
    """parts: files of the language model, in order. mmproj: of the vision tower."""

    parts: tuple[str, ...]
    mmproj: str | None


def choose_files(paths: Collection[str], wanted: str | None, name: str) -> Choice:
    """paths: with slashes. wanted: a precision like ``Q4_K_M``, or a folder or file; None: expect one model. name: for
    errors.

    Raises CheckpointNotFoundError unless exactly one model matches.
    """
    files = sorted(path for path in paths if path.lower().endswith(GGUF))
    models: dict[str, list[str]] = {}
    for path in files:
        if PROJECTOR not in PurePosixPath(path).name.lower():
            match = PART.fullmatch(path)
            models.setdefault(match["stem"] if match else path, []).append(path)
    fitting = [model for model in models.values() if wanted is None or any(_fits(path, wanted) for path in model)]
    if len(fitting) != 1:
        there = ", ".join(model[0] for model in (fitting or list(models.values()))[:_SHOWN]) or f"no {GGUF} file"
        reason = "several models that fit" if fitting else f"no {GGUF} file of a language model"
        of = f" for {wanted!r}" if wanted else ""
        raise CheckpointNotFoundError(f"{name} has {reason}{of}; there is {there}: give its own path")
    projectors = [path for path in files if PROJECTOR in PurePosixPath(path).name.lower()]
    return Choice(tuple(fitting[0]), _best(projectors, fitting[0][0]))


def _fits(path: str, wanted: str) -> bool:
    if path == wanted or path.startswith(f"{wanted.rstrip('/')}/"):
        return True
    return re.search(rf"(?<![a-z0-9]){re.escape(wanted.lower())}(?![a-z0-9_])", path.lower()) is not None


def _best(projectors: Sequence[str], model: str) -> str | None:
    """Prefer a file in the model's folder to its parent's."""
    folders = [str(folder) for folder in PurePosixPath(model).parents]

    def rank(path: str) -> tuple[int, int, str]:
        found = [place for place, precision in enumerate(_PRECISIONS) if _fits(path, precision)]
        return folders.index(str(PurePosixPath(path).parent)), min(found, default=len(_PRECISIONS)), path

    near = [path for path in projectors if str(PurePosixPath(path).parent) in folders]
    return min(near, key=rank, default=None)
