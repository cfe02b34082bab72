"""Random inputs of kernels with states."""

from __future__ import annotations

from torch import Tensor

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
