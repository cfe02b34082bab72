"""What a model is: 32 bytes that cover everything its states depend on besides the tokens.

Files are not read in full, which would take seconds. Of each tensor of more than `WHOLE_BYTES`, windows of
`WINDOW_BYTES` are read so close together that every row of the tensor, and every piece of `LONGEST_STEP` bytes, has at
least one whole window. Training, merging and quantizing change whole rows, so they change the digest. Names of folders
and files, the order of tensors and their division into files do not.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from vlmserve.config import QuantizationConfig
from vlmserve.kernels.attention import AttentionBackend, LayerCache
from vlmserve.models.files import PICKLES, weight_files
from vlmserve.models.gguf.header import is_gguf, read_header
from vlmserve.quant.formats.stored import OLD_FILES

WINDOW_BYTES = 64
SHORTEST_STEP, LONGEST_STEP = 512, 8192
WHOLE_BYTES = 64 * 1024
"""Tensors of up to this size are read in full."""
MAPPED_BYTES = 16 * 1024**2
"""Bytes of a file to map at once: pages of a mapping count as used memory until it is closed."""

_ABOUT_THE_FILES = {"_name_or_path", "_commit_hash", "transformers_version"}
"""Keys of config.json that say where a checkpoint comes from and not what it computes."""


class StoredTensor(NamedTuple):
    """A tensor in a file. description: its type and shape. start, end: its bytes. row: bytes of one of its rows."""

    name: str
    description: str
    start: int
    end: int
    row: int


def model_identity(
    folder: Path,
    *,
    implementation: str,
    dtype: torch.dtype,
    quantization: QuantizationConfig | None,
    input_bits: int | None = None,
) -> bytes:
    """The digest of a checkpoint and of how it is computed.

    folder: a checkpoint in Hugging Face layout, or a GGUF file. implementation: "vlmserve" or "transformers"; the
    version of both packages counts, too. dtype: of the computation. quantization: at load, None if there is none.
    input_bits: beside weights that are packed already, if set.
    Two checkpoints with the same content have the same identity wherever they are. Raises what `weight_files` raises.
    """
    parts = {
        "implementation": implementation,
        "versions": {package: version(package) for package in {"vlmserve", implementation}},
        "dtype": str(dtype),
        "quantization": None if quantization is None else quantization.model_dump(mode="json"),
        "input_bits": input_bits,
        "config": _configuration(folder),
        "weights": weights_digest(folder).hex(),
    }
    return blake3(json.dumps(parts, sort_keys=True).encode()).digest()


def cache_identity(model: bytes, backend: AttentionBackend, layers: Sequence[LayerCache]) -> bytes:
    """The digest of a model and of how its keys and values are stored.

    model: its `model_identity`. layers: the caches of all layers, of any number of blocks. Blocks may be exchanged only
    between caches of the same identity.
    """
    tensors = [
        [field.name, str(tensor.dtype), list(tensor.shape[1:])]
        for layer in layers
        for field in dataclasses.fields(layer)
        if isinstance(tensor := getattr(layer, field.name), Tensor)
    ]
    layout = [model.hex(), backend.name, [layer.block_size for layer in layers], tensors]
    return blake3(json.dumps(layout).encode()).digest()


def weights_digest(folder: Path) -> bytes:
    """A digest of the names, types, shapes and sampled values of all tensors."""
    digests: dict[str, bytes] = {}
    for path in weight_files(folder):
        if path.suffix in PICKLES:
            digests[f"pickle {_pickle_digest(path).hex()}"] = b""
        else:
            digests |= _file_digests(path)
    hasher = blake3()
    for name in sorted(digests):
        hasher.update(json.dumps(name).encode() + digests[name])
    return hasher.digest()


def stored_tensors(path: Path) -> Iterator[StoredTensor]:
    """The tensors of a safetensors or a GGUF file."""
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
    """Bytes of a checkpoint's tensors in its files; of PyTorch's files, of the whole files."""
    total = 0
    for path in weight_files(folder):
        if path.suffix in PICKLES:
            total += path.stat().st_size
        else:
            total += sum(tensor.end - tensor.start for tensor in stored_tensors(path))
    return total


def _configuration(folder: Path) -> Any:
    """What says how the weights are computed with: JSON, of a GGUF file the digest of all before its tensors."""
    if folder.is_file():
        return metadata_digest(folder)
    paths = [folder / name for name in ("config.json", *OLD_FILES)]
    return {path.name: _without_origin(json.loads(path.read_text("utf-8"))) for path in paths if path.is_file()}


def metadata_digest(path: Path) -> str:
    """Of all that comes before a GGUF file's tensors."""
    header = read_header(path)
    offsets = (info.offset for info in header.tensors.values() if info.path == path)
    with path.open("rb") as file:
        return blake3(file.read(min(offsets, default=header.sizes[path]))).hexdigest()


def _without_origin(config: Any) -> Any:
    if isinstance(config, dict):
        return {key: _without_origin(value) for key, value in config.items() if key not in _ABOUT_THE_FILES}
    return config


def _file_digests(path: Path) -> Iterator[tuple[str, bytes]]:
    """Names of a file's tensors with their digests."""
    with path.open("rb") as file:
        for tensor in stored_tensors(path):
            hasher = blake3(tensor.description.encode())
            for window in _windows(file, tensor.start, tensor.end, tensor.row):
                hasher.update(window)
            yield tensor.name, hasher.digest()


def _pickle_digest(path: Path) -> bytes:
    """Of PyTorch's archives, the checksums of all members and windows; of older files, everything."""
    hasher = blake3()
    if not zipfile.is_zipfile(path):
        return hasher.update_mmap(path).digest()
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            # The folder inside is named after the file.
            name = member.filename.partition("/")[2]
            hasher.update(json.dumps([name, member.CRC, member.file_size]).encode())
    with path.open("rb") as file:
        for window in _windows(file, 0, path.stat().st_size, SHORTEST_STEP):
            hasher.update(window)
    return hasher.digest()


def _windows(file: BinaryIO, start: int, end: int, row: int) -> Iterator[bytes]:
    """Sampled bytes of a range of a file, in order; all of them if they are few. row: see `StoredTensor`."""
    size = end - start
    if size <= WHOLE_BYTES:
        file.seek(start)
        yield file.read(size)
        return
    # So that any `row` bytes in a row hold a whole window; columns are met in turn, as the windows move on by the row.
    step = min(max(row, SHORTEST_STEP), LONGEST_STEP) - WINDOW_BYTES
    total, at_once = (size - WINDOW_BYTES) // step + 1, MAPPED_BYTES // step
    for first in range(0, total, at_once):
        count = min(at_once, total - first)
        position = start + first * step
        aligned = position // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        length = position - aligned + (count - 1) * step + WINDOW_BYTES
        with mmap.mmap(file.fileno(), length, offset=aligned, access=mmap.ACCESS_READ) as mapped:
            shape, strides = (count, WINDOW_BYTES), (step, 1)
            yield np.ndarray(shape, np.uint8, mapped, position - aligned, strides).tobytes()
    file.seek(end - WINDOW_BYTES)
    yield file.read(WINDOW_BYTES)
