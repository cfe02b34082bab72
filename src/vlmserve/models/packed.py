"""Packed weights of a quantized checkpoint into a model's layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from vlmserve.errors import MissingWeightsError, ModelLoadError, UnsupportedModelError
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.layers.linear import Linear, TiedEmbedding
from vlmserve.models.weights import Checkpoint, weight_names
from vlmserve.quant.compressed_tensors import PACKED, SCALE, SHAPE, SHIFT, ZERO_POINT, from_tensors


def load_packed(checkpoint: Checkpoint, model: nn.Module, group_sizes: Sequence[int]) -> set[str]:
    """Give layers the weights that the checkpoint holds packed. Returns the names of parameters that it filled instead.

    group_sizes: those that its config names. Weights stay packed where a layer can compute with them, and become plain
    ones elsewhere. Raises MissingWeightsError for a layer of which only a part is there, ModelLoadError for tensors
    that do not belong together, UnsupportedModelError for projections of one input that are quantized in different
    ways.
    """
    filled = set()
    for path, module in model.named_modules():
        if not isinstance(module, Linear | TiedEmbedding):
            continue
        names = weight_names(path, module)
        device, shape = module.weight.device, (module.out_features, module.in_features)
        packed = [_read(checkpoint, name, group_sizes, device) for name in names if _packed(name) in checkpoint.names]
        if not packed:
            continue
        try:
            if len(packed) < len(names):
                raise ValueError("some are not quantized")
            weight = QuantizedWeight.join(packed)
        except ValueError as error:
            raise UnsupportedModelError(f"{', '.join(names)} must be quantized alike: {error}") from error
        if weight.shape != shape:
            raise ModelLoadError(f"{', '.join(names)}: {tuple(weight.shape)}, config.json asks for {shape}")
        if weight.bits == 8 and not _is_plain_int8(weight):
            module.weight.copy_(weight.dequantize().view(module.weight.shape))
            filled.update(names)
        else:
            module.quantize(weight)
    return filled


def _packed(name: str) -> str:
    return name.removesuffix("weight") + PACKED


def _read(checkpoint: Checkpoint, name: str, group_sizes: Sequence[int], device: torch.device) -> QuantizedWeight:
    layer = name.removesuffix("weight")
    parts = (PACKED, SCALE, SHIFT, ZERO_POINT, SHAPE)
    tensors = {part: checkpoint.read(layer + part).to(device) for part in parts if layer + part in checkpoint.names}
    if missing := {PACKED, SCALE, SHAPE} - tensors.keys():
        raise MissingWeightsError(f"{checkpoint.folder} lacks {', '.join(layer + part for part in sorted(missing))}")
    return from_tensors(tensors, group_sizes)


def _is_plain_int8(weight: QuantizedWeight) -> bool:
    """Whether 8 bits are of the kind that layers compute with: a scale for each output, zero in the middle."""
    return weight.scales.shape[1] == 1 and bool((weight.shifts == -128 * weight.scales).all())
