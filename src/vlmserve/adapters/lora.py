"""Convert an adapter's tensors to changes of a model's layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from vlmserve.adapters.checkpoint import AdapterCheckpoint, Kind, check_values
from vlmserve.adapters.mixture import Mixture
from vlmserve.errors import AdapterError
from vlmserve.kernels.adapters import Change, LowRank, PreparedChange, TableChange
from vlmserve.layers.linear import Linear, Weight
from vlmserve.models.adaptable import EMBEDDINGS, HEAD, AdaptableModel, Place

LAYERS = "language_model.layers."


@dataclass
class Adapter:
    digest: bytes
    layers: dict[str, PreparedChange] = field(default_factory=dict)
    """Changes of linear layers, by module path."""
    tables: dict[str, TableChange] = field(default_factory=dict)
    """Changes of embedding tables, by module path."""
    num_bytes: int = 0
    max_rank: int = 0
    mixture: Mixture | None = None
    """X-LoRA's classifier, which scales the adapters that it mixes."""
    pool: Mapping[str, str] = field(default_factory=dict)
    """Adapters in place of the X-LoRA checkpoint's own, see `read_xlora`."""

    @property
    def vision(self) -> bool:
        """True if the adapter changes image embeddings."""
        return any(not path.startswith("language_model.") for path in (*self.layers, *self.tables))

    def set_layers(self, parts: Mapping[str, Sequence[tuple[Place, Change]]], model: AdaptableModel) -> None:
        """parts: by module path. Changes of tables stay."""
        for path, changes in parts.items():
            module = model.weight_at(path)
            assert isinstance(module, Weight)
            self.layers[path] = module.prepare(_ordered(_merged(changes, module, model), module))
        self.num_bytes = sum(layer.num_bytes for layer in self.layers.values())
        self.num_bytes += sum(table.num_bytes for table in self.tables.values())

    @property
    def unpacked(self) -> bool:
        changes = (prepared.change for path, prepared in self.layers.items() if path.startswith(LAYERS))
        return any(change.adds or change.replaces for change in changes)


def read_adapter(checkpoint: AdapterCheckpoint, model: AdaptableModel, *, max_rank: int) -> Adapter:
    """Read an adapter, after checking all shapes in the header.

    Raises AdapterError for ranks above `max_rank`, tensors that do not fit, values that are not finite, and unsupported
    changes.
    """
    reader = AdapterReader(checkpoint, model, max_rank)
    groups = reader.groups()
    adapter = Adapter(checkpoint.digest(), max_rank=reader.found_rank)
    parts: dict[str, list[tuple[Place, Change]]] = {}
    for group in groups:
        if group.place.is_table:
            adapter.tables[group.place.path] = table = reader.table(group)
            if (head := reader.tied_head(group, table)) is not None:
                parts.setdefault(group.place.path, []).append((group.place, head))
        else:
            parts.setdefault(group.place.path, []).append((group.place, reader.change(group)))
    adapter.set_layers(parts, model)
    return adapter


def layer_changes(
    checkpoint: AdapterCheckpoint, model: AdaptableModel, *, max_rank: int
) -> Iterator[tuple[str, Change | TableChange]]:
    """Yield each change with its layer's name in the checkpoint, outputs in the checkpoint's order from 0.

    The output head's change follows an equal change of tied embeddings. Raises like `read_adapter`, and AdapterError
    for a bias of a layer without bias.
    """
    reader = AdapterReader(checkpoint, model, max_rank)
    for group in reader.groups(repeated=False):
        name = group.place.name
        if group.place.is_table:
            table = reader.table(group)
            yield name, table
            if (head := reader.tied_head(group, table)) is not None:
                yield HEAD, head
            continue
        change = reader.change(group)
        if (change.shift is not None or change.bias is not None) and f"{name}.bias" not in model.checkpoint.names:
            raise AdapterError(f"{group.name} would get a bias, which a layer of this architecture has not")
        yield name, replace(change, parts=tuple(part._replace(start=0) for part in change.parts))


