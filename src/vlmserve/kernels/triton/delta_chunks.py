"""The gated delta rule for prompts, 64 rows at a time, by matmuls (https://arxiv.org/abs/2412.06464)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from vlmserve.kernels.states import DeltaWeights, StateCache, StateRows
from vlmserve.kernels.triton.host_math import cdiv, next_power_of_2
from vlmserve.kernels.triton.launching import Kernel
from vlmserve.kernels.triton.state_inputs import convolved, silu, softplus
from vlmserve.layer_specs import CHUNK, DeltaSpec

_COLUMNS = 32
"""Columns of a state that a program advances."""
PRECISION = tl.constexpr("ieee" if knobs.runtime.interpret else "bf16x6")
"""Six bfloat16 products are as exact as float32. The interpreter only supports float32."""
ROWS = tl.constexpr(CHUNK)
"""Rows of a chunk."""
SLICE = tl.constexpr(32)
"""Elements that one matmul sums."""
NARROW = tl.constexpr(16)
"""The same for results of 64 columns."""


class ChunkRows(NamedTuple):
    """Inputs of `advance_states`, float32 unless noted."""

    keys: Tensor
    """``[rows, 2, key_heads, key_size]``: queries, keys."""
    values: Tensor
    """``[rows, value_heads, value_size]``. Replaced by results."""
    totals: Tensor
    """float64 ``[rows, value_heads]``: log of the decay since the start of the chunk."""
    systems: Tensor
    """``[rows, value_heads, 2, 64]``: by row of a chunk, weights of errors and of updates."""


@triton.jit
def matmul(x, y, total):
    return tl.dot(x, y, total, input_precision=PRECISION)


@triton.jit
def find_segment(starts_ptr, chunk, num_decodes, num_segments):
    """Return a chunk's segment and its first chunk; segments take ``rows // 64 + 2`` chunks or one less."""
    low, high = num_decodes, num_segments - 1
    while low < high:
        middle = (low + high + 1) // 2
        if (tl.load(starts_ptr + middle) - num_decodes) // ROWS + 2 * (middle - num_decodes) <= chunk:
            low = middle
        else:
            high = middle - 1
    return low, (tl.load(starts_ptr + low) - num_decodes) // ROWS + 2 * (low - num_decodes)


@triton.jit
def find_sequence(sequences_ptr, segment, num_decodes, num_sequences):
    low, high = num_decodes, num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(sequences_ptr + middle) <= segment:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def find_rows(starts_ptr, positions_ptr, sequences_ptr, chunk, num_decodes, num_segments, num_sequences):
    """The chunk's first row, end, and the first segment of its sequence."""
    segment, first_chunk = find_segment(starts_ptr, chunk, num_decodes, num_segments)
    begin, end = tl.load(starts_ptr + segment), tl.load(starts_ptr + segment + 1)
    first = begin - tl.load(positions_ptr + segment) % ROWS + (chunk - first_chunk) * ROWS
    sequence = find_sequence(sequences_ptr, segment, num_decodes, num_sequences)
    return tl.maximum(begin, first), tl.minimum(end, first + ROWS), tl.load(sequences_ptr + sequence)


@Kernel
@triton.jit(do_not_specialize=["num_decodes", "num_segments", "num_sequences"])
def prepare_rows(
    mixed_ptr, convolution_ptr, tail_ptr, keys_ptr, values_ptr, starts_ptr, sources_ptr, positions_ptr, sequences_ptr,
    num_decodes, num_segments, num_sequences, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, KERNEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Convolution, activation and norm of one chunk of a head. Programs need no order."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    KEYS: tl.constexpr = KEY_HEADS * KEY
    VALUES: tl.constexpr = HEADS * VALUE
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    WIDTH: tl.constexpr = CHANNELS + VALUES
    first, last, segment = find_rows(
        starts_ptr, positions_ptr, sequences_ptr, chunk, num_decodes, num_segments, num_sequences
    )
    if first < last:
        start, source = tl.load(starts_ptr + segment), tl.load(sources_ptr + segment)
        is_value = head >= 2 * KEY_HEADS
        size = tl.where(is_value, VALUE, KEY)
        begin = tl.where(is_value, 2 * KEYS + (head - 2 * KEY_HEADS) * VALUE, head * KEY)
        row, column = (first + tl.arange(0, ROWS))[:, None], tl.arange(0, BLOCK)[None, :]
        in_head = column < size
        inside = (row < last) & in_head
        x = silu(convolved(mixed_ptr, tail_ptr, convolution_ptr, source, row, start, begin + column, in_head, inside,
                           WIDTH, CHANNELS, KERNEL, False))  # fmt: skip
        if is_value:
            tl.store(values_ptr + row.to(tl.int64) * VALUES + begin - 2 * KEYS + column, x, inside)
        else:
            x *= tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None] * tl.where(head < KEY_HEADS, tl.rsqrt(KEY + 0.0), 1.0)
            tl.store(keys_ptr + row.to(tl.int64) * (2 * KEYS) + begin + column, x, inside)


