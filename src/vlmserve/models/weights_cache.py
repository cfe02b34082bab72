"""Cache packed weights in files, so that later starts map them instead of packing again.

A file holds a fixed prefix, a JSON header and the tensors. Its name is a digest of checkpoint, settings, kernels and
vlmserve's code. Processes that map one file share its memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import mmap
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from blake3 import blake3
from torch import Tensor

from vlmserve.folders import cache_folder, code_digest, expanded
from vlmserve.kernels import extension
from vlmserve.models.files import weight_files
from vlmserve.models.identity import computation_parts, package_version
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.packed_model import PackedModel

FORMAT = 2
"""Version of the files."""
SMALLEST_MODEL = 128 * 2**20
"""Minimum bytes of packed weights in a file: smaller models load as fast from their checkpoints."""
SPARED_BYTES = 2**30
"""Bytes of disk space to leave free."""
SUFFIX = ".weights"

PACKAGE = Path(__file__).parents[1]
PACKING = (
    "devices", "families", "gguf", "gguf_header.py", "kernels", "layer_specs.py", "layers", "models", "quant",
    "settings/quantization.py",
)  # fmt: skip
"""Folders and files of code that packed weights depend on."""
_NAME = re.compile(r"[0-9a-f]{32}\.weights")
_UNFINISHED = re.compile(r"[0-9a-f]{32}\.\w+\.writing", re.ASCII)
MAGIC = b"vlmserve"
_PREFIX = len(MAGIC) + 8 + 32
"""Bytes before the header: the magic number, the header's length, and its digest."""
_LARGEST_HEADER = 64 * 2**20
_ALIGNMENT = 64
_SAMPLE, _SAMPLE_STEP = 64, 2**20
"""Bytes of each sample of the tensors, and distance between samples."""
_SYNCED = 64 * 2**20
"""Bytes between two syncs to the disk."""
_NICENESS = 19
"""Nice value of the writing thread, so that first answers are not slower."""
_BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, OverflowError)
"""Errors of reading a broken file."""
_DTYPES = {str(dtype): dtype for dtype in (torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.int64)}

_Found = tuple[Path, os.stat_result]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CachedModel:
    packed: PackedModel
    identity: bytes
    num_bytes: int


@dataclass(frozen=True)
class CacheFile:
    """used: Unix time of the last start that read it."""

    path: Path
    model: str
    num_bytes: int
    used: float


class _EndingError(Exception): ...


