"""Files with tensors: safetensors, GGUF, or PyTorch pickles, which may contain only tensors.

Opening a file imports torch.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from safetensors import SafetensorError, safe_open

from vlmserve.errors import MissingWeightsError, ModelLoadError
from vlmserve.gguf.pair import read_pair
from vlmserve.gguf_header import is_gguf, read_header

if TYPE_CHECKING:
    from torch import Tensor

SAFETENSORS_INDEX = "model.safetensors.index.json"
INDEX_NAMES = (SAFETENSORS_INDEX, "pytorch_model.bin.index.json")
PICKLES = (".bin", ".pth", ".pt")
WEIGHT_FILES = {".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", *PICKLES}
"""Suffixes of weight files of all libraries."""


class Slice(Protocol):
    def get_shape(self) -> list[int]: ...

    def __getitem__(self, rows: slice) -> Tensor: ...


class WeightFile(Protocol):
    """An open file with the interface of `safetensors.safe_open`."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: Any, value: Any, trace: Any, /) -> Any: ...

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...

    def get_slice(self, name: str) -> Slice: ...


def open_weights(path: Path) -> WeightFile:
    try:
        if path.suffix in PICKLES:
            return _PickledFile(path)
        if is_gguf(path):
            from vlmserve.models.gguf_tensors import GGUFFile

            return GGUFFile(path)
        file: WeightFile = safe_open(path, framework="pt")
        return file
    except FileNotFoundError as error:
        raise MissingWeightsError(f"{path} is missing, though the checkpoint's index names it") from error
    except pickle.UnpicklingError as error:
        raise ModelLoadError(
            f"{path} holds more than tensors, which could run code when loaded, or is broken; "
            "convert it to safetensors where you trust it (transformers: model.save_pretrained)"
        ) from error
    except (SafetensorError, RuntimeError, EOFError, MemoryError) as error:
        if isinstance(error, MemoryError) or "Cannot allocate memory" in str(error):
            raise ModelLoadError(
                f"there is not enough memory to map {path}: free some, or choose a smaller model (vlmserve doctor)"
            ) from error
        raise ModelLoadError(f"{path} is broken or truncated: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint: files in its index, else all, preferring safetensors to pickles.

    folder: or one file that is all or a part of a checkpoint. Raises MissingWeightsError if there are none,
    ModelLoadError for a broken index.
    """
    if folder.is_file():
        return list(read_header(folder).sizes) if is_gguf(folder) else [folder]
    if (pair := read_pair(folder)) is not None:
        return [path for one in pair for path in read_header(one).sizes]
    for index in (folder / name for name in INDEX_NAMES):
        if index.is_file():
            try:
                weight_map: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
                named = sorted(set(weight_map.values()))
                outside = [name for name in named if Path(name).is_absolute() or ".." in Path(name).parts]
            except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
                raise ModelLoadError(f"{index} is not an index of weight files") from error
            if outside:
                raise ModelLoadError(f"{index} names {outside[0]!r:.60}, which is outside of the checkpoint's folder")
            if any("\0" in name for name in named):
                raise ModelLoadError(f"{index} names a file with a NUL in its name")
            return [folder / name for name in named]
    for names in (("model.safetensors",), ("*.safetensors",), ("pytorch_model.bin",), ("*.bin", "*.pth")):
        if files := sorted(path for name in names for path in folder.glob(name) if path.name != "training_args.bin"):
            return files
    raise MissingWeightsError(f"{folder} has no *.safetensors files, nor PyTorch's *.bin")


class _PickledFile:
    """Memory-mapped if the format allows."""

    def __init__(self, path: Path) -> None:
        import torch

        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            content = torch.load(path, map_location="cpu", weights_only=True)
        content = content.get("state_dict", content) if isinstance(content, dict) else {}
        self._tensors = dict(self._named(content))
        if not self._tensors:
            raise RuntimeError("no tensors under names")

    @staticmethod
    def _named(content: dict[Any, Any]) -> Iterator[tuple[str, Tensor]]:
        from torch import Tensor

        for name, tensor in content.items():
            if isinstance(name, str) and isinstance(tensor, Tensor):
                yield name, tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._tensors = {}

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def get_slice(self, name: str) -> Slice:
        return _Rows(self._tensors[name])


class _Rows:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, rows: slice) -> Tensor:
        return self._tensor[rows]
