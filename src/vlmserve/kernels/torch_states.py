"""Layers with states in plain torch: the reference, for any device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
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
        own: Tensor | None = None
        if rows.drafts is not None:
            joined, rows, own = with_accepted(torch.cat([qkv, gates], 1), cache, rows)
            qkv, gates = torch.split(joined, [spec.channels, 2 * spec.num_value_heads], 1)
        b, a = gates.chunk(2, 1)
        query, key, value = self._heads(F.silu(causal_convolution(qkv, weights.convolution, cache.tail, rows)))
        decay = weights.decay * F.softplus(a.float() + weights.dt_bias)
        inputs = RuleRows(query, key, value, decay, b.float().sigmoid())
        output = torch.empty_like(value)
        if decodes := rows.num_decodes:
            states = _read(cache.states, rows.sources[:decodes])
            output[:decodes], states = recurrent_rule(inputs.rows(0, decodes), states)
            cache.states.index_copy_(0, rows.targets[:decodes].long(), states)
        for start, end, source, target, position, num_drafts in _segments(rows, decodes):
            state = torch.zeros_like(cache.states[0]) if source == NO_SLOT else cache.states[source]
            while start < end - num_drafts:
                last = min(end - num_drafts, start + CHUNK - position % CHUNK)
                output[start:last], state = chunked_rule(inputs.rows(start, last), state)
                position += last - start
                start = last
            cache.states[target] = state
            if num_drafts:
                output[start:end], _ = chunked_rule(inputs.rows(start, end), state)
        output = output if own is None else output[own]
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
        x = before * x
        if rows.drafts is None:
            convolved = causal_convolution(x, self._weight, cache.tail, rows)
        else:
            x, rows, own = with_accepted(x, cache, rows)
            convolved = causal_convolution(x, self._weight, cache.tail, rows)[own]
        return (after.float() * convolved).to(mixed.dtype)


def with_accepted(x: Tensor, cache: StateCache, rows: StateRows) -> tuple[Tensor, StateRows, Tensor]:
    """Insert accepted drafts of the last step before each segment's rows, then keep the drafts of this step.

    x: ``[rows, draft_width]``. Returns the rows, their segments, and the indices of x's rows in them.
    """
    assert cache.drafts is not None
    host, counts = rows.host, np.diff(rows.host.starts)
    assert host.drafts is not None
    firsts, accepted, num_drafts = host.drafts.T
    before = accepted.cumsum(dtype=np.int32)
    parts = []
    for place, count, start, end in zip(firsts, accepted, host.starts, host.starts[1:], strict=False):
        parts += [cache.drafts[place : place + count], x[start:end]]
    own = torch.from_numpy(np.arange(len(x)) + np.repeat(before, counts)).to(x.device)
    joined = torch.cat(parts)
    for place, count, end in zip(firsts, num_drafts, host.starts[1:], strict=True):
        cache.drafts[place : place + count] = x[end - count : end]
    shifted = host._replace(
        starts=host.starts + np.append(before - accepted, before[-1:]),
        positions=host.positions - accepted,
        drafts=np.stack([firsts, np.zeros_like(accepted), num_drafts], 1),
    )
    return joined, StateRows.of(shifted, x.device), own


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
    for start, end, source, target, _, num_drafts in _segments(rows, decodes):
        before = x.new_zeros(size, x.shape[1]) if source == NO_SLOT else tails[source]
        history = torch.cat([before, x[start:end]])
        windows = torch.stack([history[tap : tap + end - start] for tap in range(size + 1)])
        output[start:end] = _weighted(windows, taps)
        reached = len(history) - num_drafts
        tails[target] = history[reached - size : reached]
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


def _segments(rows: StateRows, decodes: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Yield first row, last row, source, target, position and drafts of segments after the decodes."""
    host = rows.host
    drafts = np.zeros(len(host.sources), np.int32) if host.drafts is None else host.drafts[:, 2]
    arrays = host.starts, host.starts[1:], host.sources, host.targets, host.positions, drafts
    yield from zip(*(one[decodes:].tolist() for one in arrays), strict=False)