class WeightsCache:
    """Files of packed weights in a folder. limit: total bytes, beyond which the least recently used are removed; 0:
    off.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    @classmethod
    def at(cls, folder: str | None, limit: int) -> WeightsCache:
        return cls(cache_folder() / "weights" if folder is None else expanded(folder), limit)

    def path(self, parts: Mapping[str, Any]) -> Path:
        text = json.dumps(dict(parts), sort_keys=True)
        return self.folder / (blake3(text.encode()).hexdigest(length=16) + SUFFIX)

    def is_usable(self) -> bool:
        """Reject a folder that every user can write to. Other users' files in a group's folder are ignored."""
        with contextlib.suppress(OSError):  # reading and writing log what is wrong
            if self.limit and self.folder.stat().st_mode & stat.S_IWOTH:
                logger.warning("weights cache: off, since every user can write to %s (chmod o-w)", self.folder)
                return False
        return self.limit > 0

    def read(self, path: Path) -> CachedModel | None:
        """Map a file's model, if it exists. Broken and foreign files are logged and ignored."""
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_uid not in (os.geteuid(), 0):
                    raise ValueError("it belongs to another user")
                if status.st_mode & stat.S_IWOTH:
                    raise ValueError("every user can write to it")
                found = _map(file.fileno(), status.st_size, path.stem)
        except FileNotFoundError:
            return None
        except _BROKEN as error:
            logger.warning("weights cache: ignoring %s (%s)", path, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        logger.info("weights: %.1f MB mapped from the cache %s", found.num_bytes / 1e6, path)
        return found

    def write_later(self, path: Path, packed: PackedModel, identity: bytes, model: str) -> threading.Thread | None:
        """Return None if the model is too small or too large for the cache."""
        size = sum(tensor.nbytes for tensor in packed.tensors.values())
        if not SMALLEST_MODEL <= size <= self.limit:
            return None
        # Not a daemon: Python's exit could abort the process while the thread runs C++ code.
        thread = threading.Thread(target=self._write, args=(path, packed, identity, model, size), name="weights-cache")
        thread.start()
        return thread

    def files(self) -> list[CacheFile]:
        found = []
        for path, status in self._own(_NAME):
            with contextlib.suppress(*_BROKEN), path.open("rb") as file:
                header, _ = _header(file.fileno(), status.st_size)
                found.append(CacheFile(path, str(header["model"]), status.st_size, status.st_mtime))
        return sorted(found, key=lambda file: -file.used)

    def clear(self) -> int:
        return _remove(self._surplus(0))

    def _write(self, path: Path, packed: PackedModel, identity: bytes, model: str, size: int) -> None:
        started = time.monotonic()
        try:
            if sys.platform == "linux":  # elsewhere a thread has no priority of its own
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.remove_unfinished()
            surplus = self._surplus(self.limit - size)
            if shutil.disk_usage(self.folder).free + _total(surplus) < size + SPARED_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _remove(surplus)
            with self.unfinished(path) as file:
                _write_pieces(file, _pieces(packed, identity, model, path.stem))
        except _EndingError:
            return
        except OSError as error:
            logger.warning("weights cache: cannot keep %s: %s (--weights-cache-size 0 keeps none)", path, error)
            return
        seconds = time.monotonic() - started
        logger.info("weights cache: kept %.1f MB for the next start in %s (%.1f s)", size / 1e6, path, seconds)

    @contextlib.contextmanager
    def unfinished(self, path: Path) -> Iterator[BinaryIO]:
        """Open a new file, to be renamed to `path`. Its lock keeps other processes from removing it."""
        descriptor, name = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=".writing", dir=self.folder)
        with os.fdopen(descriptor, "wb") as file:
            try:
                _lock(descriptor)
                yield file
                os.replace(name, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise

    def _surplus(self, limit: int) -> list[_Found]:
        files = sorted(self._own(_NAME), key=lambda file: file[1].st_mtime)
        total, count = _total(files), 0
        while total > limit and count < len(files):
            total -= files[count][1].st_size
            count += 1
        return files[:count]

    def remove_unfinished(self) -> None:
        """Remove files of killed processes. Writers hold locks, which also work between containers."""
        for path, _ in self._own(_UNFINISHED):
            with contextlib.suppress(OSError), path.open("r+b") as file:
                if _lock(file.fileno()):  # a writer locks its file before it writes the magic number
                    path.unlink()

    def _own(self, name: re.Pattern[str]) -> list[_Found]:
        """Other programs' files in the folder have other names or first bytes."""
        found = []
        for path in self.folder.glob("*"):
            if name.fullmatch(path.name):
                with contextlib.suppress(OSError):  # another process removed it, or it belongs to another user
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode) and _starts_with_magic(path):
                        found.append((path, status))
        return found


def source_parts(folder: Path, settings: LoadSettings) -> dict[str, Any]:
    """The inputs of packed weights: weight files by inode, size and times, other files by content.

    settings: with the chosen dtype and kernels. Device numbers are left out: they differ between a container's mounts.
    """
    files = {}
    for path in weight_files(folder):
        status = path.stat()
        files[path.name] = [
            status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        ]  # fmt: skip
    configs = sorted(folder.glob("*.json")) if folder.is_dir() else []
    return {
        "format": FORMAT,
        "version": package_version("vlmserve"),
        "kernels": [settings.kernels, _extension_digest()],
        "code": code_digest(PACKING, PACKAGE),
        **computation_parts(settings),
        "drafts": settings.drafts,
        "files": files,
        "configs": {path.name: blake3(path.read_bytes()).hexdigest() for path in configs},
    }


