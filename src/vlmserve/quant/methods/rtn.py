"""Round to nearest: each weight becomes the nearest of the values that its group can have. Needs no data."""

from __future__ import annotations

from torch import Tensor

from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.quant.grid import Grid


def round_to_nearest(weight: Tensor, *, bits: int, group_size: int, symmetric: bool) -> QuantizedWeight:
    """Quantize ``[out_features, in_features]``. See `Grid.fit`."""
    weight = weight.detach().float()
    grid = Grid.fit(weight, bits=bits, group_size=group_size, symmetric=symmetric)
    return grid.weight(grid.values(weight))
