"""Random inputs of kernels with states."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from vlmserve.kernels.states import ConvolutionKernel, DeltaKernel, Drafts, Segments, StateCache, StateRows
from vlmserve.layer_specs import ConvolutionSpec, DeltaSpec


def width(spec: DeltaSpec | ConvolutionSpec) -> int:
    """Columns of all inputs side by side."""
    if isinstance(spec, ConvolutionSpec):
        return 3 * spec.channels
    return spec.channels + spec.values + 2 * spec.num_value_heads


def inputs_of(spec: DeltaSpec | ConvolutionSpec, rows: Tensor) -> tuple[Tensor, ...]:
    """Arguments of a kernel from ``[tokens, width]``: the gates of a delta rule are an argument of their own."""
    if isinstance(spec, ConvolutionSpec):
        return (rows,)
    return rows[:, : spec.channels + spec.values], rows[:, spec.channels + spec.values :]


def run_with_drafts(
    kernel: DeltaKernel | ConvolutionKernel,
    spec: DeltaSpec | ConvolutionSpec,
    mixed: Tensor,
    cache: StateCache,
    steps: Iterable[tuple[int, int]],
) -> Tensor:
    """Compute a sequence's rows after a first one in slot 2, beside a decode that slot 1 starts from zeros each time.

    steps: numbers of drafts, and how many of them are right; then one row in each step. Returns the sequence's results.
    """
    first = StateRows.of(Segments.of_chunks([(0, 1)], [2]))
    results, done, accepted = [kernel(*inputs_of(spec, mixed[:1]), cache, first)], 1, 0
    for count, right in itertools.chain(steps, itertools.repeat((0, 0))):
        if done == len(mixed):
            return torch.cat(results)
        count = max(0, min(count, len(mixed) - done - 2))  # the last step changes the state
        right = min(right, count)
        chunks, drafts = [(0, 1), (done, done + 1 + count)], {1: Drafts(1, accepted, count)}
        rows = StateRows.of(Segments.of_chunks(chunks, [1, 2], drafts=drafts))
        wrong = torch.randn(count - right, mixed.shape[1]).to(mixed.dtype)
        taken = torch.cat([mixed[:1], mixed[done : done + 1 + right], wrong])
        output = kernel(*inputs_of(spec, taken), cache, rows)
        assert torch.allclose(output[0].float(), results[0][0].float(), atol=2e-2), "others are unaffected"
        results.append(output[1 : 2 + right])
        done, accepted = done + 1 + right, right
    raise AssertionError("steps never end")