class Group(NamedTuple):
    """name: in the adapter."""

    name: str
    place: Place
    tensors: Mapping[Kind, str]


class AdapterReader:
    """Reads an adapter layer by layer. found_rank: the highest rank so far."""

    def __init__(self, checkpoint: AdapterCheckpoint, model: AdaptableModel, max_rank: int) -> None:
        self._checkpoint, self._model, self._max_rank = checkpoint, model, max_rank
        self._config = checkpoint.config
        self.found_rank = 0

    def groups(self, *, repeated: bool = True) -> list[Group]:
        """Check shapes of all changed layers.

        repeated: include parts of merged layers that reuse another part's tensors.
        """
        found = []
        for name, tensors in self._checkpoint.layers.items():
            canonical = self._model.canonical(name)
            place = self._model.places.get(canonical)
            if place is None:
                if self._model.lacks(canonical):
                    continue
                raise AdapterError(self._unknown(name, canonical, tensors))
            if not getattr(self._model.weight_at(place.path), "takes_adapters", True):
                raise AdapterError(
                    f"{next(iter(tensors.values()))}: adapters of experts and routers are not supported; "
                    "leave them out of target_modules"
                )
            self._check(name, place, tensors)
            found.append(Group(name, place, tensors))
            if repeated and (other := self._model.repetition(place)) is not None:
                found.append(Group(name, other, tensors))
        if not any(kind != "base_weight" for group in found for kind in group.tensors):
            raise AdapterError(f"{self._checkpoint.folder} changes no layer of this model")
        return found

    def _unknown(self, name: str, canonical: str, tensors: Mapping[Kind, str]) -> str:
        key = next(iter(tensors.values()))
        if canonical in {path for path, _ in self._model.modules.named_modules()}:
            return f"{key}: adapters of {name} are not supported; supported are linear layers, embeddings and the head"
        base = f"; it was made for {self._config.base}" if self._config.base else ""
        return f"{key}: this model has no layer {name}{base}"

    def _check(self, name: str, place: Place, tensors: Mapping[Kind, str]) -> None:
        rank = self._config.rank_of(name)
        count, size = place.size, place.in_features
        expected: dict[Kind, tuple[int, ...]] = {"weight": (count, size), "base_weight": (count, size)}
        if place.is_table:
            tokens = len(self._config.tokens_of(name))
            expected |= {
                "table_down": (rank, count),
                "table_up": (size, rank),
                "magnitude": (size,),
                "tokens": (tokens, size),
            }
        else:
            expected |= {"down": (rank, size), "up": (count, rank), "tokens": (len(self._config.tokens_of(name)), size)}
            expected |= dict.fromkeys(("up_bias", "magnitude", "bias"), (count,))
        pairs: tuple[tuple[Kind, Kind], ...] = (("down", "up"), ("table_down", "table_up"))
        for first, second in pairs:
            if (first in tensors) != (second in tensors):
                raise AdapterError(f"{name} has only one of its two factors: {', '.join(tensors.values())}")
            if first in tensors and rank > self._max_rank:
                raise AdapterError(
                    f"the adapter's rank is {rank}, and at most {self._max_rank} is allowed; --max-lora-rank sets it"
                )
            if first in tensors:
                self.found_rank = max(self.found_rank, rank)
        for kind, key in tensors.items():
            if kind not in expected:
                raise AdapterError(f"{key}: this cannot be changed in {name}")
            shape = tuple(self._checkpoint.shapes[key])
            # LoRA factors of a convolution have its kernel's shape.
            flat = (shape[0], math.prod(shape[1:])) if len(shape) > 2 else shape
            if flat != expected[kind]:
                raise AdapterError(f"{key} has shape {shape}, and for this model it would be {expected[kind]}")
        self._check_support(name, place, tensors)

    def _check_support(self, name: str, place: Place, tensors: Mapping[Kind, str]) -> None:
        config = self._config
        lora = "down" in tensors or "table_down" in tensors
        if "magnitude" in tensors and (not lora or "up_bias" in tensors or config.fan_in_fan_out):
            raise AdapterError(f"{name}: DoRA with lora_bias or fan_in_fan_out is not supported")
        if config.dora and lora and "magnitude" not in tensors:
            raise AdapterError(f"{name} lacks its lora_magnitude_vector, which use_dora asks for")
        if place.is_table and lora and config.tied and self._model.is_tied:
            raise AdapterError(f"{name}: a low-rank adapter of tied embeddings (ensure_weight_tying) is not supported")
        if lora and "weight" in tensors:
            raise AdapterError(f"{name} has a low-rank adapter and a whole weight")
        if "bias" in tensors and getattr(self._model.weight_at(place.path), "bias", None) is None:
            raise AdapterError(f"{tensors['bias']}: {name} has no bias in this model")
        if "base_weight" in tensors and not self._is_base(place, tensors["base_weight"]):
            raise AdapterError(
                f"{tensors['base_weight']} is not the weight of this model: an adapter with resized or trained "
                "embeddings has to have them in modules_to_save"
            )

    def _is_base(self, place: Place, key: str) -> bool:
        """True if an adapter's copy equals the base weight within both dtypes' precision."""
        weight = self._model.base_weight(place.name)
        return bool((self._checkpoint.read(key) - weight).norm() <= 0.2 * weight.norm())

    def _read(self, key: str) -> Tensor:
        return self._checkpoint.read(key)

    def low_rank(self, group: Group) -> tuple[Tensor, Tensor]:
        """A, float32 ``[rank, in_features]``, and scaled B, float32 ``[outputs, rank]``."""
        table = group.place.is_table
        down, up = (
            self._read(group.tensors[kind]) for kind in (("table_down", "table_up") if table else ("down", "up"))
        )
        scaled = up.flatten(1) * self._config.scale_of(group.name)
        check_values(f"{group.name}: lora_B times its scale", scaled)
        return down.flatten(1), scaled

    def table(self, group: Group) -> TableChange:
        dtype, device = self._model.dtype, self._model.device
        low_rank = factor = rows = weight = None
        if "table_down" in group.tensors:
            down, up = self.low_rank(group)
            if "magnitude" in group.tensors:
                # As a linear weight, the table has one input per entry.
                norm = (self._model.base_weight(group.place.name) + (up @ down).T).norm(dim=0)
                factor = self._factor(group, norm).to(device)
            low_rank = down.T.contiguous().to(device, dtype), up.to(device, dtype)
        if "tokens" in group.tensors:
            places = torch.tensor(list(self._config.tokens_of(group.name)), dtype=torch.int64, device=device)
            if len(places) and not 0 <= int(places.min()) <= int(places.max()) < group.place.size:
                raise AdapterError(
                    f"{group.name}: trained token ids must be below {group.place.size}, the size of the vocabulary"
                )
            rows = places, self._read(group.tensors["tokens"]).to(device, dtype)
        if "weight" in group.tensors:
            weight = self._read(group.tensors["weight"]).to(device, dtype)
        return TableChange(low_rank, factor, rows, weight)

    def _factor(self, group: Group, norm: Tensor) -> Tensor:
        """DoRA's factor of each output. norm: of the changed weight."""
        factor = self._read(group.tensors["magnitude"]) / norm
        check_values(f"{group.name}: lora_magnitude_vector divided by the weight's norm", factor)
        return factor

    def tied_head(self, group: Group, table: TableChange) -> Change | None:
        """The output head's part of a change of tied embeddings.

        As in PEFT, trained tokens always change the head; a whole table does with ensure_weight_tying.
        """
        if group.place.path != EMBEDDINGS or not self._model.is_tied:
            return None
        weight = table.weight if self._config.tied else None
        return None if table.rows is None and weight is None else Change(outputs=table.rows, weight=weight)

    def change(self, group: Group) -> Change:
        """`factor`, `shift` and `bias` cover only this part's outputs."""
        place, tensors = group.place, group.tensors
        parts: tuple[LowRank, ...] = ()
        factor = shift = outputs = None
        if "down" in tensors:
            down, up = self.low_rank(group)
            if "magnitude" in tensors:
                norm = (self._model.base_weight(place.name) + up @ down).norm(dim=1)
                factor = self._factor(group, norm)
            if "up_bias" in tensors:
                shift = self._read(tensors["up_bias"]) * self._config.scale_of(group.name)
            parts = (LowRank(down, up, place.start),)
        if "bias" in tensors and "weight" not in tensors:
            own = self._model.base_bias(place)
            shift = self._read(tensors["bias"]) - own + (0 if shift is None else shift)
        if "tokens" in tensors:
            tokens = torch.tensor(list(self._config.tokens_of(group.name)), dtype=torch.int64)
            outputs = tokens, self._read(tensors["tokens"])
        weight = self._read(tensors["weight"]).flatten(1) if "weight" in tensors else None
        bias = self._read(tensors["bias"]) if weight is not None and "bias" in tensors else None
        return Change(parts, factor, shift, weight, bias, outputs)


