"""The attention backend for NVIDIA GPUs: one to three launches per layer."""

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
"""Pipeline stages. Some hold loads of block tables; with fewer stages, no keys load during matmuls."""
PART = 128
"""Minimum tokens of a split of a decode's context."""
PROGRAMS_EACH = 2
"""Target number of programs per multiprocessor. More programs balance better, but each costs time."""
UNEVEN_ROUNDS = (3, 5)
"""Range of decodes times KV heads per multiprocessor in which programs take one round and a small rest. Two splits per
decode are faster there on an H200, see `benchmarks/results`."""
MOST_EXTRA = 128
"""Maximum number of splits of one context."""
LEAST_ITEMS = 1024
"""Minimum allocation, because reallocation invalidates captured steps."""
MOST_SPLIT_CHUNKS = 4
"""Maximum number of chunks with split contexts. More chunks have enough programs, and would need much memory."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unsupported_reason(layers: Sequence[AttentionSpec], dtype: torch.dtype) -> str | None:
    if dtype not in DTYPES:
        return f"the kernels do not support {dtype}"
    for spec in layers:
        if spec.head_size > MAX_HEAD_SIZE:
            return f"a head of {spec.head_size} elements is larger than {MAX_HEAD_SIZE}"
        if spec.head_size % 2:
            return f"a head of {spec.head_size} elements is odd"
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} heads of keys evenly"
    return None


class AttentionTile(NamedTuple):
    rows: int
    keys: int
    warps: int


def tile(spec: AttentionSpec, *, chunks: bool, quantized: bool = False) -> AttentionTile:
    """The largest tile that fits into registers on all supported GPUs.

    On an H100, smaller decode tiles take equally long, within 1%. Two warps need 28% fewer instructions per key than
    four, which matters for 8-bit keys.
    """
    if spec.head_size > 256:
        return AttentionTile(max(16, next_power_of_2(spec.num_heads // spec.num_kv_heads)), 16, 4)
    wide = spec.head_size > 128
    rows = max(16, next_power_of_2(spec.num_heads // spec.num_kv_heads), 0 if not chunks else 32 if wide else 64)
    if rows > 16 or wide:
        return AttentionTile(rows, 32, 4)
    return AttentionTile(rows, 64, 2 if quantized else 4)


class Work(NamedTuple):
    items: Tensor
    """int32 ``[decodes + extra splits, ITEM]``."""
    joins: Tensor
    """int32 ``[maximum split contexts, JOIN]``."""


@dataclass(frozen=True, slots=True)
class TritonPlan:
    work: Mapping[int, Work]
    """Splits of decodes by window (0: none). Empty without decodes."""
    split_chunks: bool
    sums: Tensor
    """Buffers for splits, see `attend_rows`."""
    largest: Tensor
    reach: Tensor | None
    """int32 ``[tokens]``: end of the positions that each row sees. None: its own position is the last."""
    capture_key: Hashable
    """With addresses and shapes of tensors, identifies a captured step. None: cannot be captured."""


class TritonAttention(TorchReference):
    """Kernels read lengths on the device, so captured steps can be replayed. Cache: see `TorchReference`.

    Class attributes for measurements: writes: decode programs write keys and values. by_library: torch's operator
    computes long prompts without cached tokens (not yet measured on a GPU).
    """

    name = "triton"
    reads_on_device = True
    writes: ClassVar[bool] = True
    by_library: ClassVar[bool] = False

    def __init__(self, *, cache_type: CacheType = "auto") -> None:
        super().__init__(cache_type=cache_type)
        self.decode_tile: AttentionTile | None = None
        """Replaces `tile` for batches of decodes, for measurements."""
        self._sums = self._largest = torch.empty(0)
        self._work: dict[int, Work] = {}
        self._sinks: dict[tuple[float, ...], Tensor] = {}

    def prepare(  # type: ignore[override]
        self, metadata: BatchMetadata, block_size: int, layers: Sequence[AttentionSpec], dtype: torch.dtype
    ) -> TritonPlan:
        """Split decode contexts, allocate buffers, and record the reach of bidirectional rows.

        One graph serves all lengths: launches depend on the number of decodes and, if they fill the GPU, on splits.
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
        # captured steps read new items at the same addresses
        places = tuple(tensor.data_ptr() for one in work.values() for tensor in one)
        capture_key: Hashable = ("decodes", most_decodes, extra, places)
        if chunks:
            kind = metadata.num_decodes if metadata.decodes is None else "mixed"
            capture_key = (kind, extra, split_chunks, sequences, metadata.block_tables.shape[2], places)
        return TritonPlan(
            work, split_chunks, self._sums, self._largest, reach, None if reach is not None else capture_key
        )

    def _division(self, metadata: BatchMetadata, layers: Sequence[AttentionSpec]) -> tuple[int, dict[int, int]]:
        """Return the maximum number of extra splits (0: none), and the tokens per split by window.

        The step's tokens are divided by the programs that run at a time, so contexts stay whole if other work fills the
        GPU. A small batch of only decodes always counts as split, so that it has one graph.
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
            # less than one split more per decode, so the items suffice
            sizes[window] = max(cdiv(cdiv(total, extra), PART), 1) * PART
            is_split = is_split or max(seen) > sizes[window]
        return extra if is_split else 0, sizes

    def _work_of(self, window: int, num_items: int, num_joins: int, device: torch.device) -> Work:
        kept = self._work.get(window)
        if kept is None or len(kept.items) < num_items or kept.items.device != device:
            shapes = (max(num_items, LEAST_ITEMS), ITEM.value), (MOST_EXTRA, JOIN.value)
            kept = self._work[window] = Work(*(torch.zeros(s, dtype=torch.int32, device=device) for s in shapes))
        return Work(kept.items[:num_items], kept.joins[:num_joins])

    def _reserve(self, parts: int, layers: Sequence[AttentionSpec], device: torch.device) -> None:
        """Captured steps keep the buffers of their capture."""
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
            # enough blocks for any number of decodes
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
    """Tensor cores multiply 16 columns at a time."""
    return max(16, next_power_of_2(spec.head_size))


def _has_chunks(metadata: BatchMetadata) -> bool:
    return metadata.decodes is not None or metadata.num_decodes < len(metadata.query_lens)


def _part_rows_of_chunks(metadata: BatchMetadata) -> int:
    if metadata.decodes is not None:
        return MOST_SPLIT_CHUNKS * int(FEW_QUERIES.value)
    return (len(metadata.query_lens) - metadata.num_decodes) * int(FEW_QUERIES.value)


def _splits_chunks(metadata: BatchMetadata) -> bool:
    """Return whether there are few chunks, some with few rows and a long context."""
    sequences = range(metadata.num_decodes, len(metadata.query_lens))
    chunks = [index for index in sequences if metadata.query_lens[index]]  # padding chunks have no rows
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
