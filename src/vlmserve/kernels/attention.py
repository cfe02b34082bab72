"""The interface of attention backends and the metadata of one flat batch.

A step packs the tokens of many sequences into one batch. Sequence `s` owns the query rows
``query_starts[s] <= row < query_starts[s + 1]``, which are its newest tokens: the last query row sits at position
``context_lens[s] - 1``. Its keys and values live in the blocks ``block_tables[column, s]``, ``block_size`` tokens each,
and token ``t`` is in slot ``block_tables[column, s, t // block_size] * block_size + t % block_size``.
"""

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
    """Query rows ``first <= row < last`` of a batch, all of one sequence, attend to its positions before `reach`, which
    are more than those up to their own; a window bounds only how far back they attend. All of these positions are in
    the cache or in this batch."""

    sequence: int
    first: int
    last: int
    reach: int


class CrossRows(NamedTuple):
    """Rows ``first <= row < last`` of a batch attend to these keys and values of all layers, ``[layers, 2, kv_heads,
    states, head_size]``, by cross-attention; where layers make their own, to what they make them of, ``[states,
    cross_size]``."""

    first: int
    last: int
    states: Tensor


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """The sequence and cache slot of each token of a flat batch. Sequences with one new token (decodes) come first.
    Tensors lie on the model's device."""

    query_starts: Tensor
    """int32 ``[sequences + 1]``."""
    context_lens: Tensor
    """int32 ``[sequences]``, tokens in the cache after this step."""
    block_tables: Tensor
    """int32 ``[columns, sequences, max_blocks]``, rows padded with 0. See `CacheLayout` for columns."""
    slot_mapping: Tensor
    """int64 ``[columns, tokens]``."""
    query_lens: list[int]
    host_context_lens: list[int]
    """`context_lens`, readable without synchronizing with the device."""
    num_decodes: int
    """Leading sequences with one query row."""
    bidirectional: Sequence[BidirectionalRows] = ()
    """Rows that attend to later ones, in order."""
    num_positions: int = 0
    """Highest position plus 1, where positions do not count tokens."""
    cross: Sequence[CrossRows] = ()
    decodes: Tensor | None = None
    """int32 ``[1]``, `num_decodes` of a step with chunks that the device may have captured."""
    wanted: Sequence[int] | None = None
    """The sequences whose last row alone is wanted; no row of others is. None: the wanted rows are others."""
    states: StateRows | None = None
    """Rows by the states that they read and write. None: no layer has states."""

    def of_last_rows(self, rows: Tensor) -> BatchMetadata:
        """The last rows of the `wanted` sequences as a step of their own. rows: int64, these in this step."""
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
        """One column, from the positions ``start <= i < end`` of each sequence's new tokens, decodes first, and its
        block ids."""
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
    """Write the position ``[tokens]`` of each new token and its cache slots ``[columns, tokens]``.

    counts: new tokens of each sequence. tables: ``[columns, sequences, max_blocks]``.
    """
    new = np.array(counts)  # numpy's functions take longer over lists
    owner = np.arange(len(new)).repeat(new)
    np.subtract(np.arange(len(owner)), (new.cumsum() - context_lens)[owner], out=positions)
    np.multiply(tables[:, owner, positions // block_size], block_size, out=slots, dtype=np.int64)
    slots += positions % block_size


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LayerCache:
    """Keys and values of one layer. The order of the axes belongs to the backend that allocated them, but blocks come
    first.

    scales: float32, one for each token and head of keys and of values, which are ``scale * stored``. The stored ones
    are int8, or float8 e4m3 in a tensor of uint8. None: keys and values have the type of queries.
    """

    keys: Tensor
    values: Tensor
    block_size: int
    scales: Tensor | None = None
    column: int = 0
    """Block tables of this column list its blocks. Layers of several columns share tensors, see `CacheLayout`."""

    @property
    def stored(self) -> CacheType:
        """How keys and values are stored."""
        if self.scales is None:
            return "auto"
        return "fp8" if self.keys.dtype == torch.uint8 else "int8"

    @property
    def tensors(self) -> list[Tensor]:
        """All that blocks consist of."""
        return [self.keys, self.values] if self.scales is None else [self.keys, self.values, self.scales]


class AttentionContext(NamedTuple):
    """All that attention of one layer reads in one step besides the rows of tokens."""

    cache: LayerCache
    spec: AttentionSpec
    metadata: BatchMetadata
    plan: object
    """Result of `AttentionBackend.prepare`."""


class RotaryRows(NamedTuple):
    """How queries and keys are rotated (RoPE).

    cos, sin: float32 ``[rows, size / 2]``. positions: int64 ``[tokens]``, the row of each token; None: its own number.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor | None


class HeadNorms(NamedTuple):
    """RMSNorms over each head of queries and of keys, before they are rotated. query, key: their weights,
    ``[head_size]``."""

    query: Tensor
    key: Tensor
    eps: float


class AttentionBackend(Protocol):
    """Paged attention over a flat batch, causal but for bidirectional rows."""

    name: str
    reads_on_device: bool
    """Kernels read lengths on the device, so a step may be captured and repeated at other lengths."""

    def allocate(
        self, num_blocks: int, block_size: int, spec: AttentionSpec, dtype: torch.dtype, device: torch.device
    ) -> LayerCache:
        """A zeroed cache of one layer. dtype: of queries, and of keys and values as they come."""
        ...

    def block_bytes(self, block_size: int, spec: AttentionSpec, dtype: torch.dtype) -> int:
        """What a block of one layer takes, keys and values together."""
        ...

    def prepare(
        self, metadata: BatchMetadata, block_size: int, layers: Sequence[AttentionSpec], dtype: torch.dtype
    ) -> object:
        """What all layers of one step share (masks, gather indices), computed once; passed to `attend`.

        layers: how the layers attend that will call `attend`; equal ones count once. dtype: of queries.
        """
        ...

    def attend(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        context: AttentionContext,
    ) -> Tensor:
        """Write `key` and `value` (``[tokens, kv_heads, head_size]``) into their slots, then attend.

        key, value: None for layers that share other layers' (`AttentionSpec.shares_with`), which were written.
        query: ``[tokens, heads, head_size]``. Returns ``[tokens, heads * head_size]`` of the query's dtype.
        """
        ...


@runtime_checkable
class RotatingBackend(AttentionBackend, Protocol):
    """A backend that rotates queries and keys by their positions on the way."""

    def attend_rotated(
        self,
        qkv: Tensor,
        rope: RotaryRows | None,
        context: AttentionContext,
    ) -> Tensor:
        """As `attend`, from rows ``[tokens, (heads + 2 * kv_heads) * head_size]`` of queries, keys and values whose
        queries and keys are still to be rotated. Rows of layers that share keys and values have queries alone.

        Element ``i`` of a head pairs with ``i + size / 2`` of those that are rotated; what follows them stays as it
        is.
        rope: None: nothing is rotated.
        """
        ...


@runtime_checkable
class NormingBackend(RotatingBackend, Protocol):
    """A backend that also norms the heads of queries and keys on the way."""

    def attend_normed(
        self,
        qkv: Tensor,
        norms: HeadNorms,
        rope: RotaryRows | None,
        context: AttentionContext,
    ) -> Tensor:
        """As `attend_rotated`, from rows whose queries and keys are still to be normed. rope: None: nothing is
        rotated."""
        ...
