"""Attention over the paged cache of `torch_cache`: decodes and prompt chunks in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from vlmserve.kernels.triton.activations import tanh
from vlmserve.kernels.triton.dependent import wait_for_previous
from vlmserve.kernels.triton.launching import Kernel
from vlmserve.kernels.triton.rope import load_heads, load_turn, load_weights, norm_heads, rotate, store_tile
from vlmserve.kernels.triton.unpacking import byte_pairs, float8_numbers, float8_pairs

FEW_QUERIES = tl.constexpr(64)
"""Maximum rows of a chunk with a split context."""
CHUNK_SPLITS = tl.constexpr(16)
"""Maximum programs per split context of a chunk."""
CHUNK_SPLIT = tl.constexpr(512)
"""Minimum tokens of such a split, except the last."""
COMBINED = tl.constexpr(8)
"""Splits that `combine` loads at once."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_key(position, WINDOW: tl.constexpr):
    return tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else 0


ITEM = tl.constexpr(8)
"""Elements of an item: sequence, first key, end of keys, context, offset of the block table, distance between columns'
tables, two unused."""
JOIN = tl.constexpr(4)
"""Elements of a join: sequence, first item, number of items, one unused."""
FILLED = tl.constexpr(128)
"""Items or joins that are cleared at once."""


@triton.jit
def chunk_split_size(seen):
    return tl.maximum(tl.cdiv(tl.cdiv(seen, CHUNK_SPLITS), CHUNK_SPLIT), 1) * CHUNK_SPLIT


@triton.jit
def find_chunk(starts_ptr, block, num_decodes, num_sequences, QUERIES: tl.constexpr):
    """The sequence and first block of a chunk, which has ``rows // QUERIES + 1`` blocks or one less."""
    low, high = num_decodes, num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        begins = (tl.load(starts_ptr + middle) - num_decodes) // QUERIES + middle - num_decodes
        if begins <= block:
            low = middle
        else:
            high = middle - 1
    return low, (tl.load(starts_ptr + low) - num_decodes) // QUERIES + low - num_decodes


