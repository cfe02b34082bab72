"""Disk space that is set aside, so that things can be deleted where the disk is full.

SQLite writes what a deletion changes into its log before any space is free again.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

NUM_BYTES = 16 * 1024**2
"""Four times the log that SQLite lets grow before it writes it back."""
_BLOCK = bytes(1024**2)


class Reserve:
    """A file beside a database that does nothing but take space."""

    def __init__(self, database: Path) -> None:
        self._path = database.with_name(f"{database.name}-reserve")

    def take(self) -> None:
        """Set the space aside if it is there and not set aside yet."""
        with contextlib.suppress(OSError):
            if self._path.stat().st_size == NUM_BYTES:
                return
        try:
            with open(self._path, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                for _ in range(NUM_BYTES // len(_BLOCK)):
                    file.write(_BLOCK)
        except OSError as error:
            logger.warning("No space could be set aside in %s: %s", self._path, error.strerror)
            self.give()

    def give(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
