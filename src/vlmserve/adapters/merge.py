"""Merge an adapter into a checkpoint, one file at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vlmserve.adapters.checkpoint import AdapterCheckpoint
from vlmserve.adapters.lora import layer_changes
from vlmserve.errors import AdapterError, ConfigurationError
from vlmserve.gguf.pair import language_model
from vlmserve.kernels.adapters import Change, TableChange
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.models.adaptable import EMBEDDINGS, HEAD, AdaptableModel
from vlmserve.models.files import INDEX_NAMES, SAFETENSORS_INDEX, WEIGHT_FILES
from vlmserve.models.registry import Description
from vlmserve.models.weights import Checkpoint, merge_as_stored

MAX_RANK = 2**16


def merge_adapter(
    folder: Path, adapter: Path, out: Path, progress: Callable[[int, int], None] = lambda done, of: None
) -> int:
    """Write a checkpoint with an adapter merged in. Returns the number of changed tensors.

    folder: a checkpoint in Hugging Face layout. out: a new or empty folder. progress: called with finished and all
    tensors. Weights keep their dtypes.

    Raises like `load_model`; AdapterError for an adapter that does not fit; ConfigurationError if `out` is not empty or
    the checkpoint is quantized.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigurationError(f"{out} must be a new or an empty folder")
    if (file := language_model(folder)) is not None:
        raise ConfigurationError(f"{file} is a GGUF file: merge into the checkpoint that it was made of")
    description = Description.read(folder)
    if description.quantization:
        raise ConfigurationError(f"{folder} is quantized: merge into the checkpoint that it was made of")
    checkpoint = Checkpoint(folder, description.rename)
    model = _model(description, checkpoint)
    changes = dict(layer_changes(AdapterCheckpoint(adapter), model, max_rank=MAX_RANK))
    found = changes.pop(HEAD, None) if model.is_tied else None
    head = found if isinstance(found, Change) else Change()
    unties = model.is_tied and _unties(head, changes.get(EMBEDDINGS))
    out.mkdir(parents=True, exist_ok=True)
    total, done, changed = sum(map(len, checkpoint.files().values())), 0, 0
    weight_map: dict[str, str] = {}
    for path, keys in checkpoint.files().items():
        tensors: dict[str, Tensor] = {}
        for key in keys:
            name = checkpoint.canonical(key)
            before = checkpoint.read(name)
            tensors[key] = merged = _merged(name, before, changes)
            changed += merged is not before
            if unties and name == f"{EMBEDDINGS}.weight":
                tensors["lm_head.weight"] = _changed_weight(before, head).clone()
            done += 1
            progress(done, total)
        target = path.with_suffix(".safetensors").name
        # Unchanged tensors are views of their file, so copy them.
        save_file({key: tensor.clone() for key, tensor in tensors.items()}, out / target, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, target)
    if any((folder / name).is_file() for name in INDEX_NAMES):
        size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (out / SAFETENSORS_INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    for path in folder.iterdir():
        if path.is_file() and path.suffix not in WEIGHT_FILES and path.name not in INDEX_NAMES:
            shutil.copy(path, out)
    if unties:
        content = _untied(description.config)
        (out / "config.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    return changed


def _model(description: Description, checkpoint: Checkpoint) -> AdaptableModel:
    with description.errors():
        spec = description.spec(checkpoint)
        device = torch.device("meta")
        parts = description.build(spec, TorchReference(), dtype=torch.float32, device=device)
    if parts.cross is not None:
        raise AdapterError(f"{description.architecture} takes no adapters")
    merge_as_stored(parts.modules, checkpoint.names)
    return AdaptableModel(parts.modules, checkpoint, [], None, torch.float32, torch.device("cpu"))


def _merged(name: str, before: Tensor, changes: Mapping[str, Change | TableChange]) -> Tensor:
    """Returns the same object if it does not change."""
    layer, _, part = name.rpartition(".")
    change = changes.get(layer)
    if change is None:
        return before
    if isinstance(change, TableChange):
        return _changed_table(before, change) if part == "weight" else before
    if part == "weight":
        return _changed_weight(before, change)
    if change.bias is not None:
        return change.bias.to(before.dtype)
    return before if change.shift is None else (before.float() + change.shift).to(before.dtype)


def _changed_weight(before: Tensor, change: Change) -> Tensor:
    if change.weight is not None:
        return change.weight.to(before.dtype).view(before.shape)
    weight = before.flatten(1).float() + sum(up @ down for down, up, *_ in change.parts)
    if change.factor is not None:
        weight *= change.factor[:, None]
    if change.outputs is not None:
        places, rows = change.outputs
        weight[places] = rows
    return weight.to(before.dtype).view(before.shape)


def _changed_table(before: Tensor, change: TableChange) -> Tensor:
    return change.apply(torch.arange(len(before)), before.float()).to(before.dtype)


def _unties(head: Change, table: Change | TableChange | None) -> bool:
    if not isinstance(table, TableChange):
        return head.adds or head.replaces
    follows = table.rows is head.outputs and table.weight is head.weight
    return head.adds or not follows or table.low_rank is not None


def _untied(config: Mapping[str, Any]) -> dict[str, Any]:
    content = {**config, "tie_word_embeddings": False}
    if isinstance(config.get("text_config"), Mapping):
        content["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
    return content
