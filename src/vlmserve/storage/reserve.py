"""Reserved disk space, so that deletions succeed on a full disk: SQLite first writes them to its log."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

NUM_BYTES = 16 * 1024**2
"""Bytes: 4x the size that makes SQLite write its log back."""
_BLOCK = bytes(1024**2)


class Reserve:
    """A file next to a database that only takes space."""

    def __init__(self, database: Path) -> None:
        self._path = database.with_name(f"{database.name}-reserve")

    def take(self) -> None:
        """Reserve the space if the disk has it."""
        with contextlib.suppress(OSError):
            if self._path.stat().st_size == NUM_BYTES:
                return
        try:
            with open(self._path, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                for _ in range(NUM_BYTES // len(_BLOCK)):
                    file.write(_BLOCK)
        except OSError as error:
            logger.warning("No disk space could be reserved in %s: %s", self._path, error.strerror)
            self.give()

    def give(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