def _merged(changes: Sequence[tuple[Place, Change]], module: Weight, model: AdaptableModel) -> Change:
    outputs = next((change.outputs for _, change in changes if change.outputs is not None), None)
    if any(change.weight is not None for _, change in changes):
        weight, bias = _replaced(changes, module, model)
        return Change(weight=weight, bias=bias, outputs=outputs)
    parts = tuple(part for _, change in changes for part in change.parts)
    factor = _whole([(place, change.factor) for place, change in changes], module, torch.ones(module.out_features))
    shift = _whole([(place, change.shift) for place, change in changes], module, torch.zeros(module.out_features))
    return Change(parts, factor, shift, outputs=outputs)


def _replaced(
    changes: Sequence[tuple[Place, Change]], module: Weight, model: AdaptableModel
) -> tuple[Tensor, Tensor | None]:
    """Low-rank changes of other parts are merged in."""
    path = changes[0][0].path
    new = {place.name: change for place, change in changes}
    weight, bias = torch.empty(module.out_features, module.in_features), torch.zeros(module.out_features)
    has_bias = getattr(module, "bias", None) is not None
    for place in (place for place in model.places.values() if place.path == path and not place.is_table):
        rows = slice(place.start, place.start + place.size)
        change = new.get(place.name, Change())
        if change.weight is not None:
            weight[rows] = change.weight
        else:
            weight[rows] = model.base_weight(place.name) + sum(up @ down for down, up, *_ in change.parts)
            weight[rows] *= 1 if change.factor is None else change.factor[:, None]
        if change.bias is not None:
            bias[rows] = change.bias
        else:
            bias[rows] = model.base_bias(place) if has_bias else 0
            bias[rows] += 0 if change.shift is None else change.shift
    needed = has_bias or any(change.shift is not None for change in new.values())
    return weight, bias if needed else None


def _whole(parts: Sequence[tuple[Place, Tensor | None]], module: Weight, default: Tensor) -> Tensor | None:
    if all(values is None for _, values in parts):
        return None
    for place, values in parts:
        if values is not None:
            default[place.start : place.start + place.size] = values
    return default


def _ordered(change: Change, module: Weight) -> Change:
    order = module.order.cpu() if isinstance(module, Linear) and module.order is not None else None
    if order is None:
        return change

    def place(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[order]

    parts = []
    for part in change.parts:
        # Reordering keeps outputs within their part.
        rows = order[part.start : part.start + len(part.up)] - part.start
        parts.append(part._replace(up=part.up[rows]))
    return replace(
        change, parts=tuple(parts), factor=place(change.factor), shift=place(change.shift),
        weight=place(change.weight), bias=place(change.bias),
    )  # fmt: skip
