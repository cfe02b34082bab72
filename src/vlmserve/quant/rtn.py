"""Round to nearest: each weight becomes the nearest of the values that its group can have. Needs no data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.kernels.quantized import QuantizedWeight


def round_to_nearest(weight: Tensor, *, bits: int, group_size: int, symmetric: bool) -> QuantizedWeight:
    """Quantize ``[out_features, in_features]``.

    bits: 8 takes one symmetric scale for each output, whatever the rest says; 4 takes groups of `group_size` inputs
    (the last one may be smaller). symmetric: zero in the middle of the range; otherwise the range goes from the least
    weight of a group to its largest.
    """
    weight = weight.detach().float()
    if bits == 8:
        scales = _nonzero(weight.abs().amax(1, keepdim=True) / 127)
        values = (weight / scales).round_().clamp_(-127, 127).add_(128).to(torch.uint8)
        return QuantizedWeight(8, weight.shape[1], values, scales, -128 * scales)
    if bits != 4:
        raise ValueError(f"weights have 8 or 4 bits, not {bits}")
    out_features, in_features = weight.shape
    groups = -(-in_features // group_size)
    grouped = F.pad(weight, (0, groups * group_size - in_features)).view(out_features, groups, group_size)
    # The kernel keeps scales and minimums in bfloat16: values are fitted to the rounded ones.
    if symmetric:
        scales = _nonzero((grouped.abs().amax(2) / 7.5).bfloat16().float())
        minimums = -8 * scales
    else:
        low, high = grouped.amin(2), grouped.amax(2)
        scales = _nonzero(((high - low) / 15).bfloat16().float())
        minimums = low.bfloat16().float()
    values = ((grouped - minimums[..., None]) / scales[..., None]).round_().clamp_(0, 15).to(torch.uint8)
    values = values.view(out_features, -1)[:, :in_features].contiguous()
    return QuantizedWeight(4, group_size, values, scales, minimums)


def _nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, torch.ones_like(scales))
