"""KV cache and state tensors, on the device and in host memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlmserve.devices.offload import STAGED_BYTES, HostBlocks, runs
from vlmserve.devices.out_of_memory import with_less_memory
from vlmserve.kernels.attention import LayerCache
from vlmserve.kernels.blocks import Blocks, allocate_states, clear_blocks, distinct, populate
from vlmserve.kernels.states import StateCache
from vlmserve.kernels.transfers import to_device
from vlmserve.models.protocols import LoadedModel
from vlmserve.steps import BlockCopy, Bytes, DiskEntry, SchedulerOutput


class PoolSizes(NamedTuple):
    block_size: int
    pages: int
    """Pages on the device (see `CacheLayout`), without padding pages."""
    host_pages: int = 0
    slots: int = 0
    """State slots, without the padding slot."""
    host_slots: int = 0
    draft_places: int = 0
    """Requests that may have drafts at once, if layers have states."""


class Contents:
    """Copies KV blocks or state slots to the host, to store them."""

    def __init__(self, layers: Sequence[Blocks]) -> None:
        self._tensors = [tensor for layer in layers for tensor in layer.tensors]
        self.num_bytes = sum(tensor[:1].nbytes for tensor in self._tensors)
        """Of a block or slot."""

    def of(self, ids: Sequence[int]) -> Bytes:
        """Copy to the host, ``[ids, bytes]``, layer by layer. The device gathers `STAGED_BYTES` at a time."""
        at_once = max(1, STAGED_BYTES // self.num_bytes)
        parts = [self._gathered(ids[i : i + at_once]) for i in range(0, len(ids), at_once)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _gathered(self, ids: Sequence[int]) -> Bytes:
        rows = to_device(torch.tensor(ids), self._tensors[0].device)
        parts = [tensor.index_select(0, rows).reshape(len(ids), -1).view(torch.uint8) for tensor in self._tensors]
        return torch.cat(parts, 1).cpu().numpy()


class KVTensors:
    def __init__(self, model: LoadedModel, sizes: PoolSizes) -> None:
        self._device = model.device.torch_device
        total = sizes.pages + model.device.padding_blocks
        allocate, layout = model.language_model.allocate_cache, model.language_model.cache_layout
        self.layers: list[LayerCache] = allocate(total, sizes.block_size, self._device, layout)
        self._distinct = distinct(self.layers)
        self._host: HostBlocks | None = None
        self._host_states: HostBlocks | None = None

        def allocate_blocks(count: int, device: torch.device) -> list[LayerCache]:
            return distinct(allocate(count, sizes.block_size, device, layout))

        def allocate_slots(count: int, device: torch.device, draft_places: int = 0) -> list[StateCache]:
            return allocate_states(model.language_model.state_specs, count, model.dtype, device, draft_places)

        self.states = allocate_slots(1 + sizes.slots, self._device, sizes.draft_places)
        self.block_contents, self.state_contents = Contents(self._distinct), Contents(self.states)
        if sizes.host_pages:
            self._host = model.device.host_blocks(self._distinct, sizes.host_pages, allocate_blocks)
        if sizes.host_slots:
            self._host_states = model.device.host_blocks(self.states, sizes.host_slots, allocate_slots)

    def prepare(self, step: SchedulerOutput) -> None:
        """Zero blocks, copy blocks, copy states, in order."""
        if step.blocks_to_zero:
            _clear(self._distinct, step.blocks_to_zero)
        if step.block_copies:
            _copy(step.block_copies, self._distinct, self._host, step.block_contents)
        if step.state_copies:
            _copy(step.state_copies, self.states, self._host_states, step.state_contents)

    def populate(self, num_bytes: int) -> None:
        """Back the first `num_bytes` of blocks, which requests get first, with memory."""
        for layer in self._distinct:
            for tensor in layer.tensors:
                populate(tensor, num_bytes // self.block_contents.num_bytes)


def _copy(
    copies: Iterable[BlockCopy], layers: Sequence[Blocks], host: HostBlocks | None, entries: Sequence[DiskEntry] = ()
) -> None:
    for kind, by_target in _groups(copies):
        sources, targets = list(by_target.values()), list(by_target)
        if kind == "copy":
            for tensor in (tensor for layer in layers for tensor in layer.tensors):
                _copy_within(tensor, sources, targets)
            continue
        if kind == "fill":
            _fill(layers, targets, [entries[source].content for source in sources])
            continue
        assert host is not None
        if kind == "save":
            host.save(sources, targets)
        else:
            host.load(sources, targets)


def _groups(copies: Iterable[BlockCopy]) -> Iterator[tuple[str, dict[int, int]]]:
    """Group consecutive copies that can read all sources before they write. Returns sources by target.

    The last copy into a block wins.
    """
    for kind, group in itertools.groupby(copies, lambda copy: copy.kind):
        by_target: dict[int, int] = {}
        for copy in group:
            if kind == "copy" and copy.source in by_target:
                yield kind, by_target
                by_target = {}
            by_target[copy.target] = copy.source
        yield kind, by_target


def _clear(layers: Sequence[LayerCache], blocks: Sequence[int]) -> None:
    def at_once() -> None:
        ids = to_device(torch.tensor(blocks), layers[0].keys.device)
        for layer in layers:
            clear_blocks(layer, ids)

    def one_by_one() -> None:
        for tensor in (tensor for layer in layers for tensor in layer.tensors):
            for block in blocks:
                tensor[block].zero_()

    with_less_memory(at_once, one_by_one)


def _copy_within(tensor: Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy blocks of one tensor. After it is written, a repetition would read the new contents of sources."""

    def at_once() -> None:
        rows = tensor.index_select(0, to_device(torch.tensor(sources), tensor.device))
        tensor.index_copy_(0, to_device(torch.tensor(targets), tensor.device), rows)

    def one_by_one() -> None:
        for source, target in zip(sources, targets, strict=True):
            tensor[target].copy_(tensor[source])

    with_less_memory(at_once, one_by_one)


def _fill(layers: Sequence[Blocks], blocks: Sequence[int], contents: Sequence[Bytes]) -> None:
    tensors = [tensor.view(len(tensor), -1).view(torch.uint8) for layer in layers for tensor in layer.tensors]
    ends = [*itertools.accumulate(tensor.shape[1] for tensor in tensors)]
    spans = [(flat, slice(end - flat.shape[1], end)) for flat, end in zip(tensors, ends, strict=True)]
    if tensors[0].device.type == "cpu":
        arrays = [(flat.numpy(), span) for flat, span in spans]
        for block, content in zip(blocks, contents, strict=True):
            for array, span in arrays:
                array[block] = content[span]
        return
    order = sorted(range(len(blocks)), key=blocks.__getitem__)
    places = [blocks[number] for number in order]
    rows = torch.from_numpy(np.stack([contents[number] for number in order]))
    for flat, span in spans:
        with_less_memory(
            partial(_write, flat, places, rows[:, span], through_device=True),
            partial(_write, flat, places, rows[:, span], through_device=False),
        )


def _write(flat: Tensor, places: Sequence[int], part: Tensor, *, through_device: bool) -> None:
    """through_device: the host does not wait."""
    part = to_device(part, flat.device) if through_device else part.contiguous()
    for first, last in runs(places):
        flat[places[first] : places[first] + last - first].copy_(part[first:last])
