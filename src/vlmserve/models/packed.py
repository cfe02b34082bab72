"""Loads a quantized checkpoint's weights without dequantizing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vlmserve.errors import MissingWeightsError, ModelLoadError
from vlmserve.kernels.gguf_weight import GGUFWeight
from vlmserve.kernels.operations import Operations
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.layers.cut import Cut
from vlmserve.layers.layer import allocate
from vlmserve.layers.linear import Embedding, GatedLinear, Linear, TiedEmbedding
from vlmserve.models.read_ahead import ReadAhead
from vlmserve.models.weights import Checkpoint, merge_as_stored, module_cuts, module_slots, weight_names
from vlmserve.quant.formats.layout import Layout, StoredWeight

logger = logging.getLogger(__name__)


def load_packed(
    checkpoint: Checkpoint,
    model: nn.Module,
    layouts: Sequence[Layout],
    operations: Operations,
    settle: Callable[[nn.Module], None],
    input_bits: int | None = None,
) -> set[str]:
    """Give layers their quantized weights from the checkpoint; return the names of the filled parameters.

    A layer stays quantized if `operations` supports its format. layouts: formats of the weights. settle: called with
    each loaded layer. input_bits: see `Weight.quantize`.

    Raises MissingWeightsError for a missing tensor, ModelLoadError for mismatched tensors, UnsupportedModelError for an
    unknown format.
    """
    reader = _Reader(checkpoint, layouts)
    merge_as_stored(model, {reader.weight_name(name) for name in checkpoint.names})
    filled: set[str] = set()
    kept = plain = 0
    dtype = torch.float32
    for path, module in model.named_modules():
        if not isinstance(module, Linear | TiedEmbedding):
            continue
        names = weight_names(path, module)
        slots = {name: slot for name, slot in module_slots(path, module) if name in names}
        cuts = module_cuts(path, module)
        weights = {name: found for name in names if (found := reader.read(name, module.device)) is not None}
        for name, weight in weights.items():
            wanted = _whole_shape(slots[name], cuts.get(name))
            if list(weight.shape) != wanted:
                raise ModelLoadError(f"{name}: {tuple(weight.shape)}, config.json asks for {tuple(wanted)}")
        if not weights:
            continue
        weights = {name: _part(weight, cuts.get(name)) for name, weight in weights.items()}
        joined = _joined(list(weights.values())) if len(weights) == len(names) else None
        # Tables are also read row by row, so their columns must stay in order.
        in_order = joined is None or joined.order is None or isinstance(module, Linear)
        if joined is not None and operations.multiplies(joined) and in_order:
            kept += 1
            del slots
            module.quantize(joined, input_bits)
            if not any(module_slots(path, module)):
                settle(module)
            continue
        plain += 1
        dtype = module.dtype
        allocate(module, module.device)
        slots = dict(module_slots(path, module))
        for name, weight in weights.items():
            values = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
            slots[name].copy_(values.view(slots[name].shape))
            filled.add(name)
    logger.info(
        "quantized checkpoint: %d layers stay quantized, %d are dequantized to %s",
        kept,
        plain,
        dtype if plain else "plain",
    )
    return filled


def read_weight(checkpoint: Checkpoint, layouts: Sequence[Layout], name: str) -> Tensor:
    weight = _Reader(checkpoint, layouts).read(name, torch.device("cpu")) if layouts else None
    if weight is None:
        weight = checkpoint.read(name)
    return (weight.dequantize() if isinstance(weight, QuantizedWeight) else weight).float()


def load_blocks(
    checkpoint: Checkpoint,
    model: nn.Module,
    operations: Operations,
    settle: Callable[[nn.Module], None],
    input_bits: int | None = None,
) -> None:
    """Give layers those quantized weights of a GGUF file that kernels support.

    `Checkpoint.load` fills other layers. settle, input_bits: as in `load_packed`.
    """
    merge_as_stored(model, checkpoint.names)
    keeps_superblocks = operations.multiplies_superblocks(input_bits)
    layers = list(_layers_of_blocks(checkpoint, model))
    tensors = [[part for name in names for part in checkpoint.stored(name)] for _, _, names in layers]
    with ReadAhead(tensors, checkpoint.digests) as ahead:
        for number, (path, module, names) in enumerate(layers):
            ahead.reach(number)
            taken = _take_blocks(checkpoint, path, module, names, keeps_superblocks, input_bits)
            taken = taken or _take_unpacked(checkpoint, path, module, names, operations, input_bits)
            if taken and not any(module_slots(path, module)):
                settle(module)


def _layers_of_blocks(
    checkpoint: Checkpoint, model: nn.Module
) -> Iterator[tuple[str, Linear | TiedEmbedding | Embedding, list[str]]]:
    """Yield path, layer and names of weights that may be blocks."""
    for path, module in model.named_modules():
        # Towers read whole position tables.
        is_table = isinstance(module, Embedding) and path.endswith("embed_tokens")
        if is_table or isinstance(module, Linear | TiedEmbedding):
            names = weight_names(path, module)
            if checkpoint.names.issuperset(names) and not (isinstance(module, GatedLinear) and module.bias is not None):
                yield path, module, names


def _take_blocks(
    checkpoint: Checkpoint,
    path: str,
    module: Linear | TiedEmbedding | Embedding,
    names: Sequence[str],
    keeps_superblocks: bool,
    input_bits: int | None,
) -> bool:
    """Give a layer its blocks. Returns False if it cannot store all of them."""
    slots, cuts = dict(module_slots(path, module)), module_cuts(path, module)
    weights = []
    for name in names:
        weight, cut = checkpoint.blocks(name), cuts.get(name)
        if weight is None or (weight.group_blocks is None and not keeps_superblocks):
            return False
        if list(weight.shape) != _whole_shape(slots[name], cut):
            return False
        own = weight if cut is None else cut.of_blocks(weight)
        if own is None:
            return False
        weights.append(own)
    del slots
    joined = GGUFWeight.beside(weights)
    if isinstance(module, GatedLinear):
        if not joined.is_pair:
            return False
    elif not joined.fills_tiles:
        joined = GGUFWeight.join(weights)
        if not joined.fills_tiles:
            return False
    module.quantize(joined) if isinstance(module, Embedding) else module.quantize(joined, input_bits)
    for name in names:
        checkpoint.hash(name)
    return True


def _take_unpacked(
    checkpoint: Checkpoint,
    path: str,
    module: Linear | TiedEmbedding | Embedding,
    names: Sequence[str],
    operations: Operations,
    input_bits: int | None,
) -> bool:
    """Give a layer the values and scales of its blocks. Returns False if kernels do not support them."""
    slots, cuts = dict(module_slots(path, module)), module_cuts(path, module)
    weights = [
        _part(weight, cuts.get(name))
        for name in names
        if (weight := checkpoint.quantized(name)) is not None
        and list(weight.shape) == _whole_shape(slots[name], cuts.get(name))
    ]
    del slots
    joined = _joined(weights) if len(weights) == len(names) else None
    if joined is None or not operations.multiplies(joined):
        return False
    module.quantize(joined) if isinstance(module, Embedding) else module.quantize(joined, input_bits)
    return True


def _whole_shape(slot: Tensor, cut: Cut | None) -> list[int]:
    own = slot.flatten(1).shape
    return list(own) if cut is None else cut.whole_shape(own)


def _part(weight: StoredWeight, cut: Cut | None) -> StoredWeight:
    return weight if cut is None else cut.of(weight)


def _joined(weights: Sequence[StoredWeight]) -> QuantizedWeight | None:
    """Merge weights with the same inputs, in groups that kernels support; None if that is impossible."""
    packed = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if len(packed) < len(weights):
        return None
    try:
        return QuantizedWeight.join(packed).in_smaller_groups()
    except ValueError:
        return None


@dataclass(frozen=True)
class _Reader:
    checkpoint: Checkpoint
    layouts: Sequence[Layout]

    def weight_name(self, name: str) -> str:
        """The name of the weight whose values a tensor holds; other tensors keep their name."""
        layer, _, part = name.rpartition(".")
        return f"{layer}.weight" if part in {layout.mark for layout in self.layouts} else name

    def read(self, name: str, device: torch.device) -> StoredWeight | None:
        layer = name.removesuffix("weight")
        names = self.checkpoint.names
        lacks = ""
        for layout in self.layouts:
            if layer + layout.mark not in names:
                continue
            missing = [part for part in layout.needed if layer + part not in names]
            if not missing:
                parts = (layout.mark, *layout.needed, *layout.optional)
                found: dict[str, Tensor] = {
                    part: self.checkpoint.read(layer + part).to(device) for part in parts if layer + part in names
                }
                for part in found:
                    self.checkpoint.hash(layer + part)
                try:
                    return layout.read(found)
                except ModelLoadError as error:
                    raise type(error)(f"{name}: {error}") from error
                except (ValueError, IndexError, RuntimeError) as error:
                    shapes = ", ".join(f"{part} {tuple(tensor.shape)}" for part, tensor in found.items())
                    raise ModelLoadError(f"{name}: {shapes} do not belong together") from error
            # A weight of more than a byte needs no other tensors.
            if layout.mark != "weight" or self.checkpoint.read(name).dtype.itemsize == 1:
                lacks = lacks or ", ".join(layer + part for part in missing)
        if lacks:
            raise MissingWeightsError(f"{self.checkpoint.folder} lacks {lacks}")
        return None
