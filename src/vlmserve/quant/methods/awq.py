"""AWQ: inputs that matter get a finer grid, and ranges of groups are clipped where that helps.

https://arxiv.org/abs/2306.00978. Scaling an input up and its producer down changes nothing but the rounding. Errors are
those of a layer's own outputs, tr(dW H dW^T), so no layer is computed again; the paper's code takes the outputs of the
block around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vlmserve.quant.grid import Grid, GridKind, in_groups
from vlmserve.quant.statistics import output_error

STEPS = 20
"""Exponents that are tried."""
CLIPS = tuple(1 - 0.05 * step for step in range(10))
"""Shares of ranges that are tried."""
PASSES = ((0.12, 0.06, 0.03), *3 * ((0.06, 0.03, 0.015),))
"""How far the ends of ranges move inwards and outwards, as shares of where they are: in each pass over all groups."""
MOST_ROWS, MOST_CLIPPED_ROWS = 1024, 256
"""Outputs of which errors are measured, and those with clipped ranges: the others are like them."""

ROWS_AT_ONCE = 512
"""Outputs of which ranges are clipped together: what is tried for one group then stays in a core's cache."""

MakeGrid = Callable[[Tensor], Grid]
"""From a weight to its grid."""


def input_scales(
    weight: Tensor, magnitude: Tensor, hessian: Tensor, make_grid: MakeGrid, *, shared: int = 1, heads: int = 1
) -> Tensor:
    """Factors of inputs, ``[in_features]``, that make rounded outputs differ least from exact ones.

    weight: ``[out_features, in_features]`` of all layers with that input. magnitude: mean |x| of each input. hessian:
    of the inputs. shared: so many heads of inputs, one after another, must have the same factors, as those that attend
    to the same values do; heads: how many heads there are.
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
    """Whether factors of inputs leave less error where ranges are clipped than no factors do; see `input_scales`.

    Clipping can do what factors would, and then they only make ranges wider.
    """
    rows = weight[:: -(-len(weight) // MOST_CLIPPED_ROWS)]
    errors = []
    for tried in (scales, torch.ones_like(scales)):
        scaled, own = rows * tried, hessian / torch.outer(tried, tried)
        errors.append(output_error(clipped_grid(scaled, own, kind).nearest(scaled) - scaled, own))
    return bool(errors[0] < errors[1])


def clipped_grid(weight: Tensor, hessian: Tensor, kind: GridKind) -> Grid:
    """The grid of ranges that are clipped: by `clip`, and where a row has several groups by `clip_ends`."""
    shrinks = clip(weight, hessian, kind)
    one = shrinks.shape[1] == 1
    return kind.fit(weight, (shrinks, shrinks) if one else clip_ends(weight, hessian, kind, shrinks))


def clip(weight: Tensor, hessian: Tensor, kind: GridKind) -> Tensor:
    """Shares of ranges, ``[out_features, groups]``, that make the outputs of each group differ least.

    A range is never less than half as wide.
    """
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
    """Shares of the lower and the upper ends of ranges, ``[out_features, groups]`` each.

    One group after the other, its ends move to where whole outputs differ least, beside what all other groups are
    rounded to at the time. This is not in the paper, in which groups know nothing of each other, and ranges only become
    narrower. shrinks: to begin with, as `clip` gives them.
    """
    lows, highs = shrinks.clone(), shrinks.clone()
    parts = zip(*(torch.split(tensor, ROWS_AT_ONCE) for tensor in (weight, lows, highs)), strict=True)
    for rows, low, high in parts:
        _clip_ends(rows, hessian, kind, (low, high))
    return lows, highs


def _clip_ends(weight: Tensor, hessian: Tensor, kind: GridKind, ends: tuple[Tensor, Tensor]) -> None:
    """`clip_ends` of some outputs, whose ends move in place."""
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
    """Move the ends of one group, ``[out_features, 1]`` each, in place, first the lower and then the upper one. Returns
    by how much the rounded weight differs then.

    ranges: where the ends are of which `ends` are shares. before: by how much the weight differed. products: the
    group's part of H. of_others: what the other groups' differences add to the derivative of the error by those of this
    group.
    """
    shares = torch.tensor([1 + sign * move for move in moves for sign in (-1, 1)]).to(weight)
    grouped, outputs = weight[:, None], torch.arange(len(weight), device=weight.device)
    best, least = before, ((before @ products + of_others) * before).sum(1, keepdim=True)
    for number, end in enumerate(ends):
        tried = end * shares
        low, high = (
            whole * (tried if number == other else ends[other].expand_as(tried)) for other, whole in enumerate(ranges)
        )
        # All places that are tried are to the grid what groups are.
        found = kind.between(low, high, weight.shape[1]).nearest_of(grouped).sub_(grouped)
        errors = (found @ products).add_(of_others[:, None]).mul_(found).sum(2)
        error, place = errors.min(1, keepdim=True)
        better = error < least
        best = torch.where(better, found[outputs, place[:, 0]], best)
        least = torch.where(better, error, least)
        end.copy_(torch.where(better, tried.gather(1, place), end))
    return best


def _importance(weight: Tensor, group_size: int) -> Tensor:
    """``[in_features]``: the mean magnitude of each input's weights, as shares of the largest one in their group."""
    grouped = in_groups(weight.abs(), group_size)
    shares = grouped / (grouped.amax(2, keepdim=True) + 1e-6)
    return shares.flatten(1)[:, : weight.shape[1]].mean(0)


def _tie(scales: Tensor, shared: int, heads: int) -> Tensor:
    """The same with one factor for inputs that must have the same: the geometric mean."""
    if shared == 1:
        return scales
    by_head = scales.clamp(min=1e-8).log().view(heads // shared, shared, -1)
    return by_head.mean(1, keepdim=True).expand_as(by_head).exp().flatten()


def _error(rows: Tensor, scales: Tensor, hessian: Tensor, make_grid: MakeGrid) -> Tensor:
    scaled = rows * scales
    return output_error(make_grid(scaled).nearest(scaled) / scales - rows, hessian)


def _group_errors(weight: Tensor, grid: Grid, hessian: Tensor) -> Tensor:
    """tr(dW H dW^T) of each group alone, ``[out_features, groups]``."""
    difference = in_groups(grid.nearest(weight) - weight, grid.group_size)
    width = hessian.shape[0]
    errors = torch.empty(difference.shape[:2], dtype=weight.dtype, device=weight.device)
    for group, first in enumerate(range(0, width, grid.group_size)):
        inputs = slice(first, min(first + grid.group_size, width))
        part = difference[:, group, : inputs.stop - first]
        errors[:, group] = ((part @ hessian[inputs, inputs]) * part).sum(1)
    return errors
