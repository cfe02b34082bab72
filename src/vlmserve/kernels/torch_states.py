"""Layers with states in plain torch: the reference, for any device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.kernels.states import DeltaWeights, StateCache, StateRows
from vlmserve.layer_specs import CHUNK, NO_SLOT, DeltaSpec

_NORM_EPS = 1e-6
"""Added to the sum of squares of queries and keys."""


class RuleRows(NamedTuple):
    """The first axis is sequences or tokens."""

    query: Tensor
    """``[rows, heads, key_size]``."""
    key: Tensor
    value: Tensor
    """``[rows, heads, value_size]``."""
    decay: Tensor
    """``[rows, heads]``: log of the state's decay factor."""
    beta: Tensor
    """``[rows, heads]``: step size of the update."""

    def rows(self, first: int, last: int) -> RuleRows:
        return RuleRows(*(tensor[first:last] for tensor in self))


class TorchDelta:
    """Decodes run the recurrence in one batch, prompts chunk by chunk."""

    def __init__(self, spec: DeltaSpec, weights: DeltaWeights) -> None:
        self._spec, self._weights = spec, weights

    def __call__(self, mixed: Tensor, gates: Tensor, cache: StateCache, rows: StateRows) -> Tensor:
        spec, weights = self._spec, self._weights
        assert cache.states is not None
        qkv, z = torch.split(mixed, [spec.channels, spec.values], 1)
        b, a = gates.chunk(2, 1)
        query, key, value = self._heads(F.silu(causal_convolution(qkv, weights.convolution, cache.tail, rows)))
        decay = weights.decay * F.softplus(a.float() + weights.dt_bias)
        inputs = RuleRows(query, key, value, decay, b.float().sigmoid())
        output = torch.empty_like(value)
        if decodes := rows.num_decodes:
            states = _read(cache.states, rows.sources[:decodes])
            output[:decodes], states = recurrent_rule(inputs.rows(0, decodes), states)
            cache.states.index_copy_(0, rows.targets[:decodes].long(), states)
        for start, end, source, target, position in _segments(rows, decodes):
            state = torch.zeros_like(cache.states[0]) if source == NO_SLOT else cache.states[source]
            while start < end:
                last = min(end, start + CHUNK - position % CHUNK)
                output[start:last], state = chunked_rule(inputs.rows(start, last), state)
                position += last - start
                start = last
            cache.states[target] = state
        normed = output * torch.rsqrt(output.square().mean(-1, keepdim=True) + weights.eps) * weights.norm.float()
        return (normed.flatten(1) * F.silu(z.float())).to(mixed.dtype)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[rows, value_heads, size]`` each."""
        spec = self._spec
        query, key, value = torch.split(qkv, [spec.keys, spec.keys, spec.values], 1)
        both = torch.stack([query, key]).view(2, len(qkv), spec.num_key_heads, spec.key_size)
        both = both * torch.rsqrt(both.square().sum(-1, keepdim=True) + _NORM_EPS)
        query, key = both.repeat_interleave(spec.num_value_heads // spec.num_key_heads, 2)
        return query * spec.key_size**-0.5, key, value.view(len(qkv), spec.num_value_heads, spec.value_size)


class TorchConvolution:
    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, mixed: Tensor, cache: StateCache, rows: StateRows) -> Tensor:
        before, after, x = mixed.chunk(3, 1)
        return (after.float() * causal_convolution(before * x, self._weight, cache.tail, rows)).to(mixed.dtype)


def causal_convolution(x: Tensor, weight: Tensor, tails: Tensor, rows: StateRows) -> Tensor:
    """Convolve ``[rows, channels]`` depthwise in float32, and update tails.

    Taps are added in a fixed order, so chunking does not change results.
    """
    taps = weight.float().T.contiguous()
    size = len(taps) - 1
    output = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if decodes := rows.num_decodes:
        history = torch.cat([_read(tails, rows.sources[:decodes]), x[:decodes, None]], 1)
        output[:decodes] = _weighted(history.transpose(0, 1), taps)
        tails.index_copy_(0, rows.targets[:decodes].long(), history[:, 1:])
    for start, end, source, target, _ in _segments(rows, decodes):
        before = x.new_zeros(size, x.shape[1]) if source == NO_SLOT else tails[source]
        history = torch.cat([before, x[start:end]])
        windows = torch.stack([history[tap : tap + end - start] for tap in range(size + 1)])
        output[start:end] = _weighted(windows, taps)
        tails[target] = history[len(history) - size :]
    return output


def recurrent_rule(rows: RuleRows, states: Tensor) -> tuple[Tensor, Tensor]:
    """The gated delta rule for one token of each sequence.

    states: ``[sequences, heads, key_size, value_size]``. Returns results shaped like values, and the new states.
    """
    query, key, value, decay, beta = rows
    states = states * decay.exp()[..., None, None]
    known = (key[..., None, :] @ states)[..., 0, :]
    states = states + key[..., None] * ((value - known) * beta[..., None])[..., None, :]
    return (query[..., None, :] @ states)[..., 0, :], states


def chunked_rule(rows: RuleRows, state: Tensor) -> tuple[Tensor, Tensor]:
    """The gated delta rule for consecutive tokens, by matmuls (https://arxiv.org/abs/2412.06464).

    state: ``[heads, key_size, value_size]``. Returns results shaped like values, and the new state.
    """
    query, key, value = (tensor.transpose(0, 1) for tensor in (rows.query, rows.key, rows.value))
    total, beta = rows.decay.T.cumsum(1), rows.beta.T[..., None]
    future = torch.ones(len(rows.beta), len(rows.beta), dtype=torch.bool, device=state.device).triu(1)
    between = (total[:, :, None] - total[:, None]).masked_fill(future, -torch.inf).exp()
    from_start = total.exp()[..., None]
    # updates depend on earlier tokens: a triangular system
    system = (key * beta) @ key.mT * between
    solved = torch.linalg.solve_triangular(
        system, torch.cat([value * beta, key * beta * from_start], 2), upper=False, unitriangular=True
    )
    updates, read = torch.split(solved, [value.shape[2], key.shape[2]], 2)
    updates = updates - read @ state
    output = (query * from_start) @ state + (query @ key.mT * between) @ updates
    to_end = (total[:, -1:] - total).exp()[..., None]
    state = state * from_start[:, -1:] + (key * to_end).mT @ updates
    return output.transpose(0, 1), state


def _read(slots: Tensor, sources: Tensor) -> Tensor:
    """Return zeros for `NO_SLOT`."""
    shape = (-1, *[1] * (slots.ndim - 1))
    return slots.index_select(0, sources.clamp(min=0)).masked_fill((sources == NO_SLOT).view(shape), 0)


def _weighted(windows: Tensor, taps: Tensor) -> Tensor:
    """windows: ``[kernel, rows, channels]``. taps: ``[kernel, channels]``."""
    total = windows[0].float() * taps[0]
    for window, tap in zip(windows[1:], taps[1:], strict=True):
        total = total + window.float() * tap
    return total


def _segments(rows: StateRows, decodes: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield first row, last row, source, target and position of segments after the decodes."""
    starts, sources, targets, positions, _ = (one.tolist() for one in rows.host)
    yield from zip(
        starts[decodes:], starts[decodes + 1 :], sources[decodes:], targets[decodes:], positions[decodes:], strict=False
    )
