"""Cache entries in files, shared with later starts and other engines."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from vlmserve.disk_stats import DiskStats
from vlmserve.folders import expanded
from vlmserve.steps import Bytes

SUFFIX = ".entry"
MAGIC = b"vlmentry"
_HEADER = struct.Struct("<8sQ32s")
"""Magic number, content bytes, checksum."""
_NAME = re.compile(r"[0-9a-f]{64}\.entry")
_UNFINISHED = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{8}\.writing")
ABANDONED = 600
"""Seconds after which an unfinished file is abandoned."""
MAX_QUEUED = 256 * 2**20
"""Maximum bytes queued for writing. More entries are dropped."""
KEPT_SHARE = 0.9
"""Share of the limit that eviction leaves."""
COUNTED_SHARE = 1 / 16
"""Share of the limit after which a writer recounts all engines' files."""
_BLOCK = 4096
"""Files take multiples of this many bytes."""
_NICENESS = 19
"""Niceness of the writing thread, to keep answers fast."""

Content = Callable[[], Bytes]
Buffer = Callable[[int], Bytes]

logger = logging.getLogger(__name__)


def _new_buffer(size: int) -> Bytes:
    return np.empty(size, np.uint8)


class Entry(NamedTuple):
    """used: Unix time of the last read or write."""

    path: Path
    num_bytes: int
    used: float


class Entries:
    """limit: of all files together, in bytes."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    @classmethod
    def at(cls, folder: str, limit: int) -> Entries:
        return cls(expanded(folder), limit)

    def is_usable(self, *, log: bool = True) -> bool:
        """Create the folder if needed, or log why it is unusable."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self.folder.stat().st_mode & stat.S_IWOTH:
                return True
            problem = f"every user can write to {self.folder} (chmod o-w)"
        except OSError as error:
            problem = str(error)
        if log:
            logger.warning("disk cache: off: %s", problem)
        return False

    def all(self) -> list[Entry]:
        found = [Entry(path, status.st_size, status.st_mtime) for path, status in self._own(_NAME)]
        return sorted(found, key=lambda entry: -entry.used)

    def clear(self) -> int:
        return sum(_remove(entry) for entry in self.all()) + self.remove_unfinished(0)

    def evict(self, size: int) -> tuple[int, int]:
        """Remove the least recently used files. Returns total and removed bytes."""
        entries = self.all()
        total, count = size + sum(_on_disk(entry.num_bytes) for entry in entries), 0
        if total > self.limit:
            while entries and total > self.limit * KEPT_SHARE:
                entry = entries.pop()
                _remove(entry)
                total -= _on_disk(entry.num_bytes)
                count += 1
        return total, count

    def remove_unfinished(self, seconds: float = ABANDONED) -> int:
        oldest = time.time() - seconds
        found = self._own(_UNFINISHED)
        return sum(_remove(Entry(path, one.st_size, one.st_mtime)) for path, one in found if one.st_mtime <= oldest)

    def _own(self, name: re.Pattern[str]) -> Iterator[tuple[Path, os.stat_result]]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as found:
            for one in found:
                if name.fullmatch(one.name):
                    with contextlib.suppress(OSError):  # another process removed it
                        status = one.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            yield Path(one.path), status


