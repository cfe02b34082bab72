"""GPTQ (https://arxiv.org/abs/2210.17323): rounds inputs one by one, and corrects the remaining weights.

The grid is fixed first ("static groups"), so that inputs are rounded by descending diagonal of H.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.quant.grid import Grid

BLOCK = 128
"""Inputs rounded between corrections of the remaining weights."""
DAMPINGS = (0.01, 0.1, 1.0)
"""Dampings to try, as multiples of the mean diagonal of H."""


class Rounded(NamedTuple):
    weight: QuantizedWeight
    damping: float | None
    """Damping of H; None: H could not be factorized, so weights were rounded to nearest."""
    dead: int
    """Inputs that were always zero."""


def gptq(weight: Tensor, hessian: Tensor, grid: Grid) -> Rounded:
    """Round a weight ``[out_features, in_features]`` in the Hessian's dtype.

    Weights of inputs that were always zero in calibration are rounded to nearest. Published code zeroes them, which is
    wrong if such inputs are nonzero later.
    """
    weight = weight.to(hessian.dtype)
    dead = hessian.diagonal() == 0
    order = hessian.diagonal().argsort(descending=True, stable=True)
    factor, damping = _factorize(hessian, dead, order)
    if factor is None:
        return Rounded(grid.weight(grid.values(weight)), None, int(dead.sum()))
    values = _round_in_order(weight[:, order].T.contiguous(), factor, grid, order)
    restored = torch.empty_like(values)
    restored[order] = values
    return Rounded(grid.weight(restored.T.contiguous()), damping, int(dead.sum()))


def _factorize(hessian: Tensor, dead: Tensor, order: Tensor) -> tuple[Tensor | None, float | None]:
    """The upper Cholesky factor of the damped H's inverse, and the damping."""
    mean = hessian.diagonal().mean()
    for damping in DAMPINGS:
        damped = hessian[order][:, order]
        diagonal = damped.diagonal()
        diagonal.add_(dead[order].to(hessian.dtype)).add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed:
            continue
        factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed and bool(factor.isfinite().all()):
            return factor, damping
    return None, None


def _round_in_order(rest: Tensor, factor: Tensor, grid: Grid, order: Tensor) -> Tensor:
    """Return uint8 ``[in_features, out_features]``. Overwrites `rest`."""
    values = torch.empty(rest.shape, dtype=torch.uint8, device=rest.device)
    for first in range(0, len(rest), BLOCK):
        last = min(first + BLOCK, len(rest))
        block, own = rest[first:last], factor[first:last, first:last]
        scales, minimums = (part.T.to(rest.dtype).contiguous() for part in grid.columns(order[first:last]))
        errors = torch.empty_like(block)
        for index in range(last - first):
            column, scale, minimum = block[index], scales[index], minimums[index]
            steps = column.sub(minimum).div_(scale).round_().clamp_(grid.lowest, grid.highest)
            values[first + index] = steps
            error = torch.sub(column, torch.addcmul(minimum, steps, scale), out=errors[index])
            error /= own[index, index]
            block[index + 1 :].addr_(own[index, index + 1 :], error, alpha=-1)
        rest[last:].addmm_(factor[first:last, last:].T, errors, alpha=-1)
    return values
