"""X-LoRA checkpoints (https://arxiv.org/abs/2402.07148): LoRA adapters and a classifier that scales them per token.

The adapters' A and B are stacked to one low-rank change. Between A and B, values are multiplied by the scalings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vlmserve.adapters.checkpoint import AdapterCheckpoint, check_values
from vlmserve.adapters.location import check_header
from vlmserve.adapters.lora import Adapter, AdapterReader, Group
from vlmserve.adapters.mixture import Mixture
from vlmserve.adapters.xlora_config import XLoraConfig, XLoraFolder
from vlmserve.errors import AdapterError, UnsupportedModelError
from vlmserve.kernels.adapters import Change, LowRank, TableChange
from vlmserve.models.adaptable import EMBEDDINGS, HEAD, AdaptableModel, Place
from vlmserve.models.transformers_checkpoint import TransformersCheckpoint

_CLASSIFIER = re.compile(r"(?:^|\.)(?:layers\.(\d+)|inner\.(\d+)|(last))\.(weight|bias)$")
_MIXED = {"down", "up", "table_down", "table_up"}
_REPEATED = "base_weight"
"""The base model's own weight, which PEFT stores with adapters of embeddings."""


def read_xlora(folder: Path, model: AdaptableModel, *, max_rank: int, pool: Mapping[str, str] | None = None) -> Adapter:
    """pool: folders of adapters that replace the checkpoint's own, by name of the classifier's output; "" removes one.

    Raises AdapterError like `read_adapter`, for an invalid pool or classifier, and for adapters that change more than
    linear layers and embeddings of the language model, by low rank.
    """
    own = XLoraFolder.find(folder)
    files, outputs = own.with_pool(pool or {})
    readers = [AdapterReader(AdapterCheckpoint(path), model, max_rank) for path in files.adapters]
    groups = [_mixable(name, reader) for name, reader in zip(files.config.names, readers, strict=True)]
    adapted = {group.place.name for some in groups for group in some}
    places, num_layers = dict.fromkeys(adapted, 0), 1
    if own.config.layerwise:
        known = _layer_places(own, _adapted(own, model, max_rank) if pool else adapted, model)
        if unknown := sorted(adapted - known.keys()):
            raise AdapterError(f"the classifier has no scalings for {unknown[0]}, which one of the adapters changes")
        places, num_layers = {name: known[name] for name in adapted}, max(known.values(), default=0) + 1
    labels = [path.name for path in files.adapters]
    mixture = _read_classifier(own, model, num_layers).keeping(outputs, files.config, labels)
    adapter = Adapter(_digest(files, places, mixture), max_rank=max(reader.found_rank for reader in readers))
    adapter.pool = pool or {}
    stack = _Stack(files.config, places, model)
    for number, (reader, some) in enumerate(zip(readers, groups, strict=True)):
        for group in some:
            stack.add(number, reader, group)
    adapter.tables |= {place.path: stack.table(place) for place in stack.places if place.is_table}
    parts: dict[str, list[tuple[Place, Change]]] = {}
    for place in stack.places:
        if not place.is_table:
            parts.setdefault(place.path, []).append((place, stack.change(place)))
    adapter.set_layers(parts, model)
    adapter.mixture = mixture.to(model.device)
    adapter.num_bytes += mixture.num_bytes
    return adapter


def _mixable(name: str, reader: AdapterReader) -> list[Group]:
    """Raises AdapterError for changes that scalings cannot apply to."""
    found = []
    for group in reader.groups():
        kinds = group.tensors.keys() - {_REPEATED}
        if other := sorted(kinds - _MIXED):
            key = group.tensors[other[0]]
            raise AdapterError(f"adapter {name}: {key}: X-LoRA mixes only low-rank changes, without DoRA and biases")
        if group.place.name == HEAD or not group.place.path.startswith("language_model."):
            raise AdapterError(
                f"adapter {name}: X-LoRA scales tokens in the layers of the language model, and {group.name} is not "
                "one of them"
            )
        if kinds:
            found.append(group)
    return found


def _adapted(files: XLoraFolder, model: AdaptableModel, max_rank: int) -> set[str]:
    named = zip(files.config.names, files.adapters, strict=True)
    some = [_mixable(name, AdapterReader(AdapterCheckpoint(path), model, max_rank)) for name, path in named]
    return {group.place.name for groups in some for group in groups}


