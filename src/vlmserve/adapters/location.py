"""Find an adapter's files in a folder or in a repository of the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vlmserve.errors import AdapterError, ConfigurationError
from vlmserve.folders import expanded
from vlmserve.settings.config import BUILT_IN_MODEL

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
XLORA_CONFIG, XLORA_WEIGHTS = "xlora_config.json", "xlora_classifier.safetensors"
"""File names of X-LoRA checkpoints in mistral.rs."""
MAX_CONFIG_BYTES = 2**20
MAX_HEADER_BYTES = 32 * 2**20
"""Maximum header size. Large mixtures of experts need about half of it."""
MAX_NAME = 200
MAX_VALUE = 65504.0
"""Largest magnitude of alphas and weights, the maximum of float16. Trained adapters stay far below it."""
DEEPEST = 3
"""Maximum depth of adapters' folders below an X-LoRA checkpoint."""
_BUILT_IN = Path(__file__).resolve().parent.parent / BUILT_IN_MODEL / "adapters"
_XLORA_FILES = [f"*{name}" for name in (CONFIG, WEIGHTS, XLORA_CONFIG, XLORA_WEIGHTS, "order*.json")]
"""X-LoRA checkpoints keep their adapters in folders inside their own."""


class LoraModule(NamedTuple):
    name: str
    path: str


def read_module(text: str) -> LoraModule:
    """``name=path``, or JSON with "name" and "path". Raises ConfigurationError."""
    if text.lstrip().startswith("{"):
        try:
            entry = json.loads(text)
            module = LoraModule(str(entry["name"]), str(entry["path"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f'--lora-modules {text}: write {{"name": …, "path": …}}') from error
    else:
        name, _, path = text.partition("=")
        module = LoraModule(name.strip(), path.strip())
    if not module.path:
        raise ConfigurationError(f"--lora-modules {text}: write name=path")
    try:
        check_name(module.name)
    except AdapterError as error:
        raise ConfigurationError(f"--lora-modules {text}: {error}") from error
    return module


def read_object(folder: Path, file: str) -> Mapping[str, Any]:
    """Raises AdapterError if the file is missing, invalid or too large."""
    path = folder / file
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise AdapterError(f"{path} is larger than {MAX_CONFIG_BYTES:,} bytes")
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise AdapterError(f"{folder} is not an adapter: {file} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise AdapterError(f"{path} does not hold a JSON object")
    return content


def check_header(path: Path) -> None:
    """Raises AdapterError if the header is too large to parse."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
        whole = path.stat().st_size
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror}") from error
    if MAX_HEADER_BYTES < size <= whole:
        raise AdapterError(f"{path.name} has a header of {size:,} bytes; at most {MAX_HEADER_BYTES:,} are supported")


def holds_adapter(folder: Path) -> bool:
    return any((folder / file).is_file() for file in (CONFIG, XLORA_CONFIG))


def files_of(folder: Path) -> list[Path]:
    """The files of an adapter, and of the adapters that X-LoRA mixes."""
    files = [folder / name for name in (CONFIG, WEIGHTS, XLORA_CONFIG, XLORA_WEIGHTS)]
    files += sorted(folder.glob("*order*.json"))
    for depth in range(1, DEEPEST + 1):
        files += sorted(path for name in (CONFIG, WEIGHTS) for path in folder.glob("*/" * depth + name))
    return files


def is_xlora(folder: Path) -> bool:
    """Raises AdapterError if the folder holds no adapter."""
    return (folder / XLORA_CONFIG).is_file() or read_object(folder, CONFIG).get("peft_type") == "XLORA"


def check_name(name: str) -> None:
    if not 0 < len(name) <= MAX_NAME or not name.isprintable() or name != name.strip():
        raise AdapterError(f"an adapter's name has 1 to {MAX_NAME} printable characters", param="lora_name")


def find_adapter(path: str) -> Path:
    """Find an adapter's folder. Raises AdapterError if there is none.

    path: a folder, ``pixie/NAME``, or a repository id on the hub, which is downloaded unless it is cached.
    """
    folder = expanded(path)
    if folder.is_dir():
        return folder
    model, _, name = path.partition("/")
    if model == BUILT_IN_MODEL and name.isalpha() and (_BUILT_IN / name).is_dir():
        return _BUILT_IN / name
    if folder.exists() or path.startswith(("/", ".", "~")) or path.count("/") != 1:
        raise AdapterError(f"{path} is no folder with an adapter")
    from huggingface_hub import snapshot_download  # slow to import
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = Path(snapshot_download(path, allow_patterns=[CONFIG, WEIGHTS, XLORA_CONFIG]))
        if is_xlora(found):
            found = Path(snapshot_download(path, allow_patterns=_XLORA_FILES))
        return found
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise AdapterError(f"there is no folder {path}, and no such repository can be reached: {error}") from error
