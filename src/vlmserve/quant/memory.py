"""Estimates weight memory before loading, and measures it afterwards."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from vlmserve.devices.device import Device
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.layers.linear import Embedding, Linear, TiedEmbedding, Weight
from vlmserve.settings.quantization import QuantizationConfig

OUTPUTS = 256
"""Outputs of the layer that is measured as an example; a multiple of each kernel's tile."""


def own_bytes(module: nn.Module) -> int:
    sizes = {name: parameter.nbytes for name, parameter in module.named_parameters(recurse=False)}
    if isinstance(module, Weight | Embedding):
        sizes["weight"] = module.num_bytes
    return sum(sizes.values())


def weight_bytes(model: nn.Module) -> int:
    return sum(own_bytes(module) for module in model.modules())


def expected_bytes(model: nn.Module, device: Device, bits: Mapping[str, int], config: QuantizationConfig) -> int:
    """Estimate by packing a few outputs of each kind of layer. model: may be unloaded. bits: by name."""
    sizes = StoredSizes(device, config)
    total = 0
    for name, module in model.named_modules():
        total += own_bytes(module)
        if isinstance(module, Weight):
            total += sizes.of(module, bits.get(name)) - module.num_bytes
    return total


class StoredSizes:
    def __init__(self, device: Device, config: QuantizationConfig) -> None:
        self._device, self._config = device, config
        self._known: dict[tuple[object, ...], int] = {}

    def of(self, module: Weight, bits: int | None) -> int:
        pieces, rest = divmod(module.out_features, OUTPUTS)
        return pieces * self._stored(module, OUTPUTS, bits) + self._stored(module, rest, bits)

    def _stored(self, module: Weight, outputs: int, bits: int | None) -> int:
        if not outputs:
            return 0
        bias = module.bias is not None if isinstance(module, Linear) else False
        epilogue = module.epilogue if isinstance(module, Linear) else None
        key = (epilogue, bias, module.in_features, outputs, bits, module.dtype)
        if key not in self._known:
            on = self._device.torch_device
            weight = self._example(outputs, module.in_features, bits, module.dtype)
            if isinstance(module, TiedEmbedding):
                self._known[key] = self._device.table(weight, module.dtype).num_bytes
            else:
                assert isinstance(module, Linear)
                zeros = torch.zeros(outputs, dtype=module.dtype, device=on) if bias else None
                self._known[key] = self._device.linear(weight, zeros, module.epilogue, module.dtype).num_bytes
        return self._known[key]

    def _example(
        self, outputs: int, inputs: int, bits: int | None, dtype: torch.dtype
    ) -> torch.Tensor | QuantizedWeight:
        on = self._device.torch_device
        if bits is None:
            return torch.zeros(outputs, inputs, dtype=dtype, device=on)
        group_size = inputs if bits == 8 else self._config.group_size
        scales = torch.zeros(outputs, -(-inputs // group_size), device=on)
        values = torch.zeros(outputs, inputs, dtype=torch.uint8, device=on)
        # Zeros are symmetric: their minimums are not stored.
        minimums = scales if bits == 8 or self._config.symmetric else torch.ones_like(scales)
        return QuantizedWeight(bits, group_size, values, scales, minimums)
