"""Linear layers after the final hidden states, for embeddings: Dense modules, and projections of retrievers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vlmserve.errors import MissingWeightsError, ModelLoadError
from vlmserve.models.files import open_weights, weight_files
from vlmserve.models.weights import Checkpoint
from vlmserve.prompt.pooling import StoredLayer


class _OutputLayer(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    activation: nn.Module


class OutputLayers:
    def __init__(self, layers: Sequence[_OutputLayer]) -> None:
        self._layers = layers

    @classmethod
    def read(
        cls, stored: Sequence[StoredLayer], checkpoint: Checkpoint, hidden_size: int, device: torch.device
    ) -> OutputLayers | None:
        """Read the layers of a checkpoint; None if it has none.

        Raises MissingWeightsError for missing tensors, ModelLoadError for tensors of another shape.
        """
        layers: list[_OutputLayer] = []
        size = hidden_size
        for layer in stored:
            weight, bias = (_tensor(checkpoint, layer, kind) for kind in ("weight", "bias"))
            if weight is None:
                raise MissingWeightsError(f"{checkpoint.folder} lacks the tensor {layer.name}.weight of its vectors")
            if weight.shape[1:] != (size,) or (bias is not None and bias.shape != weight.shape[:1]):
                raise ModelLoadError(
                    f"{layer.name}.weight has shape {list(weight.shape)}; vectors of {size} elements come before it"
                )
            size = len(weight)
            placed = [None if one is None else one.to(device, torch.float32) for one in (weight, bias)]
            assert placed[0] is not None
            layers.append(_OutputLayer(placed[0], placed[1], getattr(nn, layer.activation)()))
        return cls(layers) if layers else None

    @property
    def size(self) -> int:
        return len(self._layers[-1].weight)

    def __call__(self, rows: Tensor) -> Tensor:
        """float32 ``[rows, hidden_size]`` to ``[rows, size]``."""
        for layer in self._layers:
            rows = layer.activation(F.linear(rows, layer.weight, layer.bias))
        return rows


def _tensor(checkpoint: Checkpoint, layer: StoredLayer, kind: str) -> Tensor | None:
    name = f"{layer.name}.{kind}"
    if layer.folder is None:
        return checkpoint.read(name) if name in checkpoint.names else None
    return _tensor_of_folder(checkpoint.folder / layer.folder, name)


def _tensor_of_folder(folder: Path, name: str) -> Tensor | None:
    for path in weight_files(folder):
        with open_weights(path) as file:
            if name in file.keys():  # noqa: SIM118
                tensor: Tensor = file.get_tensor(name)
                return tensor
    return None
