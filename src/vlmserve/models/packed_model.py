"""Converts a loaded model to tensors in its device's packed form, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from vlmserve.devices.device import Device
from vlmserve.kernels.cpu_native import PackedLinear
from vlmserve.layers.layer import arrange_layers
from vlmserve.layers.linear import Embedding, KeptWeight, Weight


class PackedModel(NamedTuple):
    """Everything that a model needs instead of its checkpoint's tensors."""

    tensors: dict[str, Tensor]
    records: dict[str, dict[str, Any]]
    """Settings of each packed layer, by layer name."""


def pack_model(model: nn.Module) -> PackedModel | None:
    """Return None if the device does not pack all layers."""
    packed = PackedModel({}, {})
    for path, module in model.named_modules():
        if isinstance(module, Weight | Embedding) and module.is_stored:
            kept = module.kept()
            if kept is None or not isinstance(kept.product, PackedLinear):
                return None
            packed.records[path] = {"bits": kept.bits, "product": kept.product.settings}
            packed.tensors[f"{path}/packed"] = kept.product.packed
            for name in ("input_order", "order"):
                if (order := getattr(kept, name)) is not None:
                    packed.tensors[f"{path}/{name}"] = order
        elif isinstance(module, Weight):
            return None
        for name, tensor in _own_tensors(module).items():
            packed.tensors[f"{path}.{name}"] = tensor
    return packed


def restore_model(model: nn.Module, packed: PackedModel, device: Device) -> None:
    """Fill an empty model with the result of `pack_model`. Raises ValueError if it belongs to another model."""
    modules = dict(model.named_modules())
    _check(modules, packed)
    for path, module in modules.items():
        for name, slot in _own_tensors(module).items():
            if f"{path}.{name}" in packed.tensors:
                slot.data = packed.tensors[f"{path}.{name}"]
    for path, record in packed.records.items():
        module = modules[path]
        assert isinstance(module, Weight | Embedding)
        bias = getattr(module, "bias", None)
        product = PackedLinear.restored(
            record["product"], packed.tensors[f"{path}/packed"], None if bias is None else bias.data
        )
        orders = (packed.tensors.get(f"{path}/{name}") for name in ("input_order", "order"))
        module.restore(KeptWeight(product, record["bits"], *orders))
    arrange_layers(model, device)


def _check(modules: Mapping[str, nn.Module], packed: PackedModel) -> None:
    for path, record in packed.records.items():
        module = modules.get(path)
        sizes = (record["product"]["out_features"], record["product"]["in_features"])
        if not isinstance(module, Weight | Embedding) or module.matrix_shape != sizes:
            raise ValueError(f"no layer {path} of {sizes}")
    for path, module in modules.items():
        for name, slot in _own_tensors(module).items():
            found = packed.tensors.get(f"{path}.{name}")
            if found is None and not (name == "weight" and path in packed.records):
                raise ValueError(f"no {path}.{name}")
            if found is not None and (found.shape, found.dtype) != (slot.shape, slot.dtype):
                raise ValueError(f"{path}.{name} is {tuple(found.shape)}, not {tuple(slot.shape)}")


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