class DiskTier:
    """Entries of one model. Several threads may read.

    A checksum of name and content makes broken or foreign files misses. Files are renamed when complete, so readers
    need no locks.
    """

    def __init__(self, entries: Entries, identity: bytes) -> None:
        """identity: digest of what contents depend on, except keys."""
        self.entries = entries
        self._identity = identity
        self._lock = threading.Lock()
        self._queued: set[bytes] = set()
        self._queued_bytes = 0
        self._used: int | None = None
        self._uncounted = 0
        self._writes = True
        self._hits = self._misses = self._broken = self._written = self._dropped = self._evicted = 0
        self._read_bytes = self._written_bytes = 0
        self._writer = ThreadPoolExecutor(1, "disk-cache", _lower_priority)

    def stats(self) -> DiskStats:
        return DiskStats(
            disk_hits=self._hits,
            disk_misses=self._misses,
            disk_broken=self._broken,
            disk_read_bytes=self._read_bytes,
            disk_written=self._written,
            disk_written_bytes=self._written_bytes,
            disk_queued_bytes=self._queued_bytes,
            disk_dropped=self._dropped,
            disk_evictions=self._evicted,
            disk_used_bytes=self._used or 0,
            disk_limit_bytes=self.entries.limit,
        )

    def path(self, key: bytes) -> Path:
        return self.entries.folder / (blake3(self._identity + key).hexdigest() + SUFFIX)

    def has(self, key: bytes) -> bool:
        found = os.path.exists(self.path(key))
        self._misses += not found
        return found

    def read(self, key: bytes, size: int | None, buffer: Buffer = _new_buffer) -> Bytes | None:
        """Returns None for missing entries, and removes broken files.

        size: None if unknown. buffer: returns the array to fill.
        """
        path = self.path(key)
        try:
            content = _read(path, size, buffer)
        except FileNotFoundError:
            self._misses += 1
            return None
        except (OSError, MemoryError) as error:  # a later read may succeed
            self._broken += 1
            logger.debug("disk cache: cannot read %s (%s)", path, error)
            return None
        except ValueError as error:
            self._broken += 1
            logger.debug("disk cache: removing %s: %s", path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with self._lock:
            self._hits += 1
            self._read_bytes += len(content)
        return content

    @property
    def writes(self) -> bool:
        """False after a file could not be written."""
        return self._writes

    @property
    def room(self) -> int:
        return max(0, MAX_QUEUED - self._queued_bytes) if self._writes else 0

    def note_dropped(self, count: int) -> None:
        self._dropped += count if self._writes else 0

    def store(self, key: bytes, size: int, content: Content) -> None:
        """Write in the background, unless too much is queued."""
        with self._lock:
            if not self._writes or key in self._queued:
                return
            if self._queued_bytes + size > MAX_QUEUED or size > self.entries.limit:
                self._dropped += 1
                return
            self._queued.add(key)
            self._queued_bytes += size
        self._writer.submit(self._store, key, size, content)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Includes queued entries."""
        self._writer.submit(_remove_files, [*map(self.path, keys)])

    def prepare(self, prepare: Callable[[int], None]) -> None:
        self._writer.submit(lambda: prepare(sum(entry.num_bytes for entry in self.entries.all())))

    def flush(self) -> None:
        self._writer.submit(bool).result()

    def _store(self, key: bytes, size: int, content: Content) -> None:
        path = self.path(key)
        try:
            if not self._writes:
                return
            if path.exists():
                _touch(path)
                return
            self._make_room(_on_disk(_HEADER.size + size))
            _write(path, content())
        except OSError as error:
            self._writes = False
            logger.warning("disk cache: keeps nothing more, since %s cannot be written: %s", path, error.strerror)
            return
        finally:
            with self._lock:
                self._queued.remove(key)
                self._queued_bytes -= size
        self._written += 1
        self._written_bytes += size

    def _make_room(self, size: int) -> None:
        """Evict files if they may exceed the limit."""
        if self._used is None:
            self.entries.remove_unfinished()
        self._uncounted += size
        used = None if self._used is None else self._used + size
        if used is None or used > self.entries.limit or self._uncounted > self.entries.limit * COUNTED_SHARE:
            used, count = self.entries.evict(size)
            self._evicted += count
            self._uncounted = 0
        self._used = used


def _checksum(path: Path, content: Bytes) -> bytes:
    return blake3(path.stem.encode()).update(content.data).digest()


def _read(path: Path, size: int | None, buffer: Buffer) -> Bytes:
    """Raises ValueError for a wrong name, size or checksum, OSError if unreadable."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError("it is no file")
    # a pipe may have replaced the file
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.geteuid(), 0) or status.st_mode & stat.S_IWOTH:
            raise ValueError("it belongs to another user")
        num_bytes = status.st_size - _HEADER.size
        if num_bytes < 0 or size not in (None, num_bytes):
            raise ValueError("it has another size")
        header, content = bytearray(_HEADER.size), buffer(num_bytes)
        if file.readinto(header) != len(header) or file.readinto(content.data) != num_bytes:
            raise ValueError("it is incomplete")
        magic, length, checksum = _HEADER.unpack(header)
        if (magic, length) != (MAGIC, num_bytes) or checksum != _checksum(path, content):
            raise ValueError("its contents were changed")
        _touch(descriptor)
    return content


def _touch(file: Path | int) -> None:
    with contextlib.suppress(OSError):  # another user's, read-only, or evicted
        os.utime(file)


def _write(path: Path, content: Bytes) -> None:
    """Leaves nothing behind on failure."""
    unfinished = path.with_suffix(f".{secrets.token_hex(4)}.writing")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            for piece in (_HEADER.pack(MAGIC, len(content), _checksum(path, content)), content.data):
                rest = memoryview(piece).cast("B")
                while rest:
                    rest = rest[file.write(rest) :]
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def _remove(entry: Entry) -> int:
    entry.path.unlink(missing_ok=True)
    return entry.num_bytes


def _remove_files(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _on_disk(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK) * _BLOCK


def _lower_priority() -> None:
    if sys.platform == "linux":  # other systems have no priority per thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
