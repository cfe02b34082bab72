"""Workloads from a JSONL file, a request per line."""

from __future__ import annotations

import codecs
import mimetypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from vlmserve.errors import ConfigurationError
from vlmserve.folders import expanded
from vlmserve.loadtest.images import data_url
from vlmserve.loadtest.settings import WorkloadConfig

_URL_SCHEMES = ("http://", "https://", "data:", "file://")


class _Line(msgspec.Struct):
    """`output_tokens` is vLLM's name for `max_tokens`. Ignores unknown keys."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    images: list[str] = []
    max_tokens: int | None = None
    output_tokens: int | None = None
    answer: Any = None


@dataclass(frozen=True)
class Entry:
    """A prompt with image URLs, or complete messages."""

    line: int
    """Line in the file, from 1."""
    prompt: str | None
    messages: list[dict[str, Any]] | None
    urls: list[str]
    max_tokens: int | None
    answer: str | None = None
    """The correct answer."""


def read_dataset(config: WorkloadConfig) -> list[Entry]:
    entries = read_entries(Path(str(config.dataset_path)), "--dataset-path")
    if config.images or config.turns > 1:
        raise ConfigurationError("--images and --turns are for random workloads; a dataset has its own")
    return entries


def read_entries(path: Path, flag: str) -> list[Entry]:
    """Read non-empty lines. Image paths are relative to the file. flag: for errors.

    Raises ConfigurationError for an unreadable file.
    """
    path = expanded(path)
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise ConfigurationError(f"{flag} {path}: the file cannot be read: {error.strerror}") from None
    entries = [_entry(path, f"{flag} {path}", number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not entries:
        raise ConfigurationError(f"{flag} {path}: the file is empty; write a JSON object on each line")
    return entries


def _entry(path: Path, named: str, number: int, text: bytes) -> Entry:
    where = f"{named}: line {number}"
    try:
        line = msgspec.json.decode(text, type=_Line)
    except msgspec.DecodeError as error:
        raise ConfigurationError(f'{where}: {error}; write {{"prompt": "...", "max_tokens": 64}}') from None
    if (line.prompt is None) == (line.messages is None):
        raise ConfigurationError(f"{where}: needs either prompt or messages")
    if line.messages is not None and line.images:
        raise ConfigurationError(f"{where}: images belong to a prompt; in messages they are content parts")
    urls = [_url(path.parent, image, where) for image in line.images]
    answer = line.answer if isinstance(line.answer, str) else None
    return Entry(number, line.prompt, line.messages, urls, line.max_tokens or line.output_tokens, answer)


def _url(folder: Path, image: str, where: str) -> str:
    if image.startswith(_URL_SCHEMES):
        return image
    file = folder / image
    kind = (mimetypes.guess_type(file.name)[0] or "image/jpeg").removeprefix("image/")
    try:
        return data_url(file.read_bytes(), kind)
    except OSError as error:
        raise ConfigurationError(f"{where}: the image {file} cannot be read: {error.strerror}") from None
