"""The values that weights of few bits can have: of each group of an output's inputs, evenly spaced ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.kernels.quantized import QuantizedWeight


@dataclass(frozen=True, slots=True)
class Grid:
    """Values ``scale * u + minimum`` with whole u from `lowest` to ``2 ** bits - 1``.

    bits: 8 or 4. group_size: inputs of an output that share a scale and a minimum. scales, minimums: floats
    ``[out_features, groups]``; of 4 bits they are numbers that bfloat16 has, or a whole number of steps from zero.
    """

    bits: int
    group_size: int
    scales: Tensor
    minimums: Tensor

    @classmethod
    def fit(
        cls,
        weight: Tensor,
        *,
        bits: int,
        group_size: int,
        symmetric: bool,
        zero_points: bool = False,
        shrink: Tensor | float = 1.0,
        largest: Callable[[Tensor], Tensor] | None = None,
    ) -> Grid:
        """The grid whose range is that of a weight ``[out_features, in_features]``.

        bits: 8 takes one symmetric scale for each output, whatever the rest says; 4 takes groups of `group_size` inputs
        (the last one may be smaller). symmetric: zero in the middle of the range; otherwise the range goes from the
        least weight of a group to its largest. zero_points: the range contains zero, a whole number of steps from its
        begin. shrink: of ranges, 1 or less, one for all or ``[out_features, groups]``.
        largest: from the largest weights of outputs, ``[out_features, 1]``, to those of a weight of which this one has
        some inputs only.
        """
        if bits == 8:
            bounds = weight.abs().amax(1, keepdim=True)
            scales = _nonzero((bounds if largest is None else largest(bounds)) * shrink / 127)
            return cls(8, weight.shape[1], scales, -128 * scales)
        if bits != 4:
            raise ValueError(f"weights have 8 or 4 bits, not {bits}")
        grouped = in_groups(weight, group_size)
        # The kernel keeps scales and minimums in bfloat16: values are fitted to the rounded ones.
        if symmetric:
            scales = _nonzero(_rounded(grouped.abs().amax(2) * shrink / 7.5))
            return cls(4, group_size, scales, -8 * scales)
        low, high = grouped.amin(2) * shrink, grouped.amax(2) * shrink
        if zero_points:
            low, high = low.clamp(max=0), high.clamp(min=0)
            scales = _nonzero(_rounded((high - low) / 15))
            return cls(4, group_size, scales, (low / scales).round() * scales)
        return cls(4, group_size, _nonzero(_rounded((high - low) / 15)), _rounded(low))

    @property
    def lowest(self) -> int:
        """The least u. Of 256 values as many lie above zero as below."""
        return 1 if self.bits == 8 else 0

    @property
    def highest(self) -> int:
        return (1 << self.bits) - 1

    @property
    def groups(self) -> int:
        """Of each output."""
        return self.scales.shape[1]

    def columns(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Scales and minimums of some inputs, ``[out_features, inputs]`` each."""
        groups = inputs // self.group_size
        return self.scales[:, groups], self.minimums[:, groups]

    def values(self, weight: Tensor) -> Tensor:
        """The u of the nearest values to a weight, uint8 ``[out_features, in_features]``."""
        out_features, in_features = weight.shape
        grouped = in_groups(weight, self.group_size)
        steps = ((grouped - self.minimums[..., None]) / self.scales[..., None]).round_()
        values = steps.clamp_(self.lowest, self.highest).to(torch.uint8)
        return values.view(out_features, -1)[:, :in_features].contiguous()

    def weight(self, values: Tensor) -> QuantizedWeight:
        """The weight of uint8 values ``[out_features, in_features]``."""
        return QuantizedWeight(self.bits, self.group_size, values, self.scales.float(), self.minimums.float())

    def nearest(self, weight: Tensor) -> Tensor:
        """The nearest values to a weight, in its type."""
        grouped = self.values(weight)
        scales, minimums = self.columns(torch.arange(weight.shape[1], device=weight.device))
        return torch.addcmul(minimums, scales, grouped.to(weight.dtype))


def in_groups(weight: Tensor, group_size: int) -> Tensor:
    """``[out_features, in_features]`` as ``[out_features, groups, group_size]``, the last group filled with zeros."""
    padded = F.pad(weight, (0, -weight.shape[1] % group_size))
    return padded.view(len(weight), padded.shape[1] // group_size, group_size)


def _rounded(scales: Tensor) -> Tensor:
    return scales.bfloat16().to(scales.dtype)


def _nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, torch.ones_like(scales))
