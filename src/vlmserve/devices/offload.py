"""KV blocks and state slots in host memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vlmserve.devices.out_of_memory import with_less_memory
from vlmserve.devices.streams import CopyEvent, CopyStream
from vlmserve.kernels.blocks import Blocks, copy_blocks
from vlmserve.kernels.transfers import to_device

ALIGNMENT = 16
STAGED_BYTES = 2**25
"""Bytes of blocks gathered on the device before a copy; there are two such buffers."""


class HostBlocks(Protocol):
    """A call names each block at most once."""

    def save(self, sources: Sequence[int], targets: Sequence[int]) -> None: ...

    def load(self, sources: Sequence[int], targets: Sequence[int]) -> None: ...


class PlainBlocks:
    def __init__(self, layers: Sequence[Blocks], host: Sequence[Blocks]) -> None:
        self._layers, self._host = layers, host

    def save(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for source, target in zip(self._layers, self._host, strict=True):
            copy_blocks(source, target, torch.tensor(sources), torch.tensor(targets))

    def load(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for source, target in zip(self._host, self._layers, strict=True):
            copy_blocks(source, target, torch.tensor(sources), torch.tensor(targets))


@dataclass(slots=True)
class _Staged:
    """computed, copied: events after its last uses."""

    memory: Tensor
    computed: CopyEvent | None = None
    copied: CopyEvent | None = None


class PinnedBlocks:
    """Copies while the device computes. A host block holds all layers.

    Saving gathers blocks on the device, which may then be overwritten, and copies them; loading copies and scatters.
    One stream orders all copies, so none reads a host block that is being written.
    """

    def __init__(self, layers: Sequence[Blocks], memory: Tensor, stream: CopyStream) -> None:
        """memory: pinned, uint8 ``[blocks, block_bytes]``."""
        self._parts = [_in_words(tensor) for layer in layers for tensor in layer.tensors]
        self._starts = _starts(layers)
        self._memory, self._stream = memory, stream
        self._at_once = max(1, STAGED_BYTES // self._starts[-1])
        # a later copy must not fail: the scheduler counts on its content
        self._staged = [_Staged(stream.empty((self._at_once, self._starts[-1]), torch.uint8)) for _ in range(2)]

    def save(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        stream = self._stream
        for blocks, places in self._batches(sources, targets):
            staged = self._next()
            if staged.copied is not None:
                stream.let_compute_wait(staged.copied)
            self._gather(blocks, staged)
            staged.computed = stream.record_computed()
            stream.wait(staged.computed)
            for first, last in runs(places):
                self._stream.copy(self._memory[places[first] : places[first] + last - first], staged.memory[first:last])
            staged.copied = stream.record()

    def load(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        stream = self._stream
        for places, blocks in self._batches(sources, targets):
            staged = self._next()
            if staged.computed is not None:
                stream.wait(staged.computed)
            for first, last in runs(places):
                stream.copy(staged.memory[first:last], self._memory[places[first] : places[first] + last - first])
            staged.copied = stream.record()
            stream.let_compute_wait(staged.copied)
            self._scatter(staged, blocks)
            staged.computed = stream.record_computed()

    def _batches(self, one: Sequence[int], other: Sequence[int]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        for start in range(0, len(one), self._at_once):
            yield one[start : start + self._at_once], other[start : start + self._at_once]

    def _next(self) -> _Staged:
        self._staged.reverse()
        return self._staged[-1]

    def _gather(self, blocks: Sequence[int], staged: _Staged) -> None:
        def at_once() -> None:
            ids = self._on_device(blocks)
            for part, into in self._slices(staged, len(blocks)):
                into.copy_(part.index_select(0, ids))

        def one_by_one() -> None:
            for part, into in self._slices(staged, len(blocks)):
                for row, block in zip(into, blocks, strict=True):
                    row.copy_(part[block])

        with_less_memory(at_once, one_by_one)

    def _scatter(self, staged: _Staged, blocks: Sequence[int]) -> None:
        def at_once() -> None:
            ids = self._on_device(blocks)
            for part, rows in self._slices(staged, len(blocks)):
                part.index_copy_(0, ids, rows)

        def one_by_one() -> None:
            for part, rows in self._slices(staged, len(blocks)):
                for row, block in zip(rows, blocks, strict=True):
                    part[block].copy_(row)

        with_less_memory(at_once, one_by_one)

    def _on_device(self, blocks: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(blocks), self._parts[0].device)

    def _slices(self, staged: _Staged, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Cache tensors, ``[blocks, words]``, with staging memory."""
        for part, start in zip(self._parts, self._starts, strict=False):
            num_bytes = part.shape[1] * part.element_size()
            yield part, staged.memory[:count, start : start + num_bytes].view(part.dtype)


def staged_bytes(block: int) -> int:
    return 2 * max(1, STAGED_BYTES // block) * block


def block_bytes(layers: Sequence[Blocks]) -> int:
    return _starts(layers)[-1]


def _starts(layers: Sequence[Blocks]) -> list[int]:
    """Offsets of tensors, and the block's size."""
    sizes = (tensor[:1].nbytes for layer in layers for tensor in layer.tensors)
    return list(itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))


def _in_words(tensor: Tensor) -> Tensor:
    """``[blocks, words]`` of the widest integers that divide a block."""
    flat = tensor.view(len(tensor), -1).view(torch.uint8)
    kinds = (torch.int64, torch.int32, torch.int16, torch.uint8)
    return flat.view(next(kind for kind in kinds if flat.shape[1] % kind.itemsize == 0))


def runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of indices with consecutive places."""
    first = 0
    for index in range(1, len(places) + 1):
        if index == len(places) or places[index] != places[index - 1] + 1:
            yield first, index
            first = index