def _layer_places(files: XLoraFolder, adapted: set[str], model: AdaptableModel) -> dict[str, int]:
    """The order comes from the ordering file, or from transformers' modules, which PEFT follows."""
    if files.layers is not None:
        return {model.canonical(name): place for name, place in files.layers.items()}
    try:
        modules = TransformersCheckpoint(model.checkpoint.folder).module_names()
    except UnsupportedModelError as error:
        raise AdapterError(
            "layerwise_scalings: transformers cannot say in which order this model has its layers; say it by "
            f'"layers" of an ordering file, as mistral.rs has it ({error})'
        ) from error
    order = [name for name in map(model.canonical, modules) if name in adapted]
    if set(order) != adapted:
        raise AdapterError(f"layerwise_scalings: transformers has no layer {min(adapted - set(order))} in this model")
    return {name: place for place, name in enumerate(order)}


def _read_classifier(files: XLoraFolder, model: AdaptableModel, num_layers: int) -> Mixture:
    """num_layers: layers with their own scalings."""
    config, weights = files.config, files.weights
    hidden_size = model.places[EMBEDDINGS].in_features
    if config.hidden_size != hidden_size:
        raise AdapterError(f"hidden_size is {config.hidden_size}, and this model's is {hidden_size}")
    found: dict[int, dict[str, Tensor]] = {}
    check_header(weights)
    try:
        with safe_open(weights, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                if (match := _CLASSIFIER.search(key)) is None:
                    raise AdapterError(f"{weights.name}: {key} is no tensor of a classifier that vlmserve knows")
                tensor = file.get_tensor(key).float()
                check_values(f"{weights.name}: {key}", tensor)
                number = 2**31 if match[3] else int(match[1] or match[2])
                found.setdefault(number, {})[match[4]] = tensor
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{weights} is broken: {error}") from error
    products = [found[number] for number in sorted(found)]
    if len(products) != config.depth or any("weight" not in product for product in products):
        raise AdapterError(
            f"{weights.name} holds {len(products)} of the classifier's {config.depth} layers; PEFT's save_pretrained "
            "leaves out those whose number is an adapter's name: write the tensors of state_dict() instead"
        )
    expected = hidden_size
    for product in products:
        weight, bias = product["weight"], product.get("bias")
        fits = weight.ndim == 2 and weight.shape[1] == expected and (bias is None or bias.shape == weight.shape[:1])
        if not fits:
            raise AdapterError(f"{weights.name}: layers of the classifier do not fit each other or the model")
        expected = weight.shape[0]
    mixture = Mixture(config, [(product["weight"], product.get("bias")) for product in products], num_layers)
    if expected != mixture.num_columns:
        raise AdapterError(
            f"{weights.name}: the classifier has {expected} outputs, but needs {mixture.num_columns}: one for each of "
            f"{len(config.names)} adapters" + (f" in {num_layers} layers" if config.layerwise else "")
        )
    return mixture


def _digest(files: XLoraFolder, places: Mapping[str, int], mixture: Mixture) -> bytes:
    """32 bytes over all inputs of the computation."""
    config = {name: value for name, value in vars(files.config).items() if name != "names"}
    hasher = blake3(b"x-lora" + json.dumps([config, sorted(places.items())], sort_keys=True).encode())
    for path in files.adapters:
        hasher.update(AdapterCheckpoint(path).digest())
    for product in mixture.products:
        for tensor in product:
            hasher.update(json.dumps(None if tensor is None else list(tensor.shape)).encode())
            if tensor is not None:
                hasher.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hasher.digest()


class _Factors(NamedTuple):
    """A and B of adapter `number` in one layer."""

    number: int
    down: Tensor
    up: Tensor


class _Stack:
    def __init__(self, config: XLoraConfig, layers: Mapping[str, int], model: AdaptableModel) -> None:
        """layers: each layer's index in the scalings, by name."""
        self._config, self._layers = config, layers
        self._dtype, self._device = model.dtype, model.device
        self._factors: dict[Place, list[_Factors]] = {}

    def add(self, number: int, reader: AdapterReader, group: Group) -> None:
        down, up = reader.low_rank(group)
        self._factors.setdefault(group.place, []).append(_Factors(number, down, up * self._config.weight))

    @property
    def places(self) -> Sequence[Place]:
        return list(self._factors)

    def change(self, place: Place) -> Change:
        down, up = self._stacked(place)
        return Change((LowRank(down, up, place.start, self._columns(place)),))

    def table(self, place: Place) -> TableChange:
        down, up = (factor.to(self._device, self._dtype) for factor in self._stacked(place))
        return TableChange((down.T.contiguous(), up), columns=self._columns(place).to(self._device))

    def _stacked(self, place: Place) -> tuple[Tensor, Tensor]:
        factors = self._factors[place]
        return torch.cat([one.down for one in factors]), torch.cat([one.up for one in factors], 1)

    def _columns(self, place: Place) -> Tensor:
        first = self._layers[place.name] * len(self._config.names)
        return torch.cat([torch.full((len(one.down),), first + one.number) for one in self._factors[place]])
