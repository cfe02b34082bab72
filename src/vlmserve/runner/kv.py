"""The tensors of the KV cache, on the device and in host memory, and of states. Copies of blocks and states."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from vlmserve.devices.offload import HostBlocks
from vlmserve.kernels.attention import LayerCache
from vlmserve.kernels.blocks import allocate_states, clear_blocks, copy_blocks, distinct
from vlmserve.kernels.states import StateCache
from vlmserve.kernels.transfers import to_device
from vlmserve.models.protocols import LoadedModel
from vlmserve.steps import BlockCopy, StateCopy


class KVTensors:
    """Keys and values of all layers: `num_blocks` pages (see `CacheLayout`) on the model's device, then the pages of
    its padding rows, and `num_host_blocks` pages in host memory. States of all layers that have any: the padding slot,
    then `num_slots` slots."""

    def __init__(
        self, model: LoadedModel, num_blocks: int, num_host_blocks: int, block_size: int, num_slots: int
    ) -> None:
        self._device = model.device.torch_device
        total = num_blocks + model.device.padding_blocks
        allocate, layout = model.language_model.allocate_cache, model.language_model.cache_layout
        self.layers: list[LayerCache] = allocate(total, block_size, self._device, layout)
        self.states: list[StateCache] = allocate_states(
            model.language_model.state_specs, 1 + num_slots, model.dtype, self._device
        )
        self._slots = distinct(self.layers)
        self._host: HostBlocks | None = None

        def allocate_slots(count: int, device: torch.device) -> list[LayerCache]:
            return distinct(allocate(count, block_size, device, layout))

        if num_host_blocks:
            self._host = model.device.host_blocks(self._slots, num_host_blocks, allocate_slots)

    def zero(self, blocks: list[int]) -> None:
        """Zero blocks on the device."""
        if blocks:
            ids = to_device(torch.tensor(blocks), self._device)
            for layer in self._slots:
                clear_blocks(layer, ids)

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """Copy states. Of several copies into a slot the last one counts; no target is a source of a later copy."""
        by_target = {copy.target: copy.source for copy in copies}
        for layer in self.states if copies else ():
            layer.copy([*by_target.values()], [*by_target])

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Copy blocks in order."""
        for kind, group in itertools.groupby(copies, lambda copy: copy.kind):
            # Of several copies into a block the last one counts. All sources are read before a block is written; that
            # equals copying in order, since no block that is written to is a source later in the same step.
            by_target = {copy.target: copy.source for copy in group}
            sources, targets = list(by_target.values()), list(by_target)
            if kind == "copy":
                source_ids, target_ids = torch.tensor(sources), torch.tensor(targets)
                for layer in self._slots:
                    copy_blocks(layer, layer, source_ids, target_ids)
                continue
            assert self._host is not None
            if kind == "save":
                self._host.save(sources, targets)
            else:
                self._host.load(sources, targets)
