"""A model's identity: 32 bytes over everything that its states depend on besides the tokens.

Only samples of files are hashed. For tensors over `WHOLE_BYTES`, every row and every `LONGEST_STEP` bytes contain at
least one whole window of `WINDOW_BYTES`: training, merging and quantizing change whole rows. Names of folders and
files, tensor order and sharding into files do not count.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from torch import Tensor

from vlmserve.gguf_header import is_gguf, read_header
from vlmserve.kernels.attention import AttentionBackend, LayerCache
from vlmserve.models.files import PICKLES, weight_files
from vlmserve.models.load_settings import LoadSettings
from vlmserve.quant.formats.stored import OLD_FILES

WINDOW_BYTES = 64
SHORTEST_STEP, LONGEST_STEP = 512, 8192
WHOLE_BYTES = 64 * 1024
"""Tensors of up to this size are read in full."""
MAPPED_BYTES = 16 * 1024**2
"""Bytes of a file to map at once: mapped pages count as used memory until the mapping is closed."""

_ABOUT_THE_FILES = {"_name_or_path", "_commit_hash", "transformers_version"}
"""Keys of config.json about the origin of a checkpoint, which do not affect results."""


class StoredTensor(NamedTuple):
    name: str
    description: str
    start: int
    end: int
    row: int
    """Bytes of a row."""


def model_identity(folder: Path, settings: LoadSettings, digests: TensorDigests | None = None) -> bytes:
    """Digest a checkpoint and its settings, independent of its folder.

    folder: in Hugging Face layout, or a GGUF file. settings: with the chosen dtype and implementation. digests: of
    tensors already read.
    """
    packages = {"vlmserve", settings.implementation}
    parts = {
        "implementation": settings.implementation,
        "versions": {package: package_version(package) for package in packages},
        **computation_parts(settings),
        "config": _configuration(folder),
        "weights": weights_digest(folder, digests).hex(),
    }
    return blake3(json.dumps(parts, sort_keys=True).encode()).digest()


def computation_parts(settings: LoadSettings) -> dict[str, Any]:
    quantization = settings.quantization
    return {
        "dtype": str(settings.dtype),
        "quantization": None if quantization is None else quantization.model_dump(mode="json"),
        "input_bits": settings.input_bits,
    }


@cache
def package_version(package: str) -> str:
    """Cached, because `metadata.version` parses a file at each call."""
    return metadata.version(package)


def cache_identity(model: bytes, backend: AttentionBackend, layers: Sequence[LayerCache]) -> bytes:
    """Digest a model and the format of its KV cache. Only caches with equal digests may exchange blocks.

    model: its `model_identity`. layers: with any number of blocks.
    """
    tensors = [
        [field.name, str(tensor.dtype), list(tensor.shape[1:])]
        for layer in layers
        for field in dataclasses.fields(layer)
        if isinstance(tensor := getattr(layer, field.name), Tensor)
    ]
    layout = [model.hex(), backend.name, [layer.block_size for layer in layers], tensors]
    return blake3(json.dumps(layout).encode()).digest()


def weights_digest(folder: Path, digests: TensorDigests | None = None) -> bytes:
    """Digest names, dtypes, shapes and samples of all tensors. digests: of tensors already read."""
    digests = digests or TensorDigests()
    found: dict[str, bytes] = {}
    for path in weight_files(folder):
        if path.suffix in PICKLES:
            found[f"pickle {_pickle_digest(path).hex()}"] = b""
        else:
            found |= digests.of_file(path)
    hasher = blake3()
    for name in sorted(found):
        hasher.update(json.dumps(name).encode() + found[name])
    return hasher.digest()


class TensorDigests:
    """Digests of tensors in files, computed while their pages are in memory anyway. Thread-safe."""

    def __init__(self) -> None:
        self.on_read: Callable[[int], None] = lambda num_bytes: None
        """`read` calls it with the number of newly read bytes."""
        self._lock = threading.Lock()
        self._files: dict[Path, dict[str, _TensorDigest]] = {}

    def prepare(self, path: Path, name: str) -> None:
        """Hash a tensor that a later `read` counts as read."""
        if (tensor := self._tensor(path, name)) is not None:
            tensor.hash(1.0)

    def read(self, path: Path, name: str, share: float = 1.0) -> None:
        """PyTorch files are skipped."""
        if (tensor := self._tensor(path, name)) is not None:
            tensor.hash(share)
            self.on_read(tensor.count(share))

    def of_file(self, path: Path) -> dict[str, bytes]:
        return {name: tensor.finish() for name, tensor in self._tensors(path).items()}

    def _tensor(self, path: Path, name: str) -> _TensorDigest | None:
        return None if path.suffix in PICKLES else self._tensors(path).get(name)

    def _tensors(self, path: Path) -> dict[str, _TensorDigest]:
        with self._lock:
            if path not in self._files:
                self._files[path] = {tensor.name: _TensorDigest(path, tensor) for tensor in stored_tensors(path)}
            return self._files[path]


class _TensorDigest:
    def __init__(self, path: Path, tensor: StoredTensor) -> None:
        self._path, self._tensor = path, tensor
        self._hasher = blake3(tensor.description.encode())
        self._windows = _windows(path, tensor.start, tensor.end, tensor.row)
        self._hashed = self._read = 0
        self._lock = threading.Lock()

    def hash(self, share: float) -> None:
        """Hash this share of the tensor, unless it is hashed."""
        # Each item has the windows of at most `MAPPED_BYTES` of the file.
        wanted = math.inf if share >= 1 else share * self._size
        with self._lock:
            while self._hashed < wanted and (windows := next(self._windows, None)) is not None:
                self._hasher.update(windows)
                self._hashed += MAPPED_BYTES

    def count(self, share: float) -> int:
        """Return the bytes of this share that were not counted before."""
        before, self._read = self._read, max(self._read, round(share * self._size))
        return self._read - before

    @property
    def _size(self) -> int:
        return self._tensor.end - self._tensor.start

    def finish(self) -> bytes:
        self.hash(1.0)
        return self._hasher.digest()


def stored_tensors(path: Path) -> Iterator[StoredTensor]:
    if is_gguf(path):
        header = read_header(path)
        own = (info for info in header.tensors.values() if info.path == path)
        infos = sorted(own, key=lambda info: info.offset)
        ends = [info.offset for info in infos[1:]] + [header.sizes[path]]
        for info, end in zip(infos, ends, strict=True):
            row = (end - info.offset) // max(1, math.prod(info.shape[:-1]))
            yield StoredTensor(info.name, f"{info.type} {info.shape}", info.offset, end, row)
        return
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        row = (end - start) // max(1, math.prod(entry["shape"][:-1]))
        yield StoredTensor(name, f"{entry['dtype']} {entry['shape']}", start, end, row)


def stored_bytes(folder: Path) -> int:
    """PyTorch files count whole."""
    total = 0
    for path in weight_files(folder):
        if path.suffix in PICKLES:
            total += path.stat().st_size
        else:
            total += sum(tensor.end - tensor.start for tensor in stored_tensors(path))
    return total


def _configuration(folder: Path) -> Any:
    if folder.is_file():
        return metadata_digest(folder)
    paths = [folder / name for name in ("config.json", *OLD_FILES)]
    return {path.name: _without_origin(json.loads(path.read_text("utf-8"))) for path in paths if path.is_file()}


def metadata_digest(path: Path) -> str:
    header = read_header(path)
    offsets = (info.offset for info in header.tensors.values() if info.path == path)
    with path.open("rb") as file:
        return blake3(file.read(min(offsets, default=header.sizes[path]))).hexdigest()


def _without_origin(config: Any) -> Any:
    if isinstance(config, dict):
        return {key: _without_origin(value) for key, value in config.items() if key not in _ABOUT_THE_FILES}
    return config


def _pickle_digest(path: Path) -> bytes:
    """Checksums of all members and sampled windows; for older files, all bytes."""
    hasher = blake3()
    if not zipfile.is_zipfile(path):
        return hasher.update_mmap(path).digest()
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            # The folder inside is named after the file.
            name = member.filename.partition("/")[2]
            hasher.update(json.dumps([name, member.CRC, member.file_size]).encode())
    for window in _windows(path, 0, path.stat().st_size, SHORTEST_STEP):
        hasher.update(window)
    return hasher.digest()


def _windows(path: Path, start: int, end: int, row: int) -> Iterator[bytes | memoryview]:
    """Sample a range of a file; all bytes if there are few. row: bytes of a row."""
    size = end - start
    if size <= WHOLE_BYTES:
        yield _bytes_at(path, start, size)
        return
    # Any `row` consecutive bytes contain a whole window. Windows drift along rows, so they sample all columns.
    step = min(max(row, SHORTEST_STEP), LONGEST_STEP) - WINDOW_BYTES
    total, at_once = (size - WINDOW_BYTES) // step + 1, MAPPED_BYTES // step
    for first in range(0, total, at_once):
        count = min(at_once, total - first)
        position = start + first * step
        aligned = position // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        length = position - aligned + (count - 1) * step + WINDOW_BYTES
        shape, strides = (count, WINDOW_BYTES), (step, 1)
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), length, offset=aligned, access=mmap.ACCESS_READ) as mapped,
        ):
            # Unlike `tobytes`, `array` lets other threads run while pages are read.
            windows = np.array(np.ndarray(shape, np.uint8, mapped, position - aligned, strides))
        yield windows.data
    yield _bytes_at(path, end - WINDOW_BYTES, WINDOW_BYTES)


def _bytes_at(path: Path, position: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(position)
        return file.read(size)
