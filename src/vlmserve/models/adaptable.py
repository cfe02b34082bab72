"""A loaded model with the names and weights of its layers in checkpoints, for adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vlmserve.layers.linear import Embedding, MergedLinear, TiedEmbedding, Weight
from vlmserve.models.packed import read_weight
from vlmserve.models.weights import Checkpoint, weight_names
from vlmserve.quant.formats.layout import Layout
from vlmserve.quant.methods.rtn import round_to_nearest
from vlmserve.settings.quantization import QuantizationConfig

EMBEDDINGS, HEAD = "language_model.embed_tokens", "language_model.lm_head"


class Place(NamedTuple):
    """Position of a checkpoint's layer: outputs ``start <= i < start + size`` of the module at `path`."""

    name: str
    """Canonical name."""
    path: str
    start: int
    size: int
    in_features: int
    is_table: bool = False


@dataclass(frozen=True)
class AdaptableModel:
    modules: nn.Module
    """By names of weights."""
    checkpoint: Checkpoint
    layouts: Sequence[Layout]
    quantization: QuantizationConfig | None
    """Settings of weights that were quantized at load."""
    dtype: torch.dtype
    """The dtype of the layers' inputs."""
    device: torch.device

    def canonical(self, name: str) -> str:
        return self.checkpoint.canonical(f"{name}.weight").removesuffix(".weight")

    @cached_property
    def places(self) -> dict[str, Place]:
        found: dict[str, Place] = {}
        for path, module in self.modules.named_modules():
            if isinstance(module, TiedEmbedding):
                count, size = module.out_features, module.in_features
                found[path] = Place(path, path, 0, count, size, is_table=True)
                found[HEAD] = Place(HEAD, path, 0, count, size)
            elif isinstance(module, Embedding):
                found[path] = Place(path, path, 0, module.count, module.size, is_table=True)
            elif isinstance(module, Weight):
                start = 0
                sizes = module.parts.values() if isinstance(module, MergedLinear) else [module.out_features]
                for name, size in zip(weight_names(path, module), sizes, strict=True):
                    layer = name.removesuffix(".weight")
                    found[layer] = Place(layer, path, start, size, module.in_features)
                    start += size
        return found

    def repetition(self, place: Place) -> Place | None:
        """The part of the same layer that reuses this part's tensors, see `MergedLinear.repeated`."""
        module = self.weight_at(place.path)
        before, _, part = place.name.rpartition(".")
        if not isinstance(module, MergedLinear) or part not in module.repeated:
            return None
        return self.places[f"{before}.{module.repeated[part]}"]

    def base_weight(self, name: str) -> Tensor:
        """Return float32 ``[outputs, in_features]``, dequantized as the model computes with it."""
        place = self.places[name]
        stored = EMBEDDINGS if name == HEAD and place.path == EMBEDDINGS else name
        weight = read_weight(self.checkpoint, self.layouts, f"{stored}.weight").flatten(1)
        module = self.weight_at(place.path)
        if self.quantization is None or not isinstance(module, Weight) or module.bits is None:
            return weight
        config = self.quantization
        rounded = round_to_nearest(
            weight,
            bits=module.bits,
            group_size=config.group_size,
            symmetric=config.symmetric,
            zero_points=config.zero_points,
        )
        return rounded.dequantize()

    def base_bias(self, place: Place) -> Tensor:
        """Return float32 in the checkpoint's order."""
        return self.checkpoint.read(f"{place.name}.bias").float()

    @property
    def is_tied(self) -> bool:
        return isinstance(self.weight_at(EMBEDDINGS), TiedEmbedding)

    def weight_at(self, path: str) -> nn.Module:
        return self.modules.get_submodule(path)

    def lacks(self, name: str) -> bool:
        """Return whether the checkpoint has a layer that the model does not compute, such as an unused vision tower."""
        known = {path for path, _ in self.modules.named_modules()}
        return name not in known and name not in self.places and f"{name}.weight" in self.checkpoint.names
