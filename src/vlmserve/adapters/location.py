"""Where an adapter's files are: in a folder, or in a repository of the Hugging Face hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from vlmserve.errors import AdapterError, ConfigurationError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_NAME = 200


class LoraModule(NamedTuple):
    """A name and where its adapter is."""

    name: str
    path: str


def read_module(text: str) -> LoraModule:
    """An entry of --lora-modules: ``name=path``, or JSON with "name" and "path". Raises ConfigurationError."""
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


def check_name(name: str) -> None:
    """Raises AdapterError for what is no name of an adapter."""
    if not 0 < len(name) <= MAX_NAME or not name.isprintable() or name != name.strip():
        raise AdapterError(f"an adapter's name has 1 to {MAX_NAME} printable characters", param="lora_name")


def find_adapter(path: str) -> Path:
    """The folder of an adapter. path: a folder, or a repository id of the hub, which is downloaded unless it is in the
    cache. Raises AdapterError if there is none."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or path.startswith(("/", ".", "~")) or path.count("/") != 1:
        raise AdapterError(f"{path} is no folder with an adapter")
    from huggingface_hub import snapshot_download  # slow to import
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=[CONFIG, WEIGHTS]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise AdapterError(f"there is no folder {path}, and no such repository can be reached: {error}") from error
