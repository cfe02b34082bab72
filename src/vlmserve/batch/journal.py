"""Stores results as they come, so that an interrupted batch can continue."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec

from vlmserve.errors import ConfigurationError


class Result(msgspec.Struct, omit_defaults=True):
    """finish_reason: "stop" or "length". error: why there is no answer."""

    answer: str = ""
    finish_reason: str = ""
    error: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Line(msgspec.Struct):
    question: str
    result: Result


class Journal:
    """Results by the digests of their questions. `add` returns after a result is on disk.

    Drops an incomplete last line of a killed process. Raises ConfigurationError if another process writes to the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results: dict[bytes, Result] = {}
        self._file = path.open("ab+")
        _lock(self._file.fileno(), path)
        self._file.truncate(self._read())

    def _read(self) -> int:
        """Read the file. Returns the bytes of complete lines."""
        self._file.seek(0)
        whole = 0
        for line in _lines(self._file.read()):
            try:
                entry = msgspec.json.decode(line, type=_Line)
                self.results[bytes.fromhex(entry.question)] = entry.result
            except (msgspec.DecodeError, ValueError):
                raise ConfigurationError(
                    f"{self.path} is damaged after {whole} bytes; remove it to start again"
                ) from None
            whole += len(line) + 1
        return whole

    def add(self, question: bytes, result: Result) -> None:
        """Replaces an earlier result."""
        self.results[question] = result
        self._file.write(msgspec.json.encode(_Line(question.hex(), result)) + b"\n")
        self._file.flush()
        os.fdatasync(self._file.fileno())

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _lines(data: bytes) -> Iterator[bytes]:
    *whole, _ = data.split(b"\n")
    yield from whole


def _lock(descriptor: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not on this system
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigurationError(f"another process writes to {path}; wait for it, or give another --output") from None
