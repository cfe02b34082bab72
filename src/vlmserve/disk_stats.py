"""Counts of the disk cache since the engine started."""

from __future__ import annotations

import msgspec


class DiskStats(msgspec.Struct, frozen=True):
    """Counts of entries: embeddings of images, and KV blocks."""

    disk_hits: int = 0
    disk_misses: int = 0
    """Entries that were looked for and are in no file."""
    disk_broken: int = 0
    """Files that were changed, incomplete, or written under another name."""
    disk_read_bytes: int = 0
    disk_written: int = 0
    disk_written_bytes: int = 0
    disk_queued_bytes: int = 0
    """Bytes that wait to be written."""
    disk_dropped: int = 0
    """Entries that were not kept because too much waited to be written."""
    disk_evictions: int = 0
    disk_used_bytes: int = 0
    """Size of the files of all engines, counted from time to time."""
    disk_limit_bytes: int = 0
    """0: there is no disk cache."""
