"""Paged attention with RoPE by the native CPU kernels (csrc/attention.h)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlmserve.kernels.attention import AttentionContext, BatchMetadata, LayerCache, RotaryRows
from vlmserve.kernels.blocks import allocate_blocks
from vlmserve.kernels.cpu_program import CpuPlan, Recorded, RecordedRope
from vlmserve.kernels.cpu_record import ATTENTION, GATE
from vlmserve.kernels.cpu_states import addresses_of
from vlmserve.kernels.extension import DTYPES, extension, supported_isas
from vlmserve.layer_specs import AttentionSpec, CacheType

LANES = 16
"""Tokens of a tile. A block takes whole tiles, so its size should be a multiple."""
MAX_HEAD_SIZE = 512


def unsupported_reason(
    spec: AttentionSpec, dtype: torch.dtype, device: torch.device, *, cache_type: CacheType = "auto"
) -> str | None:
    if not supported_isas():
        return "the native kernels were not built"
    if device.type != "cpu":
        return f"they run on a CPU, not on {device.type}"
    if dtype not in DTYPES:
        return f"they do not support {dtype}"
    if (dtype == torch.bfloat16 or cache_type != "auto") and spec.head_size % 2:
        return f"a head of {spec.head_size} elements is not made of pairs"
    if spec.head_size > MAX_HEAD_SIZE:
        return f"a head of {spec.head_size} elements is larger than {MAX_HEAD_SIZE}"
    if spec.sinks is not None:
        return "they do not support attention sinks"
    if spec.num_heads % spec.num_kv_heads:
        return f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} heads of keys evenly"
    return None


class CpuAttention:
    """One call per layer writes keys and values, and attends."""

    name = "native"
    reads_on_device = False

    def __init__(self, *, cache_type: CacheType = "auto") -> None:
        self.cache_type: CacheType = cache_type
        self._attention = extension().attention

    def allocate(
        self, num_blocks: int, block_size: int, spec: AttentionSpec, dtype: torch.dtype, device: torch.device
    ) -> LayerCache:
        """Raises ValueError if `unsupported_reason` returns a reason."""
        if (reason := unsupported_reason(spec, dtype, device, cache_type=self.cache_type)) is not None:
            raise ValueError(f"native attention is not possible here: {reason}")
        pair = 2 if self.cache_type != "auto" else 4 // dtype.itemsize
        stored = torch.int8 if self.cache_type != "auto" else dtype
        tiles = (num_blocks, spec.num_kv_heads, -(-block_size // LANES))
        columns = -(-spec.head_size // LANES) * LANES
        keys = allocate_blocks((*tiles, spec.head_size // pair, LANES, pair), stored, device)
        values = allocate_blocks((*tiles, LANES // pair, columns, pair), stored, device)
        scales = allocate_blocks((*tiles, 2, LANES), torch.float32, device) if self.cache_type != "auto" else None
        return LayerCache(keys, values, block_size, scales)

    def block_bytes(self, block_size: int, spec: AttentionSpec, dtype: torch.dtype) -> int:
        tokens = -(-block_size // LANES) * LANES
        columns = -(-spec.head_size // LANES) * LANES
        size = (spec.head_size + columns) * (1 if self.cache_type != "auto" else dtype.itemsize)
        scales = 2 * torch.float32.itemsize if self.cache_type != "auto" else 0
        return tokens * spec.num_kv_heads * (size + scales)

    def prepare(
        self, metadata: BatchMetadata, block_size: int, layers: Sequence[AttentionSpec], dtype: torch.dtype
    ) -> CpuPlan:
        starts_of, contexts_of, tables, ahead_of = _without_bidirectional_rows(metadata)
        tables = tables.to(torch.int32)
        contexts_of = contexts_of.to(torch.int32).contiguous()
        tensors = (
            starts_of.to(torch.int32).contiguous(),
            contexts_of,
            tables if tables.stride(2) == 1 else tables.contiguous(),
            metadata.slot_mapping.to(torch.int64).contiguous(),
            ahead_of,
            (contexts_of - ahead_of).to(torch.int32) if len(ahead_of) else contexts_of,
        )
        starts, contexts, blocks, slots, ahead, causal_contexts = map(Tensor.data_ptr, tensors)
        return CpuPlan(
            tensors=tensors,
            addresses=(starts, contexts, blocks, slots, ahead),
            causal_contexts=causal_contexts,
            num_sequences=len(tensors[1]),
            num_tokens=tensors[3].shape[1],
            table_stride=tensors[2].stride(1),
            column_stride=tensors[2].stride(0),
            threads=torch.get_num_threads(),
            states=addresses_of(metadata.states),
        )

    def attend(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        context: AttentionContext,
    ) -> Tensor:
        query = _heads_together(query)
        if key is None or value is None:
            return self._run((query.data_ptr(), 0, 0, 0, 0, 0), (query.stride(0), 0, 0, 0), query.dtype, context)
        key, value = _heads_together(key), _heads_together(value)
        addresses = (query.data_ptr(), key.data_ptr(), value.data_ptr(), 0, 0, 0)
        strides = (query.stride(0), key.stride(0), value.stride(0), 0)
        return self._run(addresses, strides, query.dtype, context)

    def attend_rotated(
        self,
        qkv: Tensor,
        rope: RotaryRows | None,
        context: AttentionContext,
    ) -> Tensor:
        cache, spec, *_ = context
        if isinstance(qkv, Recorded):
            return _record(qkv, rope, cache, spec)
        if qkv.stride(1) != 1:
            qkv = qkv.contiguous()
        query, stride, size = qkv.data_ptr(), qkv.stride(0), qkv.element_size()
        key = value = 0
        if spec.shares_with is None:
            key = query + spec.num_heads * spec.head_size * size
            value = key + spec.num_kv_heads * spec.head_size * size
        tables = (0, 0, 0) if rope is None else tuple(0 if rows is None else rows.data_ptr() for rows in rope)
        rope_size = 0 if rope is None else 2 * rope.cos.shape[1]
        addresses = (query, key, value, *tables)
        return self._run(addresses, (stride, stride, stride, rope_size), qkv.dtype, context)

    def _run(
        self,
        addresses: tuple[int, ...],
        strides: tuple[int, int, int, int],
        dtype: torch.dtype,
        context: AttentionContext,
    ) -> Tensor:
        cache, spec, _, plan = context
        assert isinstance(plan, CpuPlan)
        if cache.scales is None and cache.keys.dtype != dtype:
            raise ValueError(f"queries of {dtype} do not fit a cache of {cache.keys.dtype}")
        output = torch.empty((plan.num_tokens, spec.num_heads * spec.head_size), dtype=dtype)
        self._attention(
            *addresses,
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            0 if cache.scales is None else cache.scales.data_ptr(),
            output.data_ptr(),
            *plan.addresses_of(cache.column, is_causal=spec.is_causal),
            plan.num_sequences,
            plan.num_tokens,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            cache.block_size,
            plan.table_stride,
            *strides,
            spec.window or 0,
            spec.scale,
            spec.soft_cap or 0.0,
            DTYPES[dtype],
            plan.threads,
        )
        return output


def gate_output(x: Tensor, gates: Tensor) -> Tensor:
    if isinstance(x, Recorded):
        assert isinstance(gates, Recorded)
        each = x.width // gates.width
        x.expect(each * gates.width, x.recording.dtype)
        return x.recording.add(
            GATE,
            x,
            x.width,
            residual=gates,
            in_place=True,
            in_features=gates.width,
            first=gates.first,
            head_size=each,
        )
    rows, count = gates.shape
    each = x.shape[1] // count
    if x.shape != (rows, each * count) or x.dtype != gates.dtype or x.dtype not in DTYPES or not x.is_contiguous():
        raise ValueError(f"{tuple(gates.shape)} gates of {gates.dtype} do not fit {tuple(x.shape)} of {x.dtype}")
    if gates.stride(1) != 1:
        gates = gates.contiguous()
    sizes = (rows, count, each, gates.stride(0))
    extension().gate(x.data_ptr(), gates.data_ptr(), *sizes, DTYPES[x.dtype], torch.get_num_threads())
    return x


def _without_bidirectional_rows(metadata: BatchMetadata) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make bidirectional rows sequences that end at their reach, so that kernels see a causal batch.

    Returns query starts, context lengths, block tables, and how many positions each sequence sees ahead. All keys and
    values are written before any is read.
    """
    tables = metadata.block_tables
    if not metadata.bidirectional:
        none = torch.empty(0, dtype=torch.int32)
        return metadata.query_starts, metadata.context_lens, tables, none
    starts, contexts, owners, aheads = [0], [], [], []

    def add(sequence: int, last: int, context: int, ahead: int = 0) -> None:
        if last > starts[-1]:
            starts.append(last)
            contexts.append(context)
            owners.append(sequence)
            aheads.append(ahead)

    end = 0
    for sequence, (length, context) in enumerate(zip(metadata.query_lens, metadata.host_context_lens, strict=True)):
        end += length
        for _, first, last, reach in (rows for rows in metadata.bidirectional if rows.sequence == sequence):
            add(sequence, first, context - (end - first))
            for row in range(first, last):
                add(sequence, row + 1, reach, reach - (context - (end - row - 1)))
        add(sequence, end, context)
    ahead_of = torch.tensor(aheads, dtype=torch.int32)
    return torch.tensor(starts), torch.tensor(contexts), tables[:, owners], ahead_of


def _record(qkv: Recorded, rope: object, cache: LayerCache, spec: AttentionSpec) -> Tensor:
    assert rope is None or isinstance(rope, RecordedRope)
    dtype = cache.keys.dtype if cache.scales is None else qkv.recording.dtype
    is_sharing = spec.shares_with is not None
    heads = spec.num_heads + (0 if is_sharing else 2 * spec.num_kv_heads)
    qkv.expect(heads * spec.head_size, dtype, columns=True)
    return qkv.recording.add(
        ATTENTION,
        qkv,
        spec.num_heads * spec.head_size,
        first=qkv.first,
        keys=cache.keys.data_ptr(),
        values=cache.values.data_ptr(),
        scales=0 if cache.scales is None else cache.scales.data_ptr(),
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        block_size=cache.block_size,
        rope_size=0 if rope is None else rope.size,
        window=spec.window or 0,
        scale=spec.scale,
        soft_cap=spec.soft_cap or 0.0,
        rope=-1 if rope is None else rope.number,
        is_sharing=is_sharing,
        is_causal=spec.is_causal,
        column=cache.column,
    )


def _heads_together(x: Tensor) -> Tensor:
    """Rows ``[tokens, heads, head_size]`` may be slices of wider rows."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
