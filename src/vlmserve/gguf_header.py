"""Reads GGUF headers without torch, and arrays on request: parsing all takes the gguf package seconds."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from vlmserve.errors import ModelLoadError, UnsupportedModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
FLOAT32 = 0
"""Tensor type of unquantized float32."""

PART = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<count>\d{5})\.gguf")
"""File name of a part of a split model."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")


def is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


class TensorInfo(NamedTuple):
    """type: from `gguf.GGMLQuantizationType`. shape: outermost axis first. offset: bytes from the file's start."""

    name: str
    type: int
    shape: tuple[int, ...]
    offset: int
    path: Path


class _Array(NamedTuple):
    kind: int
    length: int
    offset: int


@dataclass(frozen=True, eq=False)
class Header:
    path: Path
    """The file, or the first part of a split model, which has all metadata."""
    sizes: Mapping[Path, int]
    """Bytes of all parts."""
    values: Mapping[str, Any]
    """Metadata, except arrays."""
    arrays: Mapping[str, _Array]
    tensors: Mapping[str, TensorInfo]

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture", ""))

    def array(self, key: str) -> list[Any]:
        array = self.arrays.get(key)
        if array is None:
            return []
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(self.path, data, array.offset)
            if array.kind == _STRING:
                return cursor.texts(array.length)
            return list(cursor.numbers(f"{array.length}{_NUMBERS[array.kind]}"))

    def texts(self, key: str, places: Collection[int]) -> dict[int, str]:
        array = self.arrays.get(key)
        if array is None or array.kind != _STRING or not places:
            return {}
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(self.path, data, array.offset).some_texts(array.length, places)

    def vector(self, name: str) -> list[float]:
        """Read a small float32 tensor. Raises ModelLoadError for another type."""
        info = self.tensors[name]
        if info.type != FLOAT32 or len(info.shape) != 1:
            raise ModelLoadError(f"{self.path}: {name} is not a vector of float32 numbers")
        with info.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return list(_Cursor(info.path, data, info.offset).numbers(f"{info.shape[0]}f"))


def read_header(path: Path) -> Header:
    """Read a file, or all parts of its model.

    Raises ModelLoadError for broken files and missing or mismatched parts, UnsupportedModelError for another version.
    """
    try:
        own = _read_file(*_version(path))
        count = own.values.get("split.count", 1)
        if count in (0, 1):
            return own
        paths = _part_paths(path, count)
        if missing := [part.name for part in paths if not part.is_file()]:
            raise ModelLoadError(f"{path} is one of {count} parts of a model, and {missing[0]} is missing beside it")
        return _joined(*map(_version, paths))
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error


def _version(path: Path) -> tuple[Path, int, int]:
    """Cache key of an unchanged file: avoids opening a part for each of its tensors."""
    stat = path.stat()
    return path, stat.st_size, stat.st_mtime_ns


@lru_cache(maxsize=4)
def _joined(*versions: tuple[Path, int, int]) -> Header:
    parts = [_read_file(*version) for version in versions]
    for number, part in enumerate(parts):
        if (part.values.get("split.no"), part.values.get("split.count")) != (number, len(parts)):
            raise ModelLoadError(
                f"{part.path} is not part {number + 1} of {len(parts)}: the parts of two models are mixed"
            )
    return Header(
        parts[0].path,
        {part.path: part.sizes[part.path] for part in parts},
        parts[0].values,
        parts[0].arrays,
        {name: info for part in parts for name, info in part.tensors.items()},
    )


def _part_paths(path: Path, count: int) -> list[Path]:
    match = PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise ModelLoadError(
            f"{path} is one of {count} parts of a model, whose names must end in -00001-of-{count:05}.gguf and so on"
        )
    return [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


@lru_cache(maxsize=16)
def _read_file(path: Path, size: int, modified: int) -> Header:
    if not is_gguf(path):
        raise ModelLoadError(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(path, data, len(MAGIC))
        [version] = cursor.numbers("I")
        if version not in VERSIONS:
            reason = "for big-endian machines" if version & 0xFFFF == 0 else f"of version {version}"
            raise UnsupportedModelError(
                f"{path} is a GGUF file {reason}; versions 2 and 3, little-endian, are supported"
            )
        num_tensors, num_values = cursor.numbers("QQ")
        values: dict[str, Any] = {}
        arrays: dict[str, _Array] = {}
        for _ in range(num_values):
            key = cursor.text()
            value = cursor.value()
            if isinstance(value, _Array):
                arrays[key] = value
            else:
                values[key] = value
        found = [cursor.tensor() for _ in range(num_tensors)]
    alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelLoadError(f"{path} is broken: tensors cannot begin at multiples of {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    tensors = {info.name: info._replace(offset=start + info.offset) for info in found}
    return Header(path, {path: size}, values, arrays, tensors)


class _Cursor:
    """Reads consecutive little-endian values. Raises ModelLoadError at the end."""

    def __init__(self, path: Path, data: mmap.mmap, position: int) -> None:
        self._path = path
        self._data = data
        self.position = position

    def numbers(self, layout: str) -> tuple[Any, ...]:
        start = self.position
        self._move_to(start + struct.calcsize(f"<{layout}"))
        return struct.unpack_from(f"<{layout}", self._data, start)

    def text(self) -> str:
        [length] = self.numbers("Q")
        start = self.position
        self._move_to(start + length)
        return self._data[start : self.position].decode("utf-8", "replace")

    def texts(self, count: int) -> list[str]:
        # Old files have tokens that are incomplete UTF-8.
        return [self._data[start:end].decode("utf-8", "replace") for start, end in self._spans(count)]

    def some_texts(self, count: int, places: Collection[int]) -> dict[int, str]:
        spans = enumerate(self._spans(count))
        return {i: self._data[start:end].decode("utf-8", "replace") for i, (start, end) in spans if i in places}

    def value(self) -> Any:
        [kind] = self.numbers("I")
        if kind == _STRING:
            return self.text()
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind])[0]
        if kind != _ARRAY:
            raise ModelLoadError(f"{self._path} is broken: metadata type {kind} is unknown")
        kind, count = self.numbers("IQ")
        array = _Array(kind, count, self.position)
        if kind in _NUMBERS:
            self._move_to(self.position + count * struct.calcsize(f"<{_NUMBERS[kind]}"))
        elif kind == _STRING:
            for _ in self._spans(count):
                pass
        else:
            raise ModelLoadError(f"{self._path} is broken: array type {kind} is unknown")
        return array

    def tensor(self) -> TensorInfo:
        name = self.text()
        [dimensions] = self.numbers("I")
        shape = self.numbers(f"{dimensions}Q")[::-1]
        kind, offset = self.numbers("IQ")
        return TensorInfo(name, kind, shape, offset, self._path)

    def _spans(self, count: int) -> Iterator[tuple[int, int]]:
        """Locate `count` strings. Optimized for vocabularies of hundreds of thousands."""
        end, read = self.position, _LENGTH.unpack_from
        for _ in range(count):
            start = end + _LENGTH.size
            if start > len(self._data):
                end = start
                break
            end = start + read(self._data, end)[0]
            yield start, end
        self._move_to(end)

    def _move_to(self, position: int) -> None:
        if position > len(self._data):
            raise ModelLoadError(f"{self._path} is cut off: it ends within its header; download it again")
        self.position = position
