"""Rounds to the nearest value of a group's grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor

from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.quant.grid import Grid, GridOptions

CACHED_ELEMENTS = 256 * 1024
"""Weights that a CPU rounds at once: rounding takes several times their float32 memory, which should stay in caches."""
ELEMENTS_AT_ONCE = 4 * 1024**2
"""Weights that other devices round at once."""


class RowRounder:
    """A weight that is rounded as its rows arrive, so that it is never in memory as a whole."""

    def __init__(
        self,
        shape: tuple[int, int],
        *,
        largest: Callable[[Tensor], Tensor] | None = None,
        device: torch.device | None = None,
        **options: Unpack[GridOptions],
    ) -> None:
        """largest: see `Grid.fit`."""
        outputs, inputs = shape
        self._bits, self._group_size = options["bits"], inputs if options["bits"] == 8 else options["group_size"]
        self._options, self._largest = options, largest
        self._values = torch.empty(shape, dtype=torch.uint8, device=device)
        self._scales, self._minimums = torch.empty(2, outputs, -(-inputs // self._group_size), device=device)

    def write(self, first: int, weight: Tensor) -> None:
        """weight: ``[rows, in_features]``, from row `first` on."""
        at_once = CACHED_ELEMENTS if self._values.device.type == "cpu" else ELEMENTS_AT_ONCE
        for rows in torch.split(weight.detach(), max(1, at_once // max(1, weight.shape[1]))):
            own = slice(first, first + len(rows))
            floats = rows.to(self._values.device).float()
            grid = Grid.fit(floats, largest=self._largest, **self._options)
            self._values[own] = grid.values(floats)
            self._scales[own], self._minimums[own] = grid.scales, grid.minimums
            first += len(rows)

    def weight(self) -> QuantizedWeight:
        return QuantizedWeight(self._bits, self._group_size, self._values, self._scales, self._minimums)


def round_to_nearest(weight: Tensor, **options: Unpack[GridOptions]) -> QuantizedWeight:
    outputs, inputs = weight.shape
    rounded = RowRounder((outputs, inputs), device=weight.device, **options)
    rounded.write(0, weight)
    return rounded.weight()
