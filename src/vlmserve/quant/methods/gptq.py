"""GPTQ: weights are rounded input by input, and those that are not yet rounded make up for the error.

https://arxiv.org/abs/2210.17323. The grid is there before, and inputs are taken in the order of the diagonal of H, the
largest first, so that groups stay side by side ("static" order).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.quant.grid import Grid

BLOCK = 128
"""Inputs that are rounded before the rest is told of their errors."""
DAMPINGS = (0.01, 0.1, 1.0)
"""What is added to the diagonal of H, as shares of its mean: the first with which H can be factorized."""


class Rounded(NamedTuple):
    """A weight in few bits. damping: what H took; None: it could not be factorized, and weights were rounded to
    nearest. dead: inputs that were always zero."""

    weight: QuantizedWeight
    damping: float | None
    dead: int


def gptq(weight: Tensor, hessian: Tensor, grid: Grid) -> Rounded:
    """Round a weight ``[out_features, in_features]`` to a grid.

    hessian: ``[in_features, in_features]``, see `InputStatistics`; all is computed in its type.
    Weights of inputs that were always zero in calibration are rounded to nearest; published implementations set them
    to zero, which is wrong as soon as such an input is not.
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
    """The upper Cholesky factor of the inverse of H, damped, with its inputs in that order; and the damping."""
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
    """uint8 ``[in_features, out_features]``: inputs in that order, like `rest`, which is overwritten."""
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
