"""The attention backend of NVIDIA's GPUs: one to three launches a layer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from vlmserve.kernels.attention import AttentionContext, BatchMetadata, HeadNorms, RotaryRows
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.kernels.transfers import to_device
from vlmserve.kernels.triton.attention_kernels import (
    CHUNK_SPLIT,
    CHUNK_SPLITS,
    FEW_QUERIES,
    ITEM,
    JOIN,
    attend_rows,
    combine,
    divide_decodes,
)
from vlmserve.kernels.triton.fresh_prompts import are_fresh, attend_fresh
from vlmserve.kernels.triton.host_math import cdiv, next_power_of_2
from vlmserve.kernels.triton.rope import rotate_into_cache
from vlmserve.kernels.triton.shared_memory import multiprocessors
from vlmserve.kernels.triton.unpacking import has_assembly
from vlmserve.layer_specs import AttentionSpec, CacheType

MAX_HEAD_SIZE = 512
STAGES = 5
"""Of the pipeline, which has some for loads of block tables. With fewer, no keys are on their way while others are
multiplied."""
PART = 128
"""Minimum tokens of a split of a decode's context."""
PROGRAMS_EACH = 2
"""Programs per multiprocessor that the work of a step is divided among. More programs share the work more evenly, but
each one costs time."""
UNEVEN_ROUNDS = (3, 5)
"""Decodes times KV heads per multiprocessor, between which programs take one round and a small rest on an H200. Two
splits of each decode are faster there: the measured times are in `benchmarks/results`."""
MOST_EXTRA = 128
"""Maximum number of splits of one context."""
LEAST_ITEMS = 1024
"""Items to allocate memory for: with more memory in use, captured steps would have to be captured again."""
MOST_SPLIT_CHUNKS = 4
"""Chunks of a batch whose contexts are split. More of them have programs enough, and would take much memory."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unsupported_reason(layers: Sequence[AttentionSpec], dtype: torch.dtype) -> str | None:
    """Why the kernels cannot serve these layers, None if they can."""
    if dtype not in DTYPES:
        return f"the kernels know no {dtype}"
    for spec in layers:
        if spec.head_size > MAX_HEAD_SIZE:
            return f"a head of {spec.head_size} elements is larger than {MAX_HEAD_SIZE}"
        if spec.head_size % 2:
            return f"a head of {spec.head_size} elements is odd"
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} heads of keys evenly"
    return None


class AttentionTile(NamedTuple):
    """Rows of queries and keys that a program of so many warps multiplies at a time."""

    rows: int
    keys: int
    warps: int


def tile(spec: AttentionSpec, *, chunks: bool, quantized: bool = False) -> AttentionTile:
    """chunks: whether the batch has any. quantized: whether keys and values are stored in 8 bits.

    As much as fits into registers on all GPUs that the kernels are compiled for. On an H100, decodes by fewer keys or
    warps take as long, within 1%. Two warps take 28% fewer instructions for each key than four, of which keys of 8 bits
    leave less time for.
    """
    if spec.head_size > 256:
        return AttentionTile(max(16, next_power_of_2(spec.num_heads // spec.num_kv_heads)), 16, 4)
    wide = spec.head_size > 128
    rows = max(16, next_power_of_2(spec.num_heads // spec.num_kv_heads), 0 if not chunks else 32 if wide else 64)
    if rows > 16 or wide:
        return AttentionTile(rows, 32, 4)
    return AttentionTile(rows, 64, 2 if quantized else 4)


class Work(NamedTuple):
    """The result of `divide_decodes`."""

    items: Tensor
    """int32 ``[decodes + extra splits, ITEM]``"""
    joins: Tensor
    """int32 ``[most contexts that are split, JOIN]``"""


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """Data that the layers of a step share."""

    work: Mapping[int, Work]
    """By window, or 0: how contexts of decodes are split; empty for batches without decodes."""
    split_chunks: bool
    """The kernel splits contexts of chunks."""
    sums: Tensor
    """Memory for splits, see `attend_rows`; so is `largest`."""
    largest: Tensor
    reach: Tensor | None
    """int32 ``[tokens]``, the end of the positions that each row sees; None: its own is the last one."""
    capture_key: Hashable
    """Identifies a captured step, together with addresses and shapes of tensors; None: the step cannot be captured."""


class TritonAttention(TorchReference):
    """Attention over a flat batch of decodes and prompt chunks. A `NormingBackend` whose cache is the reference's.

    Lengths are read on the device, so that a step can be captured once and replayed at other lengths.

    writes: whether programs of decodes write keys and values themselves; a class's, for measuring. by_library: whether
    torch's operator computes long prompts without cached tokens; it was not measured on a GPU yet.
    """

    name = "triton"
    reads_on_device = True
    writes: ClassVar[bool] = True
    by_library: ClassVar[bool] = False

    def __init__(self, *, cache_type: CacheType = "auto") -> None:
        super().__init__(cache_type=cache_type)
        self.decode_tile: AttentionTile | None = None
        """Of batches of decodes alone, instead of `tile`'s: for measuring which is the fastest."""
        self._sums = self._largest = torch.empty(0)
        self._work: dict[int, Work] = {}
        self._sinks: dict[tuple[float, ...], Tensor] = {}

    def prepare(  # type: ignore[override]
        self, metadata: BatchMetadata, block_size: int, layers: Sequence[AttentionSpec], dtype: torch.dtype
    ) -> TritonPlan:
        """Split the contexts of decodes, allocate memory for splits, and note how far bidirectional rows see.

        Launches and grids of decodes alone depend on their number, and if these fill the GPU, on whether any context is
        split. So one graph serves all other lengths.
        """
        device, sequences = metadata.slot_mapping.device, len(metadata.query_lens)
        chunks = _has_chunks(metadata)
        reach = _reach(metadata) if chunks else None
        extra, sizes = self._division(metadata, layers)
        most_decodes = metadata.num_decodes if metadata.decodes is None else sequences
        num_items, num_joins = most_decodes + extra, min(most_decodes, extra)
        work: dict[int, Work] = {}
        for window, size in sizes.items():
            items, joins = work[window] = self._work_of(window, num_items, num_joins, device)
            divide_decodes[(1,)](
                metadata.context_lens,
                items,
                joins,
                metadata.num_decodes,
                size,
                num_items,
                num_joins,
                metadata.block_tables.stride(1),
                0 if chunks else metadata.block_tables.stride(0),
                DECODES=next_power_of_2(metadata.num_decodes),
                WINDOW=window,
                num_warps=1,
            )
        split_chunks = _splits_chunks(metadata)
        part_rows = _part_rows_of_chunks(metadata) * CHUNK_SPLITS.value if split_chunks else 0
        self._reserve(most_decodes + MOST_EXTRA + part_rows, layers, device)
        # Captured steps read the items of each new step, so these have to be where they were.
        places = tuple(tensor.data_ptr() for one in work.values() for tensor in one)
        capture_key: Hashable = ("decodes", most_decodes, extra, places)
        if chunks:
            kind = metadata.num_decodes if metadata.decodes is None else "mixed"
            capture_key = (kind, extra, split_chunks, sequences, metadata.block_tables.shape[2], places)
        return TritonPlan(
            work, split_chunks, self._sums, self._largest, reach, None if reach is not None else capture_key
        )

    def _division(self, metadata: BatchMetadata, layers: Sequence[AttentionSpec]) -> tuple[int, dict[int, int]]:
        """Return how many more splits than decodes there may be, 0 if no context is split, and the tokens of a split
        by window.

        A split has the tokens that all programs of the step read, divided by the programs that the GPU runs at a time.
        So contexts stay whole if there is enough other work. A batch of few decodes alone always counts as split, so
        that it has one graph.
        """
        decodes, contexts = metadata.num_decodes, metadata.host_context_lens
        if not decodes or not layers:
            return 0, {}
        spec = min(layers, key=lambda one: one.num_kv_heads)
        programs, alone = decodes * spec.num_kv_heads, not _has_chunks(metadata)
        count = multiprocessors(metadata.slot_mapping.device)
        extra = cdiv(PROGRAMS_EACH * count, spec.num_kv_heads)
        low, high = (rounds * count for rounds in UNEVEN_ROUNDS)
        if alone and low < programs < high:
            extra = 2 * decodes
        extra = min(MOST_EXTRA, extra)
        queries = tile(spec, chunks=True).rows // (spec.num_heads // spec.num_kv_heads)
        sizes, is_split = {}, alone and programs < high
        for window in {spec.window or 0 for spec in layers}:
            seen = [min(context, window) for context in contexts[:decodes]] if window else contexts[:decodes]
            total = sum(seen) + sum(
                cdiv(new, queries) * (min(context, window + queries) if window else context)
                for new, context in zip(metadata.query_lens[decodes:], contexts[decodes:], strict=True)
            )
            # Rounding up adds less than one split to each decode, so there are never more splits than items.
            sizes[window] = max(cdiv(cdiv(total, extra), PART), 1) * PART
            is_split = is_split or max(seen) > sizes[window]
        return extra if is_split else 0, sizes

    def _work_of(self, window: int, num_items: int, num_joins: int, device: torch.device) -> Work:
        """The same memory in each step, where captured steps read it."""
        kept = self._work.get(window)
        if kept is None or len(kept.items) < num_items or kept.items.device != device:
            shapes = (max(num_items, LEAST_ITEMS), ITEM.value), (MOST_EXTRA, JOIN.value)
            kept = self._work[window] = Work(*(torch.zeros(s, dtype=torch.int32, device=device) for s in shapes))
        return Work(kept.items[:num_items], kept.joins[:num_joins])

    def _reserve(self, parts: int, layers: Sequence[AttentionSpec], device: torch.device) -> None:
        """Allocate memory for splits. Captured steps keep the memory that they were captured with."""
        parts *= max((spec.num_heads for spec in layers), default=0)
        size = parts * max((_head_block(spec) for spec in layers), default=0)
        if size > self._sums.numel() or 2 * parts > self._largest.numel() or self._sums.device != device:
            self._sums = torch.empty(size, device=device)
            self._largest = torch.empty(parts * 2, device=device)

    def attend(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        context: AttentionContext,
    ) -> Tensor:
        qkv = torch.cat([part.flatten(1) for part in (query, key, value) if part is not None], 1)
        return self._attend(qkv, None, context)

    def attend_rotated(
        self,
        qkv: Tensor,
        rope: RotaryRows | None,
        context: AttentionContext,
    ) -> Tensor:
        return self._attend(qkv, rope, context)

    def attend_normed(
        self,
        qkv: Tensor,
        norms: HeadNorms,
        rope: RotaryRows | None,
        context: AttentionContext,
    ) -> Tensor:
        return self._attend(qkv, rope, context, norms)

    def _attend(
        self,
        qkv: Tensor,
        rope: RotaryRows | None,
        context: AttentionContext,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """rope, norms: None: nothing is rotated or normed."""
        cache, spec, metadata, plan = context
        assert isinstance(plan, TritonPlan)
        if cache.scales is None and cache.keys.dtype != qkv.dtype:
            raise ValueError(f"queries of {qkv.dtype} do not fit a cache of {cache.keys.dtype}")
        if qkv.stride(1) != 1:
            qkv = qkv.contiguous()
        slots, tables = metadata.slot_mapping[cache.column], metadata.block_tables[cache.column]
        chunks, work = _has_chunks(metadata), plan.work.get(spec.window or 0)
        writes = self.writes and not chunks and spec.shares_with is None
        query = qkv if writes else rotate_into_cache(qkv, rope, cache, spec, slots, norms)
        if self.by_library and are_fresh(metadata, spec, cache):
            return attend_fresh(query, cache, spec, metadata)
        cos, sin, positions = (query, query, None) if rope is None else rope
        output = torch.empty((len(qkv), spec.num_heads * spec.head_size), dtype=qkv.dtype, device=qkv.device)
        decodes, sequences = metadata.num_decodes, len(metadata.query_lens)
        num_items, num_joins = (0, 0) if work is None else (len(work.items), len(work.joins))
        tiles = tile(spec, chunks=chunks, quantized=cache.scales is not None)
        is_mixed = metadata.decodes is not None
        if not chunks:
            tiles = self.decode_tile or tiles
            grid = (spec.num_kv_heads, num_items)
        else:
            # As many blocks as there can be where a captured step has other decodes.
            known, queries = 0 if is_mixed else decodes, tiles.rows // (spec.num_heads // spec.num_kv_heads)
            blocks = (len(query) - known) // queries + sequences - known
            grid = (num_items + blocks * (CHUNK_SPLITS.value if plan.split_chunks else 1), spec.num_kv_heads)
        head_block, reach = _head_block(spec), None if spec.is_causal else plan.reach
        sinks = output if spec.sinks is None else self._sinks_on(spec.sinks, query.device)
        attend_rows[grid](
            query,
            cache.keys,
            cache.values,
            cache.keys if cache.scales is None else cache.scales,
            tables if chunks else metadata.block_tables,
            metadata.query_starts,
            metadata.context_lens,
            metadata.context_lens if reach is None else reach,
            sinks,
            output,
            plan.sums,
            plan.largest,
            metadata.query_starts if metadata.decodes is None else metadata.decodes,
            metadata.query_starts if work is None else work.items,
            cos,
            sin,
            slots if positions is None else positions,
            slots,
            query if norms is None else norms.query,
            query if norms is None else norms.key,
            decodes,
            sequences,
            num_items,
            metadata.block_tables.stride(1),
            0 if chunks else cache.column,
            query.stride(0),
            spec.scale,
            spec.soft_cap or 1.0,
            0.0 if norms is None else norms.eps,
            HEADS=spec.num_heads,
            KV_HEADS=spec.num_kv_heads,
            HEAD=spec.head_size,
            HEAD_BLOCK=head_block,
            BLOCK_SIZE=cache.block_size,
            ROWS=tiles.rows,
            KEYS=tiles.keys,
            WINDOW=spec.window or 0,
            CAPPED=spec.soft_cap is not None,
            SINKS=spec.sinks is not None,
            REACH=reach is not None,
            QUANTIZED="" if cache.scales is None else cache.stored,
            STAGES=STAGES if query.element_size() == 2 else 1,
            SPLIT_CHUNKS=plan.split_chunks,
            MIXED=is_mixed,
            ITEMS=work is not None,
            CHUNKS=chunks,
            WRITES=writes,
            ROTATED=0 if rope is None or not writes else 2 * cos.shape[1],
            HAS_POSITIONS=positions is not None and writes,
            HAS_NORMS=norms is not None and writes,
            ASSEMBLY=has_assembly(query.device),
            num_warps=tiles.warps,
        )
        part_rows = num_joins + (_part_rows_of_chunks(metadata) if plan.split_chunks else 0)
        if part_rows:
            combine[(part_rows, spec.num_heads)](
                plan.sums,
                plan.largest,
                metadata.query_starts,
                metadata.context_lens,
                sinks,
                output,
                metadata.query_starts if metadata.decodes is None else metadata.decodes,
                metadata.query_starts if work is None else work.joins,
                decodes,
                sequences,
                num_items,
                num_joins,
                HEADS=spec.num_heads,
                HEAD=spec.head_size,
                HEAD_BLOCK=head_block,
                WINDOW=spec.window or 0,
                SINKS=spec.sinks is not None,
                SPLIT_CHUNKS=plan.split_chunks,
                MIXED=is_mixed,
                JOINS=num_joins > 0,
                num_warps=2,
            )
        return output

    def _sinks_on(self, sinks: tuple[float, ...], device: torch.device) -> Tensor:
        if sinks not in self._sinks:
            self._sinks[sinks] = torch.tensor(sinks, dtype=torch.float32, device=device)
        return self._sinks[sinks]


def _head_block(spec: AttentionSpec) -> int:
    """Columns of a tile of heads: tensor cores multiply 16 at a time."""
    return max(16, next_power_of_2(spec.head_size))


def _has_chunks(metadata: BatchMetadata) -> bool:
    return metadata.decodes is not None or metadata.num_decodes < len(metadata.query_lens)


def _part_rows_of_chunks(metadata: BatchMetadata) -> int:
    """Rows of chunks whose splits are kept in memory; of a step that may be captured, as many as there can be."""
    if metadata.decodes is not None:
        return MOST_SPLIT_CHUNKS * int(FEW_QUERIES.value)
    return (len(metadata.query_lens) - metadata.num_decodes) * int(FEW_QUERIES.value)


def _splits_chunks(metadata: BatchMetadata) -> bool:
    """Whether the contexts of chunks are split: where some have few rows over a long context, and a batch has few."""
    sequences = range(metadata.num_decodes, len(metadata.query_lens))
    chunks = [index for index in sequences if metadata.query_lens[index]]  # some that pad a batch have no rows
    return len(chunks) <= MOST_SPLIT_CHUNKS and any(
        metadata.query_lens[index] <= FEW_QUERIES.value and metadata.host_context_lens[index] >= 2 * CHUNK_SPLIT.value
        for index in chunks
    )


def _reach(metadata: BatchMetadata) -> Tensor | None:
    if not metadata.bidirectional:
        return None
    device = metadata.slot_mapping.device
    reach = torch.zeros(metadata.slot_mapping.shape[1], dtype=torch.int32)
    for _, first, last, seen in metadata.bidirectional:
        reach[first:last] = seen
    return to_device(reach, device)
