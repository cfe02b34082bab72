"""Rounds to the nearest value of a group's grid."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.quant.grid import Grid

ELEMENTS_AT_ONCE = 1024**2
"""Weights rounded at once: rounding takes several times their float32 memory."""


def round_to_nearest(
    weight: Tensor,
    *,
    bits: int,
    group_size: int,
    symmetric: bool,
    zero_points: bool = False,
    largest: Callable[[Tensor], Tensor] | None = None,
) -> QuantizedWeight:
    rows = max(1, ELEMENTS_AT_ONCE // max(1, weight.shape[1]))
    values = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    grids = []
    for some, target in zip(torch.split(weight.detach(), rows), torch.split(values, rows), strict=True):
        floats = some.float()
        grids.append(
            Grid.fit(
                floats, bits=bits, group_size=group_size, symmetric=symmetric, zero_points=zero_points, largest=largest
            )
        )
        target.copy_(grids[-1].values(floats))
    scales = torch.cat([grid.scales for grid in grids])
    minimums = torch.cat([grid.minimums for grid in grids])
    return Grid(bits, grids[0].group_size, scales, minimums).weight(values)
