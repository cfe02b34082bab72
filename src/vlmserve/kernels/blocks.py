"""Allocates, clears and copies caches. The first axis is blocks or state slots."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from vlmserve.kernels.attention import LayerCache
from vlmserve.kernels.states import StateCache
from vlmserve.kernels.transfers import to_device
from vlmserve.layer_specs import MAX_STATE_DRAFTS, AttentionSpec, CacheLayout, StateSpec
from vlmserve.memory import huge_pages, small_pages

_POPULATE_WRITE = 23
"""Linux's MADV_POPULATE_WRITE, which Python does not define."""


class Blocks(Protocol):
    @property
    def tensors(self) -> Sequence[Tensor]: ...


def allocate_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Unwritten pages of `huge_pages` take no memory, but an allocator may reuse memory."""
    return _zeros(huge_pages, shape, dtype, device)


def allocate_blocks(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros that steps write block by block, in small pages on a CPU.

    Each layer has tensors of its own. A step that writes a new block would otherwise wait for a huge page in each
    tensor: hundreds of megabytes to clear, which took more than a second in virtual machines.
    """
    return _zeros(small_pages, shape, dtype, device)


def _zeros(
    allocate: Callable[[int], mmap.mmap], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = allocate(math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape)).view(shape)


def populate(tensor: Tensor, count: int) -> None:
    """Otherwise the first write to each page faults. Needs Linux 5.14; does nothing elsewhere."""
    if sys.platform == "linux" and tensor.device.type == "cpu":
        start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        end = tensor.data_ptr() + tensor[:count].nbytes
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _POPULATE_WRITE)


def allocate_layers(
    layers: Sequence[AttentionSpec], allocate: Callable[[AttentionSpec], LayerCache], layout: CacheLayout | None = None
) -> list[LayerCache]:
    """layout: which layers share tensors. None: no sharing, one column."""
    if layout is None:
        caches: list[LayerCache] = []
        for layer in layers:
            caches.append(allocate(layer) if layer.shares_with is None else caches[layer.shares_with])
        return caches
    slots: dict[int, LayerCache] = {}
    for layer, place in zip(layers, layout.places, strict=True):
        if layer.shares_with is None and place.slot not in slots:
            slots[place.slot] = allocate(layer)
    return [replace(slots[place.slot], column=place.column) for place in layout.places]


def allocate_states(
    layers: Sequence[StateSpec], num_slots: int, dtype: torch.dtype, device: torch.device, draft_places: int = 0
) -> list[StateCache]:
    """draft_places: requests that may have drafts at once."""
    caches = []
    for layer in layers:
        tensors = {
            name: allocate_zeros((num_slots, *shape), torch.float32 if is_float32 else dtype, device)
            for name, shape, is_float32 in layer.tensors
        }
        if draft_places:
            shape = draft_places * MAX_STATE_DRAFTS, layer.draft_width
            tensors["drafts"] = allocate_zeros(shape, dtype, device)
        caches.append(StateCache(**tensors))
    return caches


def distinct(layers: Iterable[LayerCache]) -> list[LayerCache]:
    """One layer of each group that shares tensors."""
    return list({id(layer.keys): layer for layer in layers}.values())


def clear_blocks(cache: LayerCache, blocks: Tensor) -> None:
    for tensor in cache.tensors:
        tensor.index_fill_(0, blocks, 0)


def copy_blocks(source: Blocks, target: Blocks, source_blocks: Tensor, target_blocks: Tensor) -> None:
    """Caches have one geometry, possibly on different devices.

    source_blocks, target_blocks: int64 ids on the CPU. All sources are read before any target is written.
    """
    for origin, destination in zip(source.tensors, target.tensors, strict=True):
        blocks = origin.index_select(0, to_device(source_blocks, origin.device)).to(destination.device)
        destination.index_copy_(0, to_device(target_blocks, destination.device), blocks)
