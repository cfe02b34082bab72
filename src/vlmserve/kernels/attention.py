"""The interface of attention backends, and the metadata of one flat batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from vlmserve.kernels.states import StateRows
from vlmserve.kernels.transfers import to_device
from vlmserve.layer_specs import AttentionSpec, CacheType


class BidirectionalRows(NamedTuple):
    """Query rows ``first <= row < last`` attend to all positions of their sequence before `reach`.

    A window only limits how far back. The cache or this batch contains these positions.
    """

    sequence: int
    first: int
    last: int
    reach: int


class CrossRows(NamedTuple):
    """Rows ``first <= row < last`` attend to `states` by cross-attention.

    states: ``[layers, 2, kv_heads, states, head_size]``, or ``[states, cross_size]`` if layers project them.
    """

    first: int
    last: int
    states: Tensor


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """A flat batch of sequences, decodes (one new token) first.

    Sequence `s` owns query rows ``query_starts[s] <= row < query_starts[s + 1]``, its newest tokens. The last row has
    position ``context_lens[s] - 1``. Token ``t`` is in cache slot ``block_tables[column, s, t // block_size] *
    block_size + t % block_size``.
    """

    query_starts: Tensor
    """int32 ``[sequences + 1]``."""
    context_lens: Tensor
    """int32 ``[sequences]``: cached tokens after this step."""
    block_tables: Tensor
    """int32 ``[columns, sequences, max_blocks]``, padded with 0. `CacheLayout` explains columns."""
    slot_mapping: Tensor
    """int64 ``[columns, tokens]``."""
    query_lens: list[int]
    host_context_lens: list[int]
    """`context_lens` on the host, which needs no synchronization."""
    num_decodes: int
    """Leading sequences with one query row."""
    bidirectional: Sequence[BidirectionalRows] = ()
    """In order; these rows also attend to later rows."""
    num_positions: int = 0
    """Maximum position + 1, if positions do not count tokens."""
    cross: Sequence[CrossRows] = ()
    decodes: Tensor | None = None
    """int32 ``[1]``: `num_decodes` on the device, for captured steps with chunks."""
    wanted: Sequence[int] | None = None
    """Sequences with only their last row wanted. None: the wanted rows are different."""
    states: StateRows | None = None
    """Rows by the states that they read and write. None: no layer has states."""

    def of_last_rows(self, rows: Tensor) -> BatchMetadata:
        """The last rows of the `wanted` sequences. rows: int64 indices."""
        assert self.wanted is not None
        count, device = len(self.wanted), rows.device
        numbers = to_device(torch.tensor(self.wanted), device)
        return BatchMetadata(
            query_starts=torch.arange(count + 1, dtype=torch.int32, device=device),
            context_lens=self.context_lens[numbers],
            block_tables=self.block_tables[:, numbers],
            slot_mapping=self.slot_mapping[:, rows],
            query_lens=[1] * count,
            host_context_lens=[self.host_context_lens[number] for number in self.wanted],
            num_decodes=count,
            num_positions=self.num_positions,
        )

    @classmethod
    def of_chunks(
        cls,
        chunks: Sequence[tuple[int, int]],
        tables: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | None = None,
    ) -> BatchMetadata:
        """Build one column from new positions ``start <= i < end`` and block ids, decodes first."""
        counts, context_lens = [end - start for start, end in chunks], [end for _, end in chunks]
        padded = np.zeros((1, len(tables), max(map(len, tables))), np.int32)
        for row, table in zip(padded[0], tables, strict=True):
            row[: len(table)] = table
        positions, slots = np.empty(sum(counts), np.int64), np.empty((1, sum(counts)), np.int64)
        place_tokens(counts, context_lens, padded, block_size, positions, slots)
        return cls(
            query_starts=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device),
            context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
            block_tables=torch.from_numpy(padded).to(device),
            slot_mapping=torch.from_numpy(slots).to(device),
            query_lens=counts,
            host_context_lens=context_lens,
            num_decodes=next((row for row, count in enumerate(counts) if count > 1), len(counts)),
        )


def place_tokens(
    counts: Sequence[int],
    context_lens: Sequence[int],
    tables: np.ndarray,
    block_size: int,
    positions: np.ndarray,
    slots: np.ndarray,
) -> None:
    """Write positions ``[tokens]`` and cache slots ``[columns, tokens]``.

    counts: new tokens of each sequence. tables: ``[columns, sequences, max_blocks]``.
    """
    new = np.array(counts)  # faster than passing a list to numpy
    owner = np.arange(len(new)).repeat(new)
    np.subtract(np.arange(len(owner)), (new.cumsum() - context_lens)[owner], out=positions)
    np.multiply(tables[:, owner, positions // block_size], block_size, out=slots, dtype=np.int64)
    slots += positions % block_size


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LayerCache:
    """Blocks are the first axis."""

    keys: Tensor
    values: Tensor
    block_size: int
    scales: Tensor | None = None
    """float32 scale of each token and head. Keys and values are ``scale * stored``, with `stored` int8 or float8
    e4m3 (as uint8). None: they have the queries' dtype."""
    column: int = 0
    """The column of block tables that lists its blocks. Layers of several columns share tensors, see `CacheLayout`."""

    @property
    def stored(self) -> CacheType:
        if self.scales is None:
            return "auto"
        return "fp8" if self.keys.dtype == torch.uint8 else "int8"

    @property
    def tensors(self) -> list[Tensor]:
        return [self.keys, self.values] if self.scales is None else [self.keys, self.values, self.scales]


class AttentionContext(NamedTuple):
    cache: LayerCache
    spec: AttentionSpec
    metadata: BatchMetadata
    plan: object
    """Result of `AttentionBackend.prepare`."""


class RotaryRows(NamedTuple):
    cos: Tensor
    """float32 ``[rows, size / 2]``."""
    sin: Tensor
    positions: Tensor | None
    """int64 ``[tokens]``: the row of each token. None: token i uses row i."""


class HeadNorms(NamedTuple):
    """RMSNorms before RoPE. query, key: weights ``[head_size]``."""

    query: Tensor
    key: Tensor
    eps: float


class AttentionBackend(Protocol):
    """Paged attention, causal except for bidirectional rows."""

    name: str
    reads_on_device: bool
    """Kernels read lengths on the device, so a captured step works for other lengths."""

    def allocate(
        self, num_blocks: int, block_size: int, spec: AttentionSpec, dtype: torch.dtype, device: torch.device
    ) -> LayerCache: ...

    def block_bytes(self, block_size: int, spec: AttentionSpec, dtype: torch.dtype) -> int: ...

    def prepare(
        self, metadata: BatchMetadata, block_size: int, layers: Sequence[AttentionSpec], dtype: torch.dtype
    ) -> object:
        """Compute what all layers of a step share (masks, gather indices). Equal layers count once."""
        ...

    def attend(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        context: AttentionContext,
    ) -> Tensor:
        """Write `key` and `value` (``[tokens, kv_heads, head_size]``) into their slots, then attend.

        query: ``[tokens, heads, head_size]``. key, value: None for layers that share another layer's
        (`AttentionSpec.shares_with`). Returns ``[tokens, heads * head_size]`` of the query's dtype.
        """
        ...


@runtime_checkable
class RotatingBackend(AttentionBackend, Protocol):
    def attend_rotated(
        self,
        qkv: Tensor,
        rope: RotaryRows | None,
        context: AttentionContext,
    ) -> Tensor:
        """Like `attend`, for rows ``[tokens, (heads + 2 * kv_heads) * head_size]`` before RoPE.

        Layers that share keys and values have only queries. Element ``i`` of a head pairs with ``i + size / 2``;
        elements from `size` on are not rotated.
        """
        ...


@runtime_checkable
class NormingBackend(RotatingBackend, Protocol):
    def attend_normed(
        self,
        qkv: Tensor,
        norms: HeadNorms,
        rope: RotaryRows | None,
        context: AttentionContext,
    ) -> Tensor:
        """Like `attend_rotated`, for rows before the norms."""
        ...
