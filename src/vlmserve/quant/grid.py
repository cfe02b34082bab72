"""The evenly spaced values of a group's weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NotRequired, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.kernels.quantized import QuantizedWeight

Shrinks = tuple[Tensor | float, Tensor | float]
"""Factors of the lower and upper ends of ranges: numbers, or ``[out_features, groups]``."""


class GridOptions(TypedDict):
    """Fields of `GridKind`."""

    bits: int
    group_size: int
    symmetric: bool
    zero_points: NotRequired[bool]


@dataclass(frozen=True, slots=True)
class Grid:
    """Values ``scale * u + minimum`` for integers `lowest` <= u < ``2 ** bits``.

    bits: 8 or 4. group_size: inputs that share scale and minimum. scales, minimums: ``[out_features, groups]``; in
    4-bit grids bfloat16, or minimums are multiples of scales.
    """

    bits: int
    group_size: int
    scales: Tensor
    minimums: Tensor

    @classmethod
    def fit(
        cls, weight: Tensor, *, largest: Callable[[Tensor], Tensor] | None = None, **options: Unpack[GridOptions]
    ) -> Grid:
        """largest: turns a shard's largest magnitudes of outputs, ``[out_features, 1]``, into the whole weight's."""
        kind = GridKind(**options)
        low, high = kind.ranges(weight)
        if largest is not None and kind.bits == 8:
            high = largest(torch.maximum(low.abs(), high.abs()))
            low = -high
        return kind.between(low, high, weight.shape[1])

    @property
    def lowest(self) -> int:
        """8-bit grids are symmetric."""
        return 1 if self.bits == 8 else 0

    @property
    def highest(self) -> int:
        return (1 << self.bits) - 1

    def columns(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Each ``[out_features, inputs]``."""
        groups = inputs // self.group_size
        return self.scales[:, groups], self.minimums[:, groups]

    def values(self, weight: Tensor) -> Tensor:
        """The nearest u, uint8 ``[out_features, in_features]``."""
        return (
            self._steps(in_groups(weight, self.group_size))
            .to(torch.uint8)
            .flatten(1)[:, : weight.shape[1]]
            .contiguous()
        )

    def weight(self, values: Tensor) -> QuantizedWeight:
        return QuantizedWeight(self.bits, self.group_size, values, self.scales.float(), self.minimums.float())

    def nearest(self, weight: Tensor) -> Tensor:
        return self.nearest_of(in_groups(weight, self.group_size)).flatten(1)[:, : weight.shape[1]]

    def nearest_of(self, grouped: Tensor) -> Tensor:
        """``[out_features, groups, group_size]``; ``[out_features, 1, group_size]`` broadcasts."""
        return self._steps(grouped).mul_(self.scales[..., None]).add_(self.minimums[..., None])

    def _steps(self, grouped: Tensor) -> Tensor:
        above = grouped - self.minimums[..., None]
        return above.div_(self.scales[..., None]).round_().clamp_(self.lowest, self.highest)


@dataclass(frozen=True, slots=True)
class GridKind:
    bits: int
    """8: one symmetric scale per output; other fields have no effect. 4: groups of `group_size` inputs; the last may be
    smaller.
    """
    group_size: int
    symmetric: bool
    """Zero is the middle of the range; otherwise the range spans a group's weights."""
    zero_points: bool = False
    """Zero is one of the values."""

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"weights have 8 or 4 bits, not {self.bits}")

    def ranges(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Smallest and largest weights, each ``[out_features, groups]``."""
        grouped = in_groups(weight, self.group_size if self.bits == 4 else weight.shape[1])
        low, high = grouped.aminmax(dim=2)
        return low, high

    def between(self, low: Tensor, high: Tensor, in_features: int) -> Grid:
        """low, high: ``[out_features, groups]``."""
        if self.symmetric or self.bits == 8:
            bounds = torch.maximum(low.abs(), high.abs())
            if self.bits == 8:
                scales = _nonzero(bounds / 127)
                return Grid(8, in_features, scales, -128 * scales)
            # Kernels store bfloat16: choose u for rounded scales and minimums.
            scales = _nonzero(_rounded(bounds / 7.5))
            return Grid(4, self.group_size, scales, -8 * scales)
        if self.zero_points:
            low, high = low.clamp(max=0), high.clamp(min=0)
            scales = _nonzero(_rounded((high - low) / 15))
            return Grid(4, self.group_size, scales, (low / scales).round() * scales)
        return Grid(4, self.group_size, _nonzero(_rounded((high - low) / 15)), _rounded(low))

    def fit(self, weight: Tensor, shrinks: Shrinks = (1.0, 1.0)) -> Grid:
        low, high = self.ranges(weight)
        return self.between(low * shrinks[0], high * shrinks[1], weight.shape[1])


def in_groups(weight: Tensor, group_size: int) -> Tensor:
    """Pad with zeros to ``[out_features, groups, group_size]``."""
    missing = -weight.shape[1] % group_size
    padded = F.pad(weight, (0, missing)) if missing else weight.contiguous()
    return padded.view(len(weight), padded.shape[1] // group_size, group_size)


def _rounded(scales: Tensor) -> Tensor:
    return scales.bfloat16().to(scales.dtype)


def _nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, torch.ones_like(scales))
