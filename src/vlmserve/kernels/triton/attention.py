"""The attention backend of NVIDIA's GPUs: one to three launches a layer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from vlmserve.kernels.attention import AttentionSpec, BatchMetadata, HeadNorms, LayerCache, RotaryRows
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.kernels.transfers import to_device
from vlmserve.kernels.triton.attention_kernels import (
    CHUNK_SPLIT,
    CHUNK_SPLITS,
    FEW_QUERIES,
    MAX_SPLITS,
    attend_rows,
    combine,
)
from vlmserve.kernels.triton.host_math import cdiv, next_power_of_2
from vlmserve.kernels.triton.rope import rotate_into_cache
from vlmserve.kernels.triton.unpacking import has_assembly

MAX_HEAD_SIZE = 256
STAGES = 5
"""Of the pipeline, which has some for loads of block tables. With fewer, no keys are on their way while others are
multiplied."""
PART, LARGE_PART = 128, 256
"""Tokens of a part of a decode's context: more of them where each of a GPU's multiprocessors has several programs
anyway. On an H200, by large parts 256 decodes over 1,100 tokens with 8 heads of keys took 8% less time, 64 of them 5%
less, and one a fifth more, with a kernel that added the parts in the same launch; not measured with this one."""
MANY_HEADS = 512
"""Heads of keys of all decodes, from which parts are large."""
SPLITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32)
"""Numbers of parts that decodes are launched for. Programs without a part take time, too, and each number is a graph of
its own."""
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
    wide = spec.head_size > 128
    rows = max(16, next_power_of_2(spec.num_heads // spec.num_kv_heads), 0 if not chunks else 32 if wide else 64)
    if rows > 16 or wide:
        return AttentionTile(rows, 32, 4)
    return AttentionTile(rows, 64, 2 if quantized else 4)


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """What layers of a step share.

    splits: parts that the longest context which is split may be divided into. part: see `attend_rows`. split_chunks:
    whether contexts of chunks are. sums, largest: memory for these parts, see `attend_rows`. reach: int32
    ``[tokens]``, up to where each row sees; None: up to itself. capture_key: what a captured step depends on beside the
    addresses and shapes of its tensors; None: the step cannot be captured.
    """

    splits: int
    part: int
    split_chunks: bool
    sums: Tensor
    largest: Tensor
    reach: Tensor | None
    capture_key: Hashable


class TritonAttention(TorchReference):
    """Attention over a flat batch of decodes and prompt chunks. A `NormingBackend` whose cache is the reference's.

    Lengths are read on the device, so that a step can be captured once and replayed at other lengths.

    writes: whether programs of decodes write keys and values themselves; a class's, for measuring.
    """

    name = "triton"
    writes: ClassVar[bool] = True

    def __init__(self, *, quantized_cache: bool = False) -> None:
        """quantized_cache: keys and values are stored in 8 bits."""
        super().__init__(quantized_cache=quantized_cache)
        self.decode_tile: AttentionTile | None = None
        """Of batches of decodes alone, instead of `tile`'s: for measuring which is the fastest."""
        self._sums = self._largest = torch.empty(0)
        self._sinks: dict[tuple[float, ...], Tensor] = {}

    def prepare(  # type: ignore[override]
        self, metadata: BatchMetadata, block_size: int, layers: Sequence[AttentionSpec], dtype: torch.dtype
    ) -> TritonPlan:
        """Memory for the parts of decodes, and how far bidirectional rows see."""
        device = metadata.slot_mapping.device
        is_mixed = metadata.decodes is not None
        decodes = len(metadata.query_lens) if is_mixed else metadata.num_decodes
        heads = decodes * min((spec.num_kv_heads for spec in layers), default=0)
        splits, part = 0, LARGE_PART if heads >= MANY_HEADS else PART
        if metadata.num_decodes:
            longest = max(metadata.host_context_lens[: metadata.num_decodes])
            needed = min(MAX_SPLITS.value, cdiv(longest, part))
            # Steps with chunks come in more kinds, and few numbers of parts are to come.
            splits = next_power_of_2(needed) if is_mixed else next(count for count in SPLITS if count >= needed)
        split_chunks = _splits_chunks(metadata)
        part_rows = _part_rows(metadata, splits_decodes=True, splits_chunks=split_chunks)
        if split_chunks:
            splits = max(splits, CHUNK_SPLITS.value)
        parts = part_rows * splits * max((spec.num_heads for spec in layers), default=0)
        width = max((_head_block(spec) for spec in layers), default=0)
        if parts * width > self._sums.numel() or self._sums.device != device:
            # Captured steps keep what they were captured with.
            self._sums = torch.empty(parts * width, device=device)
            self._largest = torch.empty(parts * 2, device=device)
        kind = "mixed" if is_mixed else metadata.num_decodes
        capture_key = (splits, part, split_chunks, kind, len(metadata.query_lens))
        reach = _reach(metadata)
        return TritonPlan(
            splits, part, split_chunks, self._sums, self._largest, reach, capture_key if reach is None else None
        )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        spec: AttentionSpec,
        metadata: BatchMetadata,
        plan: object,
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        qkv = torch.cat((query.flatten(1), key.flatten(1), value.flatten(1)), 1)
        return self._attend(qkv, None, cache, spec, metadata, plan)

    def attend_rotated(
        self,
        qkv: Tensor,
        rope: RotaryRows | None,
        cache: LayerCache,
        spec: AttentionSpec,
        metadata: BatchMetadata,
        plan: object,
    ) -> Tensor:
        """See `RotatingBackend.attend_rotated`."""
        return self._attend(qkv, rope, cache, spec, metadata, plan)

    def attend_normed(
        self,
        qkv: Tensor,
        norms: HeadNorms,
        rope: RotaryRows | None,
        cache: LayerCache,
        spec: AttentionSpec,
        metadata: BatchMetadata,
        plan: object,
    ) -> Tensor:
        """See `NormingBackend.attend_normed`."""
        return self._attend(qkv, rope, cache, spec, metadata, plan, norms)

    def _attend(
        self,
        qkv: Tensor,
        rope: RotaryRows | None,
        cache: LayerCache,
        spec: AttentionSpec,
        metadata: BatchMetadata,
        plan: object,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """rope, norms: None: nothing is rotated or normed."""
        assert isinstance(plan, TritonPlan)
        if cache.scales is None and cache.keys.dtype != qkv.dtype:
            raise ValueError(f"queries of {qkv.dtype} do not fit a cache of {cache.keys.dtype}")
        if qkv.stride(1) != 1:
            qkv = qkv.contiguous()
        slots = metadata.slot_mapping
        alone = metadata.num_decodes == len(qkv) and metadata.decodes is None and plan.reach is None
        # Where many decode, a launch is little beside what each program would do again.
        writes = self.writes and alone and plan.part != LARGE_PART
        query = qkv if writes else rotate_into_cache(qkv, rope, cache, spec, slots, norms)
        cos, sin, positions = (query, query, None) if rope is None else rope
        output = torch.empty((len(qkv), spec.num_heads * spec.head_size), dtype=qkv.dtype, device=qkv.device)
        decodes, sequences = metadata.num_decodes, len(metadata.query_lens)
        group = spec.num_heads // spec.num_kv_heads
        chunk_rows = len(query) - decodes
        tiles, blocks = tile(spec, chunks=chunk_rows > 0, quantized=cache.scales is not None), decodes
        is_mixed = metadata.decodes is not None
        if is_mixed:
            # As many as there can be where a captured step has other decodes.
            blocks = sequences + len(query) // (tiles.rows // group)
        elif chunk_rows:
            blocks += chunk_rows // (tiles.rows // group) + sequences - decodes
        elif self.decode_tile is not None:
            tiles = self.decode_tile
        head_block = _head_block(spec)
        sinks = output if spec.sinks is None else self._sinks_on(spec.sinks, query.device)
        attend_rows[(blocks, spec.num_kv_heads, max(1, plan.splits))](
            query,
            cache.keys,
            cache.values,
            cache.keys if cache.scales is None else cache.scales,
            metadata.block_tables,
            metadata.query_starts,
            metadata.context_lens,
            metadata.context_lens if plan.reach is None else plan.reach,
            sinks,
            output,
            plan.sums,
            plan.largest,
            metadata.query_starts if metadata.decodes is None else metadata.decodes,
            cos,
            sin,
            slots if positions is None else positions,
            slots,
            query if norms is None else norms.query,
            query if norms is None else norms.key,
            decodes,
            sequences,
            metadata.block_tables.stride(0),
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
            REACH=plan.reach is not None,
            QUANTIZED=cache.scales is not None,
            STAGES=STAGES if query.element_size() == 2 else 1,
            SPLIT_CHUNKS=plan.split_chunks,
            MIXED=is_mixed,
            PART=plan.part,
            WRITES=writes,
            ROTATED=0 if rope is None or not writes else 2 * cos.shape[1],
            HAS_POSITIONS=positions is not None and writes,
            HAS_NORMS=norms is not None and writes,
            ASSEMBLY=has_assembly(query.device),
            num_warps=tiles.warps,
        )
        splits_decodes = plan.splits > 1 or spec.sinks is not None
        part_rows = _part_rows(metadata, splits_decodes=splits_decodes, splits_chunks=plan.split_chunks)
        if part_rows:
            combine[(part_rows, spec.num_heads)](
                plan.sums,
                plan.largest,
                metadata.query_starts,
                metadata.context_lens,
                sinks,
                output,
                metadata.query_starts if metadata.decodes is None else metadata.decodes,
                decodes,
                sequences,
                max(1, plan.splits),
                HEADS=spec.num_heads,
                HEAD=spec.head_size,
                HEAD_BLOCK=head_block,
                WINDOW=spec.window or 0,
                SINKS=spec.sinks is not None,
                SPLIT_CHUNKS=plan.split_chunks,
                MIXED=is_mixed,
                PART=plan.part,
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


def _part_rows(metadata: BatchMetadata, *, splits_decodes: bool, splits_chunks: bool) -> int:
    """Rows whose parts are kept in memory, or of a step that may be captured, as many as there can be."""
    sequences = len(metadata.query_lens)
    if not splits_chunks:
        return (metadata.num_decodes if metadata.decodes is None else sequences) if splits_decodes else 0
    if metadata.decodes is None:
        return metadata.num_decodes + (sequences - metadata.num_decodes) * int(FEW_QUERIES.value)
    return sequences + MOST_SPLIT_CHUNKS * int(FEW_QUERIES.value)


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
    reach = torch.zeros(len(metadata.slot_mapping), dtype=torch.int32)
    for _, first, last, seen in metadata.bidirectional:
        reach[first:last] = seen
    return to_device(reach, device)
