"""Counts of the disk cache since the engine started."""

from __future__ import annotations

import msgspec


class DiskStats(msgspec.Struct, frozen=True):
    """Counts of image embeddings and KV blocks."""

    disk_hits: int = 0
    disk_misses: int = 0
    """Lookups that found no file."""
    disk_broken: int = 0
    """Files that were changed, incomplete or renamed."""
    disk_read_bytes: int = 0
    disk_written: int = 0
    disk_written_bytes: int = 0
    disk_queued_bytes: int = 0
    """Bytes waiting to be written."""
    disk_dropped: int = 0
    """Entries dropped because too many bytes waited."""
    disk_evictions: int = 0
    disk_used_bytes: int = 0
    """Size of all engines' files, updated from time to time."""
    disk_limit_bytes: int = 0
    """0: no disk cache."""
