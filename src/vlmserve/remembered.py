"""Measurements that are stored in the user's cache folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from vlmserve.folders import cache_folder

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_FACTS = 256
"""Maximum facts of a file, which drops the oldest."""


class Remembered(Generic[T]):
    """Facts of one type. Keys name everything that a fact depends on. name: of the file."""

    def __init__(self, name: str, kind: type[T]) -> None:
        self._name = name
        self._kind: type[T] = kind

    def get(self, key: str, measure: Callable[[], T]) -> T:
        """Return a stored fact, or measure and store it. The first process to write decides."""
        if (known := self.facts.get(key)) is not None:
            return known
        value = measure()
        if (known := self.facts.get(key)) is not None:
            return known
        self.put(key, value)
        return value

    def put(self, key: str, value: T) -> None:
        facts = self.facts
        facts.pop(key, None)
        self._write(dict([*facts.items(), (key, value)][-MAX_FACTS:]))

    def clear(self) -> int:
        """Remove all facts. Returns the bytes of their file. Raises OSError."""
        try:
            removed = self.file.stat().st_size
        except FileNotFoundError:
            return 0
        self.file.unlink(missing_ok=True)
        return removed

    @property
    def facts(self) -> dict[str, T]:
        try:
            return msgspec.json.decode(self.file.read_bytes(), type=dict[str, self._kind])  # type: ignore[name-defined]
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("%s cannot be read (%s): vlmserve measures again", self.file, error)
            return {}

    @property
    def file(self) -> Path:
        return cache_folder() / self._name

    def _write(self, facts: dict[str, T]) -> None:
        unfinished = self.file.with_suffix(f".{os.getpid()}")
        try:
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(facts)))
            unfinished.replace(self.file)
        except OSError as error:
            logger.info("%s is not remembered: %s", self._name, error)
