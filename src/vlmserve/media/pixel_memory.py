"""Memory shared between a decoding process and its parent, so that pixels are copied once.

It is sealed: a hostile file could crash the reader by shrinking it.
"""

from __future__ import annotations

import fcntl
import mmap
import os


def make_memory(num_bytes: int) -> int | None:
    """It takes only the memory that is written. None: unsupported by the system or this Python."""
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
    try:
        return memoryview(mmap.mmap(file, 0))
    finally:
        os.close(file)
