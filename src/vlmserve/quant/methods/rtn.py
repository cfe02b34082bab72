"""Round to nearest: each weight becomes the nearest of the values that its group can have. Needs no data."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.quant.grid import Grid

ELEMENTS_AT_ONCE = 4 * 1024**2
"""Rounding takes several times as much memory as float32 weights."""


def round_to_nearest(
    weight: Tensor,
    *,
    bits: int,
    group_size: int,
    symmetric: bool,
    zero_points: bool = False,
    largest: Callable[[Tensor], Tensor] | None = None,
) -> QuantizedWeight:
    """Quantize ``[out_features, in_features]``. See `Grid.fit`."""
    rows = max(1, ELEMENTS_AT_ONCE // max(1, weight.shape[1]))
    parts = []
    for some in torch.split(weight.detach(), rows):
        values = some.float()
        grid = Grid.fit(
            values, bits=bits, group_size=group_size, symmetric=symmetric, zero_points=zero_points, largest=largest
        )
        parts.append(grid.weight(grid.values(values)))
    return parts[0] if len(parts) == 1 else QuantizedWeight.join(parts)
