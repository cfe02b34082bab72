"""Presents two GGUF files, language model and vision tower, as a folder in Hugging Face layout."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from vlmserve.errors import ModelLoadError
from vlmserve.folders import cache_folder
from vlmserve.gguf.config import read_config
from vlmserve.gguf.mmproj import full_config, media_settings
from vlmserve.gguf_header import read_header

INDEX = "gguf.json"
"""The file that names the two GGUF files."""


class Pair(NamedTuple):
    model: Path
    mmproj: Path


def read_pair(folder: Path) -> Pair | None:
    """Return None for another checkpoint. Raises ModelLoadError for a broken folder."""
    if not (folder / INDEX).is_file():
        return None
    try:
        named = json.loads((folder / INDEX).read_text("utf-8"))
        return Pair(Path(named["model"]), Path(named["mmproj"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{folder / INDEX} does not name two GGUF files: {error!r}") from error


def language_model(folder: Path) -> Path | None:
    """The GGUF file of the language model; None for another format. folder: may be a GGUF file."""
    if folder.is_file():
        return folder
    pair = read_pair(folder)
    return None if pair is None else pair.model


def make_pair(model: Path, mmproj: Path) -> Path:
    """Make a folder for both files in the user's cache, else a temporary one. Equal files get the same folder.

    Raises like `read_header`, ModelLoadError for mismatched files, UnsupportedModelError for an unsupported model or
    projector.
    """
    text, vision = read_header(model), read_header(mmproj)
    files = {
        INDEX: {"model": str(text.path.absolute()), "mmproj": str(vision.path.absolute())},
        "config.json": full_config(vision, text, read_config(text)),
        **media_settings(vision),
    }
    contents = {name: json.dumps(content, indent=2) for name, content in files.items()}
    name = blake3(json.dumps(contents).encode()).hexdigest(length=16)
    try:
        place = cache_folder() / "gguf"
        place.mkdir(parents=True, exist_ok=True)
        return _write(place / name, contents)
    except OSError:
        # Only temporary files can be written.
        place = Path(tempfile.mkdtemp(prefix="vlmserve-gguf-"))
        atexit.register(shutil.rmtree, place, ignore_errors=True)
        return _write(place / name, contents)


def _write(folder: Path, contents: dict[str, str]) -> Path:
    if folder.is_dir():
        return folder
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    for name, content in contents.items():
        (partial / name).write_text(content, "utf-8")
    try:
        partial.rename(folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        if not folder.is_dir():
            raise
    return folder
