"""Memory that a process shares with the one that decodes its file, so that pixels are copied once.

The memory cannot shrink: otherwise a hostile file could end the process that reads it.
"""

from __future__ import annotations

import fcntl
import mmap
import os


def make_memory(num_bytes: int) -> int | None:
    """Return a file in memory of that size. It takes up only what is written. None: the system has none.

    Builds of Python for old versions of Linux's C library have none, either.
    """
    if not (hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")):
        return None
    try:
        file = os.memfd_create("pixels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return None
    try:
        os.ftruncate(file, num_bytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(file)
        return None
    return file


def mapped(file: int) -> memoryview:
    """Map the whole file, and close it."""
    try:
        return memoryview(mmap.mmap(file, 0))
    finally:
        os.close(file)
