"""The weights of a quantized checkpoint into a model's layers, as they are."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from vlmserve.errors import MissingWeightsError, ModelLoadError, UnsupportedModelError
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.layers.linear import GatedLinear, Linear, TiedEmbedding
from vlmserve.models.weights import Checkpoint, merge_as_stored, weight_names
from vlmserve.quant.compressed_tensors import PACKED, SCALE, SHAPE, SHIFT, ZERO_POINT, from_tensors


def load_packed(checkpoint: Checkpoint, model: nn.Module, group_sizes: Sequence[int]) -> set[str]:
    """Give layers the weights that the checkpoint holds packed. Returns the names of parameters that it filled instead.

    group_sizes: those that its config names. Weights stay packed where a layer can compute with them, and become plain
    ones elsewhere. Raises MissingWeightsError for a layer of which only a part is there, ModelLoadError for tensors
    that do not belong together, UnsupportedModelError for projections of one input that are quantized in different
    ways.
    """
    merge_as_stored(model, {name.removesuffix(PACKED) + "weight" for name in checkpoint.names})
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


def load_blocks(checkpoint: Checkpoint, model: nn.Module, *, unsettled: Collection[nn.Module]) -> None:
    """Give layers the weights that a GGUF file holds in a form that the native kernels compute with.

    Each is arranged for its kernel before the next one is read, but for those of `unsettled`, whose rows have yet to be
    put into order. Left as they are: layers that are merged of several kinds, those that the kernels do not know, and
    tables, of which single rows are read.
    """
    merge_as_stored(model, checkpoint.names)
    for path, module in model.named_modules():
        if not isinstance(module, Linear):
            continue
        names = weight_names(path, module)
        if not checkpoint.names.issuperset(names) or (isinstance(module, GatedLinear) and module.bias is not None):
            continue
        weights = [weight for name in names if (weight := checkpoint.quantized(name)) is not None]
        if len(weights) < len(names):
            continue
        weight = QuantizedWeight.join(weights)
        # Loading what is plain says what is wrong with other shapes.
        if weight.shape == (module.out_features, module.in_features):
            module.quantize(weight)
            if module not in unsettled:
                module.pack(native=True)


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