@Kernel
@triton.jit(do_not_specialize=["num_decodes", "num_segments", "num_sequences"])
def solve_chunks(
    gates_ptr, decay_ptr, bias_ptr, keys_ptr, totals_ptr, systems_ptr, starts_ptr, positions_ptr, sequences_ptr,
    num_decodes, num_segments, num_sequences, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head. Programs need no order.

    Each row's update depends on earlier ones: a triangular system. Inverts ``I + lower``, doubling diagonal blocks of 2
    rows.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    KEYS: tl.constexpr = KEY_HEADS * KEY
    first, last, _ = find_rows(
        starts_ptr, positions_ptr, sequences_ptr, chunk, num_decodes, num_segments, num_sequences
    )
    if first < last:
        places, slices = tl.arange(0, ROWS), tl.arange(0, NARROW)
        rows = (first + places).to(tl.int64)
        in_chunk = first + places < last
        row, column = places[:, None], places[None, :]
        at_keys = keys_ptr + rows[:, None] * (2 * KEYS) + head // (HEADS // KEY_HEADS) * KEY + slices[None, :]
        known = tl.zeros([ROWS, ROWS], tl.float32)
        for k in range(0, KEY_BLOCK, NARROW):
            key = tl.load(at_keys + KEYS + k, in_chunk[:, None] & (k + slices < KEY)[None, :], 0.0)
            known = matmul(key, tl.trans(key), known)

        gates = gates_ptr + rows * (2 * HEADS) + head
        decay, bias = tl.load(decay_ptr + head), tl.load(bias_ptr + head)
        beta = tl.sigmoid(tl.load(gates, in_chunk, 0.0).to(tl.float32))
        logarithm = decay * softplus(tl.load(gates + HEADS, in_chunk, 0.0).to(tl.float32) + bias)
        total = tl.cumsum(tl.where(in_chunk, logarithm, 0.0).to(tl.float64), 0)
        tl.store(totals_ptr + rows * HEADS + head, total, in_chunk)
        between = tl.exp(tl.minimum((total[:, None] - total[None, :]).to(tl.float32), 0.0))
        lower = tl.where(row > column, known * between * beta[:, None], 0.0)

        # the inverse, and what it is multiplied by
        system = systems_ptr + (rows * HEADS + head)[:, None] * (2 * ROWS)
        inverse = tl.where(row == column, 1.0, tl.where((row ^ column) == 1, -lower, 0.0))
        half = 2
        while half < ROWS:
            # entries between the halves of each larger block
            apart = row ^ column
            tl.store(system + column, inverse, in_chunk[:, None])
            tl.store(
                system + ROWS + column, tl.where((apart >= half) & (apart < 2 * half), lower, 0.0), in_chunk[:, None]
            )
            tl.debug_barrier()
            product = tl.zeros([ROWS, ROWS], tl.float32)
            for j in range(0, ROWS, NARROW):
                below = first + j + slices
                others = systems_ptr + (below.to(tl.int64) * HEADS + head)[:, None] * (2 * ROWS) + column
                x = tl.load(system + j + slices[None, :], in_chunk[:, None], 0.0)
                product = matmul(x, tl.load(others + ROWS, (below < last)[:, None], 0.0), product)
            tl.debug_barrier()
            tl.store(system + ROWS + column, -product, in_chunk[:, None])
            tl.debug_barrier()
            for j in range(0, ROWS, NARROW):
                below = first + j + slices
                others = systems_ptr + (below.to(tl.int64) * HEADS + head)[:, None] * (2 * ROWS) + column
                x = tl.load(system + ROWS + j + slices[None, :], in_chunk[:, None], 0.0)
                inverse = matmul(x, tl.load(others, (below < last)[:, None], 0.0), inverse)
            tl.debug_barrier()
            half *= 2
        tl.store(system + column, inverse * beta[None, :], in_chunk[:, None])

        seen = tl.zeros([ROWS, ROWS], tl.float32)
        for k in range(0, KEY_BLOCK, NARROW):
            mask = in_chunk[:, None] & (k + slices < KEY)[None, :]
            seen = matmul(tl.load(at_keys + k, mask, 0.0), tl.trans(tl.load(at_keys + KEYS + k, mask, 0.0)), seen)
        total = tl.load(totals_ptr + rows * HEADS + head, in_chunk, 0.0)
        between = tl.exp(tl.minimum((total[:, None] - total[None, :]).to(tl.float32), 0.0))
        tl.store(system + ROWS + column, tl.where(row >= column, seen * between, 0.0), in_chunk[:, None])


@Kernel
@triton.jit(do_not_specialize=["num_decodes"])
def advance_states(
    keys_ptr, values_ptr, totals_ptr, systems_ptr, states_ptr, starts_ptr, sources_ptr, targets_ptr, positions_ptr,
    sequences_ptr, num_decodes, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """All chunks of one sequence, for some columns of one value head.

    Errors, updates and results replace the values, in this order. Chunks end at multiples of 64 and at the ends of
    segments. Matmuls load inputs in slices to save registers, and multiply float32 as six bfloat16 products.
    """
    sequence, head = num_decodes + tl.program_id(0), tl.program_id(1)
    KEYS: tl.constexpr = KEY_HEADS * KEY
    VALUES: tl.constexpr = HEADS * VALUE
    STATE: tl.constexpr = HEADS * KEY * VALUE
    places, slices = tl.arange(0, ROWS), tl.arange(0, SLICE)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_value = (columns < VALUE)[None, :]
    states = states_ptr + head * KEY * VALUE + slices[:, None] * VALUE + columns[None, :]
    at_head = keys_ptr + head // (HEADS // KEY_HEADS) * KEY + slices[None, :]

    segment, end = tl.load(sequences_ptr + sequence), tl.load(sequences_ptr + sequence + 1)
    source = tl.load(sources_ptr + segment).to(tl.int64)
    while segment < end:
        begin, last = tl.load(starts_ptr + segment), tl.load(starts_ptr + segment + 1)
        target = tl.load(targets_ptr + segment).to(tl.int64)
        chunk = begin - tl.load(positions_ptr + segment) % ROWS
        # a segment without rows copies its source
        while chunk < tl.maximum(last, begin + 1):
            first, stop = tl.maximum(begin, chunk), tl.minimum(last, chunk + ROWS)
            rows = (first + places).to(tl.int64)[:, None]
            in_chunk = (first + places < stop)[:, None]
            at_values = values_ptr + rows * VALUES + head * VALUE + columns[None, :]
            systems = systems_ptr + (rows * HEADS + head) * (2 * ROWS) + slices[None, :]
            grown = tl.exp(tl.load(totals_ptr + rows * HEADS + head, in_chunk, 0.0).to(tl.float32))
            known, recalled = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
            for k in range(0, KEY_BLOCK, SLICE):
                in_state = (k + slices < KEY)[:, None] & in_value & (source >= 0)
                state = tl.load(states + source * STATE + k * VALUE, in_state, 0.0)
                inside = in_chunk & (k + slices < KEY)[None, :]
                known = matmul(tl.load(at_head + rows * (2 * KEYS) + KEYS + k, inside, 0.0), state, known)
                recalled = matmul(tl.load(at_head + rows * (2 * KEYS) + k, inside, 0.0), state, recalled)
            error = tl.load(at_values, in_chunk & in_value, 0.0) - grown * known
            tl.store(at_values, error, in_chunk & in_value)
            tl.debug_barrier()
            updates = tl.zeros([ROWS, COLUMNS], tl.float32)
            for j in range(0, ROWS, SLICE):
                below = (first + j + slices).to(tl.int64)[:, None]
                errors = values_ptr + below * VALUES + head * VALUE + columns[None, :]
                errors = tl.load(errors, (below < stop) & in_value, 0.0)
                updates = matmul(tl.load(systems + j, in_chunk, 0.0), errors, updates)
            tl.debug_barrier()
            tl.store(at_values, updates, in_chunk & in_value)
            tl.debug_barrier()
            result = grown * recalled
            for j in range(0, ROWS, SLICE):
                below = (first + j + slices).to(tl.int64)[:, None]
                earlier = values_ptr + below * VALUES + head * VALUE + columns[None, :]
                earlier = tl.load(earlier, (below < stop) & in_value, 0.0)
                result = matmul(tl.load(systems + ROWS + j, in_chunk, 0.0), earlier, result)
            whole = tl.load(totals_ptr + (stop - 1).to(tl.int64) * HEADS + head, first < stop, 0.0)
            for k in range(0, KEY_BLOCK, SLICE):
                in_state = (k + slices < KEY)[:, None] & in_value
                state = tl.load(states + source * STATE + k * VALUE, in_state & (source >= 0), 0.0) * tl.exp(
                    whole.to(tl.float32)
                )
                for j in range(0, ROWS, SLICE):
                    below = (first + j + slices).to(tl.int64)[:, None]
                    to_end = (whole - tl.load(totals_ptr + below * HEADS + head, below < stop, 0.0)).to(tl.float32)
                    earlier = values_ptr + below * VALUES + head * VALUE + columns[None, :]
                    earlier = tl.load(earlier, (below < stop) & in_value, 0.0) * tl.exp(tl.minimum(to_end, 0.0))
                    key = at_head + below * (2 * KEYS) + KEYS + k
                    key = tl.load(key, (below < stop) & (k + slices < KEY)[None, :], 0.0)
                    state = matmul(tl.trans(key), earlier, state)
                tl.store(states + target * STATE + k * VALUE, state, in_state)
            tl.debug_barrier()
            tl.store(at_values, result, in_chunk & in_value)
            source = target
            chunk += ROWS
        segment += 1


def run_chunks(
    spec: DeltaSpec,
    weights: DeltaWeights,
    convolution: Tensor,
    inputs: tuple[Tensor, Tensor],
    cache: StateCache,
    rows: StateRows,
    results: Tensor,
) -> None:
    """Write results, before norm and gate, and states of all sequences after `rows.num_decodes`.

    convolution: float32 ``[kernel, channels]``. inputs: contiguous. results: float32 ``[rows, value_heads *
    value_size]``.
    """
    mixed, gates = inputs
    heads, key_heads, key, value = spec.num_value_heads, spec.num_key_heads, spec.key_size, spec.value_size
    decodes, sequences = rows.num_decodes, len(rows.sequences) - 1
    counts = decodes, len(rows.sources), sequences
    num_chunks = (len(mixed) - decodes) // CHUNK + 2 * (len(rows.sources) - decodes)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(len(mixed), *shape, dtype=dtype, device=mixed.device)

    keys, values, totals, systems = ChunkRows(
        empty(2, key_heads, key), results, empty(heads, dtype=torch.float64), empty(heads, 2, CHUNK)
    )
    of_heads = {"KEY_HEADS": key_heads, "HEADS": heads, "KEY": key}
    key_block = max(SLICE.value, next_power_of_2(key))
    prepare_rows[(num_chunks, 2 * key_heads + heads)](
        mixed, convolution, cache.tail, keys, values, rows.starts, rows.sources, rows.positions, rows.sequences,
        *counts, **of_heads, VALUE=value, KERNEL=spec.kernel, BLOCK=next_power_of_2(max(key, value)), num_warps=8,
    )  # fmt: skip
    solve_chunks[(num_chunks, heads)](
        gates, weights.decay, weights.dt_bias, keys, totals, systems, rows.starts, rows.positions, rows.sequences,
        *counts, **of_heads, KEY_BLOCK=key_block, num_warps=8,
    )  # fmt: skip
    advance_states[(sequences - decodes, heads, cdiv(value, _COLUMNS))](
        keys, values, totals, systems, cache.states, rows.starts, rows.sources, rows.targets, rows.positions,
        rows.sequences, decodes, **of_heads, VALUE=value, KEY_BLOCK=key_block, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip
