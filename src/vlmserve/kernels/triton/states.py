"""Layers with states: the gated delta rule for decodes, and gated short convolutions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vlmserve.kernels.states import DeltaWeights, StateCache, StateRows
from vlmserve.kernels.torch_states import TorchConvolution, TorchDelta
from vlmserve.kernels.triton import delta_chunks
from vlmserve.kernels.triton.host_math import next_power_of_2
from vlmserve.kernels.triton.launching import Kernel
from vlmserve.kernels.triton.state_inputs import convolved, load_input, silu, softplus
from vlmserve.layer_specs import ConvolutionSpec, DeltaSpec

_BLOCK = 256
"""Channels per program for convolutions and tails."""
_COLUMNS = 32
"""Columns of a state that a program keeps in registers."""
_MAX_KEY_SIZE = 256
"""Maximum rows of such a state."""


@Kernel
@triton.jit
def delta_rule(
    mixed_ptr, gates_ptr, convolution_ptr, decay_ptr, bias_ptr, states_ptr, tail_ptr, results_ptr, starts_ptr,
    sources_ptr, targets_ptr, sequences_ptr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, KERNEL: tl.constexpr, KEY_BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Keep columns of one value head's state in registers, over all rows of a sequence.

    results_ptr: float32, before norm and gate. Decode grids depend only on the numbers of rows and sequences, so CUDA
    graphs can capture them.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    KEYS: tl.constexpr = KEY_HEADS * KEY
    VALUES: tl.constexpr = HEADS * VALUE
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    WIDTH: tl.constexpr = CHANNELS + VALUES
    keys, values = tl.arange(0, KEY_BLOCK), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_key, in_value = keys < KEY, values < VALUE
    inside = in_key[:, None] & in_value[None, :]
    place = head * KEY * VALUE + keys[:, None] * VALUE + values[None, :]
    key_head = head // (HEADS // KEY_HEADS)
    decay, bias = tl.load(decay_ptr + head), tl.load(bias_ptr + head)

    segment, end = tl.load(sequences_ptr + sequence), tl.load(sequences_ptr + sequence + 1)
    start, source = tl.load(starts_ptr + segment), tl.load(sources_ptr + segment)
    state = tl.load(states_ptr + source.to(tl.int64) * (HEADS * KEY * VALUE) + place, inside & (source >= 0), 0.0)
    while segment < end:
        row, last = tl.load(starts_ptr + segment), tl.load(starts_ptr + segment + 1)
        while row < last:
            query = silu(convolved(mixed_ptr, tail_ptr, convolution_ptr, source, row, start, key_head * KEY + keys,
                                   in_key, in_key, WIDTH, CHANNELS, KERNEL, False))  # fmt: skip
            key = silu(convolved(mixed_ptr, tail_ptr, convolution_ptr, source, row, start, KEYS + key_head * KEY + keys,
                                 in_key, in_key, WIDTH, CHANNELS, KERNEL, False))  # fmt: skip
            value = silu(convolved(mixed_ptr, tail_ptr, convolution_ptr, source, row, start,
                                   2 * KEYS + head * VALUE + values, in_value, in_value, WIDTH, CHANNELS,
                                   KERNEL, False))  # fmt: skip
            query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * tl.rsqrt(KEY + 0.0)
            key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
            gates = gates_ptr + row.to(tl.int64) * (2 * HEADS) + head
            beta = tl.sigmoid(tl.load(gates).to(tl.float32))
            state *= tl.exp(decay * softplus(tl.load(gates + HEADS).to(tl.float32) + bias))
            update = beta * (value - tl.sum(key[:, None] * state, 0))
            state += key[:, None] * update[None, :]
            result = tl.sum(query[:, None] * state, 0)
            tl.store(results_ptr + row.to(tl.int64) * VALUES + head * VALUE + values, result, in_value)
            row += 1
        target = tl.load(targets_ptr + segment).to(tl.int64)
        tl.store(states_ptr + target * (HEADS * KEY * VALUE) + place, state, inside)
        segment += 1


@Kernel
@triton.jit
def gated_norm(
    results_ptr, mixed_ptr, norm_ptr, out_ptr, eps, CHANNELS: tl.constexpr, HEADS: tl.constexpr, VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """RMSNorm of one value head's result in a row, times ``silu(z)``."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    values = tl.arange(0, VALUE_BLOCK)
    inside = values < VALUE
    at = row * (HEADS * VALUE) + head * VALUE + values
    result = tl.load(results_ptr + at, inside, 0.0)
    gates = mixed_ptr + row * (CHANNELS + HEADS * VALUE) + CHANNELS + head * VALUE
    gate = tl.load(gates + values, inside, 0.0)
    scale = tl.rsqrt(tl.sum(result * result, 0) / VALUE + eps)
    out = result * scale * tl.load(norm_ptr + values, inside, 0.0).to(tl.float32) * silu(gate.to(tl.float32))
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), inside)


@Kernel
@triton.jit
def keep_tails(
    mixed_ptr, tail_ptr, starts_ptr, sources_ptr, targets_ptr, sequences_ptr, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store tails once all programs have read the previous ones."""
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    segment, end = tl.load(sequences_ptr + sequence), tl.load(sequences_ptr + sequence + 1)
    start, source = tl.load(starts_ptr + segment), tl.load(sources_ptr + segment).to(tl.int64)
    while segment < end:
        last, target = tl.load(starts_ptr + segment + 1), tl.load(targets_ptr + segment).to(tl.int64)
        for place in tl.static_range(KERNEL - 1):
            row = last + place - (KERNEL - 1)
            x = load_input(mixed_ptr, tail_ptr, source, row, start, channel, inside, WIDTH, CHANNELS, KERNEL, GATED)
            tl.store(tail_ptr + (target * (KERNEL - 1) + place) * CHANNELS + channel, x, inside)
        start, source = last, target
        segment += 1


@Kernel
@triton.jit(do_not_specialize=["num_sequences"])
def convolve_rows(
    mixed_ptr, weight_ptr, tail_ptr, out_ptr, starts_ptr, sources_ptr, sequences_ptr, num_sequences,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, SEQUENCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    numbers = tl.arange(0, SEQUENCES)
    firsts = tl.load(sequences_ptr + numbers, numbers < num_sequences, 0)
    begun = (numbers < num_sequences) & (tl.load(starts_ptr + firsts) <= row)
    segment = tl.load(sequences_ptr + tl.sum(begun.to(tl.int32), 0) - 1)
    start, source = tl.load(starts_ptr + segment), tl.load(sources_ptr + segment)
    total = convolved(
        mixed_ptr,
        tail_ptr,
        weight_ptr,
        source,
        row,
        start,
        channel,
        inside,
        inside,
        3 * CHANNELS,
        CHANNELS,
        KERNEL,
        True,
    )
    factor = tl.load(mixed_ptr + row.to(tl.int64) * (3 * CHANNELS) + CHANNELS + channel, inside, 0.0).to(tl.float32)
    out = (factor * total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row.to(tl.int64) * CHANNELS + channel, out, inside)


def unsupported_reason(spec: DeltaSpec) -> str | None:
    if spec.key_size > _MAX_KEY_SIZE:
        return f"keys of {spec.key_size} elements are larger than {_MAX_KEY_SIZE}"
    return None


class TritonDelta:
    """torch computes steps with drafts."""

    def __init__(self, spec: DeltaSpec, weights: DeltaWeights) -> None:
        self._spec, self._weights = spec, weights
        self._with_drafts = TorchDelta(spec, weights)
        self._convolution = weights.convolution.float().T.contiguous()

    def __call__(self, mixed: Tensor, gates: Tensor, cache: StateCache, rows: StateRows) -> Tensor:
        if rows.drafts is not None:
            return self._with_drafts(mixed, gates, cache, rows)
        spec, weights, mixed = self._spec, self._weights, mixed.contiguous()
        assert cache.states is not None
        heads, size = spec.num_value_heads, spec.value_size
        gates = gates.contiguous()
        results = torch.empty(len(mixed), spec.values, dtype=torch.float32, device=mixed.device)
        sequences = len(rows.sequences) - 1
        decodes = rows.num_decodes
        if decodes:
            self._run_rows(mixed, gates, cache, rows, results, decodes)
        if decodes < sequences:
            delta_chunks.run_chunks(spec, weights, self._convolution, (mixed, gates), cache, rows, results)
        output = torch.empty(len(mixed), spec.values, dtype=mixed.dtype, device=mixed.device)
        if len(mixed):
            gated_norm[(len(mixed), heads)](
                results,
                mixed,
                weights.norm,
                output,
                weights.eps,
                CHANNELS=spec.channels,
                HEADS=heads,
                VALUE=size,
                VALUE_BLOCK=next_power_of_2(size),
                num_warps=1,
            )
        _store_tails(mixed, cache, rows, spec.channels + spec.values, spec.channels, spec.kernel, gated=False)
        return output

    def _run_rows(
        self, mixed: Tensor, gates: Tensor, cache: StateCache, rows: StateRows, results: Tensor, sequences: int
    ) -> None:
        spec, weights = self._spec, self._weights
        delta_rule[(sequences, spec.num_value_heads, triton.cdiv(spec.value_size, _COLUMNS))](
            mixed,
            gates,
            self._convolution,
            weights.decay,
            weights.dt_bias,
            cache.states,
            cache.tail,
            results,
            rows.starts,
            rows.sources,
            rows.targets,
            rows.sequences,
            KEY_HEADS=spec.num_key_heads,
            HEADS=spec.num_value_heads,
            KEY=spec.key_size,
            VALUE=spec.value_size,
            KERNEL=spec.kernel,
            KEY_BLOCK=next_power_of_2(spec.key_size),
            COLUMNS=_COLUMNS,
            num_warps=4,
        )


class TritonConvolution:
    """torch computes steps with drafts."""

    def __init__(self, spec: ConvolutionSpec, weight: Tensor) -> None:
        self._spec, self._weight = spec, weight.float().T.contiguous()
        self._with_drafts = TorchConvolution(weight)

    def __call__(self, mixed: Tensor, cache: StateCache, rows: StateRows) -> Tensor:
        if rows.drafts is not None:
            return self._with_drafts(mixed, cache, rows)
        channels, kernel, mixed = self._spec.channels, self._spec.kernel, mixed.contiguous()
        output = torch.empty(len(mixed), channels, dtype=mixed.dtype, device=mixed.device)
        sequences = len(rows.sequences) - 1
        if len(mixed):
            convolve_rows[(len(mixed), triton.cdiv(channels, _BLOCK))](
                mixed,
                self._weight,
                cache.tail,
                output,
                rows.starts,
                rows.sources,
                rows.sequences,
                sequences,
                CHANNELS=channels,
                KERNEL=kernel,
                SEQUENCES=next_power_of_2(sequences),
                BLOCK=_BLOCK,
                num_warps=1,
            )
        _store_tails(mixed, cache, rows, 3 * channels, channels, kernel, gated=True)
        return output


def _store_tails(
    mixed: Tensor, cache: StateCache, rows: StateRows, width: int, channels: int, kernel: int, *, gated: bool
) -> None:
    keep_tails[(len(rows.sequences) - 1, triton.cdiv(channels, _BLOCK))](
        mixed,
        cache.tail,
        rows.starts,
        rows.sources,
        rows.targets,
        rows.sequences,
        WIDTH=width,
        CHANNELS=channels,
        KERNEL=kernel,
        GATED=gated,
        BLOCK=_BLOCK,
        num_warps=1,
    )