@cache
def _extension_digest() -> str:
    """Each build may pack weights differently."""
    path = extension.extension().__file__
    return "" if path is None else blake3(Path(path).read_bytes()).hexdigest()


def _total(files: list[_Found]) -> int:
    return sum(status.st_size for _, status in files)


def _remove(files: list[_Found]) -> int:
    for path, _ in files:
        path.unlink(missing_ok=True)
    return _total(files)


def _lock(descriptor: int) -> bool:
    """Return False if another process holds the lock, or the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _starts_with_magic(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _pieces(packed: PackedModel, identity: bytes, model: str, key: str) -> Iterator[bytes | memoryview]:
    """key: the file's name without the suffix."""
    tensors, position, samples = {}, 0, blake3()
    for name, tensor in packed.tensors.items():
        tensors[name] = [str(tensor.dtype), list(tensor.shape), position, tensor.nbytes]
        position += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        _add_samples(samples, _raw(tensor))
    header = {
        "key": key,
        "identity": identity.hex(),
        "model": model,
        "records": packed.records,
        "tensors": tensors,
        "samples": samples.hexdigest(),
        "size": position,
    }
    text = json.dumps(header).encode()
    text += b" " * (-(_PREFIX + len(text)) % mmap.PAGESIZE)
    yield MAGIC + len(text).to_bytes(8, "little") + blake3(text).digest()
    yield text
    for tensor in packed.tensors.values():
        yield _raw(tensor).numpy().data
        yield bytes(-tensor.nbytes % _ALIGNMENT)


def _write_pieces(file: BinaryIO, pieces: Iterator[bytes | memoryview]) -> None:
    """Write in small pieces, because a program that ends waits for this thread; then raises _EndingError."""
    unsynced = 0
    for piece in pieces:
        for start in range(0, len(piece), _SYNCED):
            if not threading.main_thread().is_alive():
                raise _EndingError
            unsynced += file.write(piece[start : start + _SYNCED])
            if unsynced >= _SYNCED:
                file.flush()
                os.fsync(file.fileno())
                unsynced = 0
    file.flush()
    os.fsync(file.fileno())


def _add_samples(digest: blake3, raw: Tensor) -> None:
    for start in range(0, len(raw), _SAMPLE_STEP):
        digest.update(raw[start : start + _SAMPLE].numpy().data)
    digest.update(raw[-_SAMPLE:].numpy().data)


def _header(descriptor: int, size: int) -> tuple[dict[str, Any], int]:
    """Return header and offset of the tensors. Raises ValueError for a broken file."""
    prefix = os.pread(descriptor, _PREFIX, 0)
    if len(prefix) < _PREFIX or not prefix.startswith(MAGIC):
        raise ValueError("it is no file of packed weights")
    length = int.from_bytes(prefix[len(MAGIC) : len(MAGIC) + 8], "little")
    if length > min(size - _PREFIX, _LARGEST_HEADER):
        raise ValueError("it is incomplete")
    text = os.pread(descriptor, length, _PREFIX)
    if blake3(text).digest() != prefix[-32:]:
        raise ValueError("its contents were changed")
    header: dict[str, Any] = json.loads(text)
    return header, _PREFIX + length


def _map(descriptor: int, size: int, key: str) -> CachedModel:
    """Raises an error of `_BROKEN` for a broken file or another key."""
    header, start = _header(descriptor, size)
    if header["key"] != key:
        raise ValueError("it was written for another checkpoint")
    if size != start + header["size"]:
        raise ValueError("it is incomplete")
    # Copy-on-write, so that processes share the pages.
    memory = torch.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    samples, tensors = blake3(), {}
    for name, (dtype, shape, offset, num_bytes) in header["tensors"].items():
        raw = memory[start + offset : start + offset + num_bytes]
        _add_samples(samples, raw)
        tensors[name] = raw.view(_DTYPES[dtype]).view(shape)
    if samples.hexdigest() != header["samples"]:
        raise ValueError("its contents were changed")
    return CachedModel(PackedModel(tensors, header["records"]), bytes.fromhex(header["identity"]), header["size"])