@triton.jit
def load_keys(cache_ptr, tables_ptr, positions, columns, kv_head, KV_HEADS, HEAD, BLOCK_SIZE):
    """Load keys or values ``[positions, columns]``. positions: uint32, which divides faster."""
    blocks = tl.load(tables_ptr + positions // BLOCK_SIZE).to(tl.int64)
    rows = (kv_head * BLOCK_SIZE + positions % BLOCK_SIZE) * HEAD
    addresses = (cache_ptr + blocks * (KV_HEADS * BLOCK_SIZE * HEAD))[:, None] + (rows[:, None] + columns[None, :])
    return tl.load(addresses) if columns.shape[0] == HEAD else tl.load(addresses, (columns < HEAD)[None, :], 0)


@triton.jit
def load_scales(scales_ptr, tables_ptr, positions, kv_head, WHICH: tl.constexpr, KV_HEADS, BLOCK_SIZE):
    """Load scales ``[positions]`` of keys (WHICH 0) or values (1). positions: uint32."""
    blocks = tl.load(tables_ptr + positions // BLOCK_SIZE).to(tl.int64)
    places = (kv_head * 2 + WHICH) * BLOCK_SIZE + positions % BLOCK_SIZE
    return tl.load(scales_ptr + blocks * (KV_HEADS * 2 * BLOCK_SIZE) + places)


@triton.jit
def over_keys(
    query, keys_ptr, values_ptr, scales_ptr, tables_ptr, position, limit, low, high, columns, kv_head, scale, soft_cap,
    KV_HEADS: tl.constexpr, HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, QUANTIZED: tl.constexpr, STAGES: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Online softmax over positions ``low <= key < high`` before each row's limit and within its window.

    Returns the sums of values, the maximum scores (base 2) and the sums of weights.
    """
    DTYPE: tl.constexpr = query.dtype
    # 8-bit values are read in pairs, and summed as even and odd columns
    PARTS: tl.constexpr = 2 if QUANTIZED != "" else 1
    # small weights times scales underflow in float16
    RAISED: tl.constexpr = 256.0 if QUANTIZED == "fp8" else 64.0
    total = tl.zeros((ROWS, HEAD_BLOCK // PARTS), tl.float32)
    odd_total = total
    value_columns = tl.arange(0, HEAD_BLOCK // PARTS)
    if QUANTIZED != "":
        values_ptr = values_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    limit = tl.minimum(limit, high)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    for start in tl.range(low, high, KEYS, num_stages=STAGES):
        positions = start + tl.arange(0, KEYS)
        # positions past the end repeat the last key, masked out
        read = tl.minimum(positions, high - 1).to(tl.uint32)
        keys = load_keys(keys_ptr, tables_ptr, read, columns, kv_head, KV_HEADS, HEAD, BLOCK_SIZE)
        numbers = float8_numbers(keys, DTYPE, ASSEMBLY) if QUANTIZED == "fp8" else keys.to(DTYPE)
        scores = tl.dot(query, tl.trans(numbers), input_precision="ieee") * scale
        if QUANTIZED != "":
            scores *= load_scales(scales_ptr, tables_ptr, read, kv_head, 0, KV_HEADS, BLOCK_SIZE)[None, :]
        if CAPPED:
            scores = soft_cap * tanh(scores / soft_cap)
        seen = positions[None, :] < limit[:, None]
        if WINDOW > 0:
            seen = seen & (positions[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores * LOG2_E, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # a row without keys has maximum -inf, and -inf - -inf is NaN
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(largest - base)
        weight = weight * kept + tl.sum(weights, 1)
        values = load_keys(values_ptr, tables_ptr, read, value_columns, kv_head, KV_HEADS, HEAD // PARTS, BLOCK_SIZE)
        total *= kept[:, None]
        if QUANTIZED != "":
            scales = load_scales(scales_ptr, tables_ptr, read, kv_head, 1, KV_HEADS, BLOCK_SIZE)
            weights *= (scales * RAISED)[None, :]
            if QUANTIZED == "fp8":
                even, odd = float8_pairs(values, DTYPE, ASSEMBLY)
            else:
                even, odd = byte_pairs(values, DTYPE, ASSEMBLY)
            total = tl.dot(weights.to(DTYPE), even, total, input_precision="ieee")
            odd_total = tl.dot(weights.to(DTYPE), odd, odd_total * kept[:, None], input_precision="ieee")
        else:
            total = tl.dot(weights.to(DTYPE), values, total, input_precision="ieee")
        largest = new_largest
    if QUANTIZED != "":
        total = tl.reshape(tl.join(total, odd_total), (ROWS, HEAD_BLOCK)) * (1.0 / RAISED)
    return total, largest, weight


@Kernel
@triton.jit(do_not_specialize=["decodes", "size", "most_items", "most_joins", "table_stride", "column_stride"])
def divide_decodes(
    contexts_ptr, items_ptr, joins_ptr, decodes, size, most_items, most_joins, table_stride, column_stride,
    DECODES: tl.constexpr, WINDOW: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Divide decode contexts into items of at most `size` tokens. One program.

    There are slightly more items than decodes, so one grid fits all lengths, and most contexts of a large batch stay
    whole.

    items_ptr: int32 ``[most_items, ITEM]``; unused items have no keys. joins_ptr: int32 ``[most_joins, JOIN]``, for
    decodes with several items; unused joins have no items. DECODES: a power of two, at least `decodes`.
    """
    wait_for_previous(DEPENDENT)
    numbers = tl.arange(0, DECODES)
    context = tl.load(contexts_ptr + numbers, numbers < decodes, 0)
    low = first_key(context - 1, WINDOW)
    seen = context - low
    counts = tl.cdiv(seen, size)
    ends = tl.cumsum(counts, 0)
    firsts = ends - counts
    for split in range(0, tl.max(counts, 0)):
        item_ptr = items_ptr + (firsts + split) * ITEM
        begin, there = low + split * size, split < counts
        tl.store(item_ptr, numbers, there)
        tl.store(item_ptr + 1, begin, there)
        tl.store(item_ptr + 2, tl.minimum(begin + size, context), there)
        tl.store(item_ptr + 3, context, there)
        tl.store(item_ptr + 4, numbers * table_stride, there)
        tl.store(item_ptr + 5, column_stride, there)
    is_split = (counts > 1).to(tl.int32)
    joined = tl.cumsum(is_split, 0)
    join_ptr = joins_ptr + (joined - 1) * JOIN
    tl.store(join_ptr, numbers, is_split == 1)
    tl.store(join_ptr + 1, firsts, is_split == 1)
    tl.store(join_ptr + 2, counts, is_split == 1)
    num_items, num_joins = tl.max(ends, 0), tl.max(joined, 0)
    for start in range(num_items, most_items, FILLED):
        unused = start + tl.arange(0, FILLED)
        tl.store(items_ptr + unused * ITEM + 1, 0, unused < most_items)
        tl.store(items_ptr + unused * ITEM + 2, 0, unused < most_items)
    for start in range(num_joins, most_joins, FILLED):
        unused = start + tl.arange(0, FILLED)
        tl.store(joins_ptr + unused * JOIN + 2, 0, unused < most_joins)


@triton.jit
def item_of_decode(items_ptr, number, column, WINDOW: tl.constexpr):
    item_ptr = items_ptr + number * ITEM
    sequence, low, high = tl.load(item_ptr), tl.load(item_ptr + 1), tl.load(item_ptr + 2)
    context = tl.load(item_ptr + 3)
    table = (tl.load(item_ptr + 4) + column * tl.load(item_ptr + 5)).to(tl.int64)
    is_split = (low > first_key(context - 1, WINDOW)) | (high < context)
    first, new = tl.cast(0, tl.int32), tl.cast(1, tl.int32)
    return sequence, first, new, context, low, high, is_split, low >= high, number, table


@triton.jit
def block_of_chunk(
    starts_ptr, contexts_ptr, place, num_decodes, num_sequences, num_items, table_stride, QUERIES: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT_CHUNKS: tl.constexpr,
):  # fmt: skip
    """place: the program's index after the items.

    Returns:

    - first row of the chunk in the batch, and of the block in the chunk
    - rows and context of the chunk
    - first key and end of keys
    - whether the context is split, and whether the split is empty
    - split row of the chunk's first row
    - offset of the block table
    """
    block, split = (place // CHUNK_SPLITS, place % CHUNK_SPLITS) if SPLIT_CHUNKS else (place, 0)
    sequence, first_block = find_chunk(starts_ptr, block, num_decodes, num_sequences, QUERIES)
    first = (block - first_block) * QUERIES
    begin = tl.load(starts_ptr + sequence)
    new = tl.load(starts_ptr + sequence + 1) - begin
    context = tl.load(contexts_ptr + sequence)
    low, high = tl.cast(first_key(context - new + first, WINDOW), tl.int32), context
    is_split, has_none = tl.cast(False, tl.int1), tl.cast(False, tl.int1)
    if SPLIT_CHUNKS:
        # by the keys of any row, so that all blocks have the same splits
        all_low = first_key(context - new, WINDOW)
        size = chunk_split_size(context - all_low)
        part_low = all_low + split * size
        is_split = new <= FEW_QUERIES
        has_none = tl.where(is_split, part_low >= context, split > 0)
        low = tl.where(is_split, tl.maximum(low, part_low), low)
        high = tl.where(is_split, tl.minimum(high, part_low + size), high)
    part_row = num_items + ((sequence - num_decodes) * CHUNK_SPLITS + split) * FEW_QUERIES
    table = sequence.to(tl.int64) * table_stride
    return begin, first, new, context, low, high, is_split, has_none, part_row, table


# not specialized: these numbers change every step
@Kernel
@triton.jit(
    do_not_specialize=["num_decodes", "num_sequences", "num_items", "table_stride", "column"],
    do_not_specialize_on_alignment=["tables_ptr", "positions_ptr", "slots_ptr"],
)
def attend_rows(
    query_ptr, keys_ptr, values_ptr, scales_ptr, tables_ptr, starts_ptr, contexts_ptr, reach_ptr, sinks_ptr, out_ptr,
    sums_ptr, largest_ptr, decodes_ptr, items_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, query_norm_ptr,
    key_norm_ptr, num_decodes, num_sequences, num_items, table_stride, column, query_stride, scale, soft_cap, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    REACH: tl.constexpr, QUANTIZED: tl.constexpr, STAGES: tl.constexpr, SPLIT_CHUNKS: tl.constexpr,
    MIXED: tl.constexpr, ITEMS: tl.constexpr, CHUNKS: tl.constexpr, WRITES: tl.constexpr, ROTATED: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_NORMS: tl.constexpr, ASSEMBLY: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Compute the query heads of one KV head, for one decode or some rows of a chunk.

    Programs: ``[items + blocks of chunk rows, kv_heads]``, `CHUNK_SPLITS` per block with SPLIT_CHUNKS. Without CHUNKS
    ``[kv_heads, items]``, so that empty programs start last.

    ITEMS: the batch has decodes, see `divide_decodes`. CHUNKS: it has chunks. MIXED: the number of decodes is read on
    the device, and there may be surplus programs. tables_ptr: without CHUNKS, of all columns; with CHUNKS, of the
    layer's. WRITES: query_ptr holds queries, keys and values before norm and RoPE, and there are no chunks; the program
    with the newest token writes its key and value.

    sums_ptr: float32 ``[split rows, heads, HEAD_BLOCK]``. largest_ptr: float32 ``[split rows, heads, 2]``, maximum
    score and weight. Split rows: the items, then with SPLIT_CHUNKS ``[chunks, CHUNK_SPLITS, FEW_QUERIES]``.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = ROWS // GROUP
    wait_for_previous(DEPENDENT)
    if MIXED:
        num_decodes = tl.load(decodes_ptr)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, HEAD_BLOCK)
    place, kv_head = tl.program_id(0 if CHUNKS else 1), tl.program_id(1 if CHUNKS else 0)
    if ITEMS and CHUNKS:
        if place < num_items:
            begin, first, new, context, low, high, is_split, has_none, part_row, table = item_of_decode(
                items_ptr, place, column, WINDOW
            )
        else:
            begin, first, new, context, low, high, is_split, has_none, part_row, table = block_of_chunk(
                starts_ptr, contexts_ptr, place - num_items, num_decodes, num_sequences, num_items, table_stride,
                QUERIES, WINDOW, SPLIT_CHUNKS,
            )  # fmt: skip
    elif ITEMS:
        begin, first, new, context, low, high, is_split, has_none, part_row, table = item_of_decode(
            items_ptr, place, column, WINDOW
        )
    else:
        begin, first, new, context, low, high, is_split, has_none, part_row, table = block_of_chunk(
            starts_ptr, contexts_ptr, place, num_decodes, num_sequences, num_items, table_stride, QUERIES, WINDOW,
            SPLIT_CHUNKS,
        )  # fmt: skip
    row = first + rows // GROUP
    position = context - new + row
    if not CHUNKS:
        valid = rows < GROUP
        limit = tl.where(valid, high, 0)
    else:
        valid = (rows < QUERIES * GROUP) & (row < new)
        limit = position + 1
        if REACH:
            limit = tl.maximum(limit, tl.load(reach_ptr + begin + row, valid, 0))
        limit = tl.where(valid, limit, 0)
        high = tl.minimum(high, tl.max(limit, 0))
        # `combine` also reads rows that see no keys of a split
        has_none = has_none | ((low >= high) & ~is_split)
    if has_none:
        return
    tables_ptr += table
    heads = kv_head * GROUP + rows % GROUP
    first_place = begin.to(tl.int64) * (HEADS * HEAD)
    places = ((row * HEADS + heads) * HEAD)[:, None] + columns[None, :]
    inside = valid[:, None] & (columns < HEAD)[None, :]
    if WRITES:
        slot = tl.load(slots_ptr + begin)
        turn = tl.load(positions_ptr + begin) if HAS_POSITIONS else begin.to(tl.int64)
        token_ptr = query_ptr + begin.to(tl.int64) * query_stride
        own = kv_head + tl.arange(0, 1)
        of_heads = (heads * HEAD)[:, None] + columns[None, :]
        keys_at = ((HEADS + own) * HEAD)[:, None] + columns[None, :]
        there = (columns < HEAD)[None, :]
        query, query_partner = load_heads(token_ptr, of_heads, inside, columns, ROTATED)
        key, key_partner = load_heads(token_ptr, keys_at, there, columns, ROTATED)
        value = tl.load(token_ptr + keys_at + KV_HEADS * HEAD, there, 0.0)
        # issue all loads before the first wait
        if ROTATED > 0:
            at = turn * (ROTATED // 2)
            cos, sin = load_turn(cos_ptr + at, sin_ptr + at, columns, ROTATED)
        if HAS_NORMS:
            query_weight, query_partner_weight = load_weights(query_norm_ptr, columns, HEAD, ROTATED)
            key_weight, key_partner_weight = load_weights(key_norm_ptr, columns, HEAD, ROTATED)
            query, query_partner = norm_heads(query, query_partner, query_weight, query_partner_weight, eps, HEAD)
            key, key_partner = norm_heads(key, key_partner, key_weight, key_partner_weight, eps, HEAD)
        if ROTATED > 0:
            query = rotate(query, query_partner, cos, sin)
            key = rotate(key, key_partner, cos, sin)
        # predicated stores: loads would be issued after a branch
        own = tl.where(high == context, own, KV_HEADS)
        there = there & (own < KV_HEADS)[:, None]
        store_tile(key, keys_ptr, scales_ptr, own, columns, there, slot, 0, KV_HEADS, HEAD, BLOCK_SIZE, QUANTIZED)
        store_tile(value, values_ptr, scales_ptr, own, columns, there, slot, 1, KV_HEADS, HEAD, BLOCK_SIZE, QUANTIZED)
        # all threads of the program read them
        tl.debug_barrier()
    else:
        query = tl.load(query_ptr + first_place + places, inside, 0.0)
    total, largest, weight = over_keys(
        query, keys_ptr, values_ptr, scales_ptr, tables_ptr, position, limit, low, high, columns, kv_head, scale,
        soft_cap, KV_HEADS, HEAD, HEAD_BLOCK, BLOCK_SIZE, ROWS, KEYS, WINDOW, CAPPED, QUANTIZED, STAGES, ASSEMBLY,
    )  # fmt: skip
    if is_split:
        first_part = part_row.to(tl.int64) * HEADS
        parts = row * HEADS + heads
        sums_at = sums_ptr + first_part * HEAD_BLOCK
        tl.store(sums_at + parts[:, None] * HEAD_BLOCK + columns[None, :], total, valid[:, None])
        largest_at = largest_ptr + first_part * 2
        tl.store(largest_at + parts * 2, largest, valid)
        tl.store(largest_at + parts * 2 + 1, weight, valid)
    else:
        if SINKS:
            sinks = tl.load(sinks_ptr + heads) * LOG2_E
            base = tl.maximum(largest, sinks)
            kept = tl.exp2(largest - base)
            total *= kept[:, None]
            weight = weight * kept + tl.exp2(sinks - base)
        result = total / tl.where(valid, weight, 1.0)[:, None]
        tl.store(out_ptr + first_place + places, result.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def parts_of_join(joins_ptr, number):
    """Return row, first split row, distance between split rows, and number of splits."""
    join_ptr = joins_ptr + number * JOIN
    return tl.load(join_ptr), tl.load(join_ptr + 1), tl.cast(1, tl.int32), tl.load(join_ptr + 2)


@triton.jit
def parts_of_chunk_row(
    starts_ptr, contexts_ptr, number, num_decodes, num_sequences, num_items, WINDOW: tl.constexpr
):  # fmt: skip
    """number: chunk times `FEW_QUERIES` plus row."""
    # a captured step may have room for more chunks
    chunk, row = number // FEW_QUERIES, number % FEW_QUERIES
    sequence = tl.minimum(num_decodes + chunk, num_sequences - 1)
    begin = tl.load(starts_ptr + sequence)
    new = tl.load(starts_ptr + sequence + 1) - begin
    context = tl.load(contexts_ptr + sequence)
    seen = context - first_key(context - new, WINDOW)
    is_split = (num_decodes + chunk < num_sequences) & (row < new) & (new <= FEW_QUERIES)
    count = tl.where(is_split, tl.cdiv(seen, chunk_split_size(seen)), 0)
    part_row = num_items + chunk * CHUNK_SPLITS * FEW_QUERIES + row
    return begin + row, part_row, tl.cast(FEW_QUERIES, tl.int32), count


@Kernel
@triton.jit(do_not_specialize=["num_decodes", "num_sequences", "num_items", "num_joins"])
def combine(
    sums_ptr, largest_ptr, starts_ptr, contexts_ptr, sinks_ptr, out_ptr, decodes_ptr, joins_ptr, num_decodes,
    num_sequences, num_items, num_joins, HEADS: tl.constexpr, HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, SPLIT_CHUNKS: tl.constexpr, MIXED: tl.constexpr, JOINS: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Add the splits of one row and head in order. Programs: ``[joins + split rows of chunks, heads]``.

    JOINS: decode contexts may be split. MIXED, SPLIT_CHUNKS: see `attend_rows`.
    """
    wait_for_previous(DEPENDENT)
    if MIXED:
        num_decodes = tl.load(decodes_ptr)
    place, head = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, HEAD_BLOCK)
    if JOINS and SPLIT_CHUNKS:
        if place < num_joins:
            out_row, part_row, step, count = parts_of_join(joins_ptr, place)
        else:
            out_row, part_row, step, count = parts_of_chunk_row(
                starts_ptr, contexts_ptr, place - num_joins, num_decodes, num_sequences, num_items, WINDOW
            )
    elif JOINS:
        out_row, part_row, step, count = parts_of_join(joins_ptr, place)
    else:
        out_row, part_row, step, count = parts_of_chunk_row(
            starts_ptr, contexts_ptr, place, num_decodes, num_sequences, num_items, WINDOW
        )
    if count == 0:
        return
    total = tl.zeros((HEAD_BLOCK,), tl.float32)
    largest = tl.load(sinks_ptr + head) * LOG2_E if SINKS else float("-inf")
    weight = 1.0 if SINKS else 0.0
    for first in range(0, count, COMBINED):
        part = first + tl.arange(0, COMBINED)
        parts = (part_row + part * step).to(tl.int64) * HEADS + head
        part_largest = tl.load(largest_ptr + parts * 2, part < count, float("-inf"))
        part_weight = tl.load(largest_ptr + parts * 2 + 1, part < count, 0.0)
        sums = tl.load(sums_ptr + parts[:, None] * HEAD_BLOCK + columns[None, :], (part < count)[:, None], 0.0)
        new_largest = tl.maximum(largest, tl.max(part_largest, 0))
        # a row without keys has maximum -inf, and -inf - -inf is NaN
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        kept, shares = tl.exp2(largest - base), tl.exp2(part_largest - base)
        total = total * kept + tl.sum(shares[:, None] * sums, 0)
        weight = weight * kept + tl.sum(shares * part_weight, 0)
        largest = new_largest
    out_at = (out_row.to(tl.int64) * HEADS + head) * HEAD + columns
    tl.store(out_ptr + out_at, (total / weight).to(out_ptr.dtype.element_ty), columns < HEAD)
