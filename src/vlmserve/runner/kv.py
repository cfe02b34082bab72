"""The tensors of the KV cache, on the device and in host memory, and copies of blocks between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from vlmserve.kernels.attention import LayerCache
from vlmserve.models.protocols import LoadedModel
from vlmserve.steps import BlockCopy


class KVTensors:
    """Keys and values of all layers: `num_blocks` blocks on the model's device, and behind them those of its padding
    rows, and `num_host_blocks` in host memory."""

    def __init__(self, model: LoadedModel, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self._backend = model.backend
        self._device = model.device.torch_device
        total = num_blocks + model.device.padding_blocks
        self.layers: list[LayerCache] = model.language_model.allocate_cache(total, block_size, self._device)
        host = torch.device("cpu")
        self._host = model.language_model.allocate_cache(num_host_blocks, block_size, host) if num_host_blocks else []

    def zero(self, blocks: list[int]) -> None:
        """Zero blocks on the device."""
        if blocks:
            ids = torch.tensor(blocks, device=self._device)
            for layer in self.layers:
                self._backend.clear(layer, ids)

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Copy blocks in order."""
        for kind, group in itertools.groupby(copies, lambda copy: copy.kind):
            # Of several copies into a block the last one counts. All sources are read before a block is written; that
            # equals copying in order, since no block that is written to is a source later in the same step.
            sources = {copy.target: copy.source for copy in group}
            origin = self._host if kind == "load" else self.layers
            destination = self._host if kind == "save" else self.layers
            source_ids, target_ids = torch.tensor(list(sources.values())), torch.tensor(list(sources))
            for source, target in zip(origin, destination, strict=True):
                self._backend.copy(source, target, source_ids, target_ids)
