"""AWQ (https://arxiv.org/abs/2306.00978): finer grids for important inputs, and clipped ranges.

The error is ``tr(dW H dW^T)`` of a layer's own outputs. The paper's code compares outputs of the surrounding block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vlmserve.quant.grid import Grid, GridKind, in_groups
from vlmserve.quant.statistics import output_error

STEPS = 20
"""Number of exponents to try."""
CLIPS = tuple(1 - 0.05 * step for step in range(10))
"""Factors of ranges to try."""
PASSES = ((0.12, 0.06, 0.03), *3 * ((0.06, 0.03, 0.015),))
"""Relative moves of range ends to try, for each pass over all groups."""
MOST_ROWS, MOST_CLIPPED_ROWS = 1024, 256
"""Sampled outputs for errors, without and with clipping."""

ROWS_AT_ONCE = 512
"""Outputs clipped together: a group's candidates fit a core's cache."""

MakeGrid = Callable[[Tensor], Grid]
"""Makes a weight's grid."""


def input_scales(
    weight: Tensor, magnitude: Tensor, hessian: Tensor, make_grid: MakeGrid, *, shared: int = 1, heads: int = 1
) -> Tensor:
    """Factors of inputs, ``[in_features]``, with the least output error.

    weight: of all layers with that input. magnitude: mean ``|x|`` of inputs. heads: in the inputs. shared: consecutive
    heads that need equal factors.
    """
    group_size = make_grid(weight[:1]).group_size
    importance = _importance(weight, group_size)
    rows = weight[:: -(-len(weight) // MOST_ROWS)]
    best, least = torch.ones_like(magnitude), _error(rows, torch.ones_like(magnitude), hessian, make_grid)
    for step in range(STEPS):
        exponent = step / STEPS
        scales = magnitude**exponent / (importance ** (1 - exponent) + 1e-4)
        scales = _tie(scales, shared, heads).clamp(min=1e-4)
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = _error(rows, scales, hessian, make_grid)
        if error < least:
            best, least = scales, error
    return best


def helps(weight: Tensor, scales: Tensor, hessian: Tensor, kind: GridKind) -> bool:
    """True if factors help even after clipping."""
    rows = weight[:: -(-len(weight) // MOST_CLIPPED_ROWS)]
    errors = []
    for tried in (scales, torch.ones_like(scales)):
        scaled, own = rows * tried, hessian / torch.outer(tried, tried)
        errors.append(output_error(clipped_grid(scaled, own, kind).nearest(scaled) - scaled, own))
    return bool(errors[0] < errors[1])


def clipped_grid(weight: Tensor, hessian: Tensor, kind: GridKind) -> Grid:
    shrinks = clip(weight, hessian, kind)
    one = shrinks.shape[1] == 1
    return kind.fit(weight, (shrinks, shrinks) if one else clip_ends(weight, hessian, kind, shrinks))


def clip(weight: Tensor, hessian: Tensor, kind: GridKind) -> Tensor:
    """Factors of ranges, ``[out_features, groups]``, at least 0.5, with the least error of each group's output."""
    return torch.cat([_clip(rows, hessian, kind) for rows in torch.split(weight, ROWS_AT_ONCE)])


def _clip(weight: Tensor, hessian: Tensor, kind: GridKind) -> Tensor:
    low, high = kind.ranges(weight)
    best, least = torch.ones_like(low), torch.full_like(low, torch.inf)
    for tried in CLIPS:
        errors = _group_errors(weight, kind.between(low * tried, high * tried, weight.shape[1]), hessian)
        better = errors < least
        best[better], least = tried, torch.where(better, errors, least)
    return best


def clip_ends(weight: Tensor, hessian: Tensor, kind: GridKind, shrinks: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of both ends of ranges, each ``[out_features, groups]``.

    Moves ends group by group to the least error of the whole output; the paper only narrows groups' ranges. shrinks:
    from `clip`.
    """
    lows, highs = shrinks.clone(), shrinks.clone()
    parts = zip(*(torch.split(tensor, ROWS_AT_ONCE) for tensor in (weight, lows, highs)), strict=True)
    for rows, low, high in parts:
        _clip_ends(rows, hessian, kind, (low, high))
    return lows, highs


def _clip_ends(weight: Tensor, hessian: Tensor, kind: GridKind, ends: tuple[Tensor, Tensor]) -> None:
    ranges = kind.ranges(weight)
    grid = kind.between(ranges[0] * ends[0], ranges[1] * ends[1], weight.shape[1])
    difference = grid.nearest(weight) - weight
    effect = difference @ hessian
    for moves in PASSES:
        for group, first in enumerate(range(0, weight.shape[1], grid.group_size)):
            inputs = slice(first, first + grid.group_size)
            own = slice(group, group + 1)
            before, products = difference[:, inputs].clone(), hessian[inputs, inputs]
            of_others = 2 * (effect[:, inputs] - before @ products)
            after = _move(
                [end[:, own] for end in ends],
                moves,
                [end[:, own] for end in ranges],
                weight[:, inputs],
                before,
                products,
                of_others,
                kind,
            )
            effect += (after - before) @ hessian[inputs]
            difference[:, inputs] = after


def _move(
    ends: Sequence[Tensor],
    moves: Sequence[float],
    ranges: Sequence[Tensor],
    weight: Tensor,
    before: Tensor,
    products: Tensor,
    of_others: Tensor,
    kind: GridKind,
) -> Tensor:
    """Move both ends of one group in place; return its rounding error.

    ends: factors of `ranges`. before: the error so far. products: the group's block of H. of_others: derivative due to
    other groups.
    """
    shares = torch.tensor([1 + sign * move for move in moves for sign in (-1, 1)]).to(weight)
    grouped, outputs = weight[:, None], torch.arange(len(weight), device=weight.device)
    best, least = before, ((before @ products + of_others) * before).sum(1, keepdim=True)
    for number, end in enumerate(ends):
        tried = end * shares
        low, high = (
            whole * (tried if number == other else ends[other].expand_as(tried)) for other, whole in enumerate(ranges)
        )
        # The grid treats each candidate as a group.
        found = kind.between(low, high, weight.shape[1]).nearest_of(grouped).sub_(grouped)
        errors = (found @ products).add_(of_others[:, None]).mul_(found).sum(2)
        error, place = errors.min(1, keepdim=True)
        better = error < least
        best = torch.where(better, found[outputs, place[:, 0]], best)
        least = torch.where(better, error, least)
        end.copy_(torch.where(better, tried.gather(1, place), end))
    return best


def _importance(weight: Tensor, group_size: int) -> Tensor:
    grouped = in_groups(weight.abs(), group_size)
    shares = grouped / (grouped.amax(2, keepdim=True) + 1e-6)
    return shares.flatten(1)[:, : weight.shape[1]].mean(0)


def _tie(scales: Tensor, shared: int, heads: int) -> Tensor:
    if shared == 1:
        return scales
    by_head = scales.clamp(min=1e-8).log().view(heads // shared, shared, -1)
    return by_head.mean(1, keepdim=True).expand_as(by_head).exp().flatten()


def _error(rows: Tensor, scales: Tensor, hessian: Tensor, make_grid: MakeGrid) -> Tensor:
    scaled = rows * scales
    return output_error(make_grid(scaled).nearest(scaled) / scales - rows, hessian)


def _group_errors(weight: Tensor, grid: Grid, hessian: Tensor) -> Tensor:
    """``tr(dW H dW^T)`` of each group, ``[out_features, groups]``."""
    difference = in_groups(grid.nearest(weight) - weight, grid.group_size)
    width = hessian.shape[0]
    errors = torch.empty(difference.shape[:2], dtype=weight.dtype, device=weight.device)
    for group, first in enumerate(range(0, width, grid.group_size)):
        inputs = slice(first, min(first + grid.group_size, width))
        part = difference[:, group, : inputs.stop - first]
        errors[:, group] = ((part @ hessian[inputs, inputs]) * part).sum(1)
    return errors
