"""Calibrated methods beside the published algorithms, written out in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.oracles import calibrated_weights as published
from vlmserve.quant.grid import Grid, GridKind
from vlmserve.quant.methods import awq
from vlmserve.quant.methods.awq import clip, clip_ends, helps, input_scales
from vlmserve.quant.methods.gptq import gptq
from vlmserve.quant.methods.smoothquant import smoothing_factors
from vlmserve.quant.statistics import InputStatistics, output_error

F64 = torch.float64


def layer(in_features: int = 256, out_features: int = 24, rows: int = 700, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight and inputs, float64, with inputs that depend on each other and some that are far larger."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator, dtype=F64)
    mixing = torch.randn(in_features, in_features, generator=generator, dtype=F64) / in_features**0.5
    inputs = torch.randn(rows, in_features, generator=generator, dtype=F64) @ (mixing + torch.eye(in_features))
    return weight, inputs * torch.rand(in_features, generator=generator, dtype=F64).pow(-0.7)


def observed(inputs: Tensor, dtype: torch.dtype = F64) -> InputStatistics:
    statistics = InputStatistics(inputs.shape[1], dtype=dtype)
    for some in inputs.split(90):
        statistics.add(some)
    return statistics


def test_h_is_twice_the_mean_product_of_inputs() -> None:
    _, inputs = layer()
    statistics = observed(inputs)
    np.testing.assert_allclose(statistics.hessian, published.hessian(inputs.numpy()), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(statistics.mean_magnitude, inputs.abs().mean(0))
    torch.testing.assert_close(statistics.largest, inputs.abs().amax(0))


def test_weight_three_counts_like_three_rows() -> None:
    _, inputs = layer(rows=10)
    weighted, repeated = InputStatistics(256, dtype=F64), InputStatistics(256, dtype=F64)
    weighted.add(inputs, torch.tensor([1.0, 3.0] * 5))
    repeated.add(torch.cat([inputs, inputs[1::2], inputs[1::2]]))
    torch.testing.assert_close(weighted.hessian, repeated.hessian)
    torch.testing.assert_close(weighted.mean_magnitude, repeated.mean_magnitude)


def test_non_finite_rows_are_skipped_and_counted() -> None:
    _, inputs = layer(rows=10)
    broken = inputs.clone()
    broken[3, 5], broken[7, 0] = torch.nan, torch.inf
    statistics = observed(broken)
    assert statistics.num_left_out == 2
    torch.testing.assert_close(statistics.hessian, observed(inputs[[0, 1, 2, 4, 5, 6, 8, 9]]).hessian)


def test_dividing_inputs_divides_what_was_observed() -> None:
    _, inputs = layer()
    factors = torch.rand(256, dtype=F64) + 0.5
    statistics, expected = observed(inputs), observed(inputs / factors)
    statistics.divide(factors)
    torch.testing.assert_close(statistics.hessian, expected.hessian)
    torch.testing.assert_close(statistics.mean_magnitude, expected.mean_magnitude)
    torch.testing.assert_close(statistics.largest, expected.largest)


def test_output_error_equals_measured_error() -> None:
    weight, inputs = layer()
    difference = 0.01 * weight.roll(1, 1)
    expected = 2 * (inputs @ difference.T).square().sum(1).mean()
    torch.testing.assert_close(output_error(difference, observed(inputs).hessian), expected)


@pytest.mark.parametrize(
    ("bits", "group_size", "symmetric"),
    [(4, 32, False), (4, 64, True), (4, 128, False), (4, 128, True), (8, 256, True)],
)
def test_gptq_gives_the_integers_of_the_published_algorithm(bits: int, group_size: int, symmetric: bool) -> None:
    weight, inputs = layer()
    h = observed(inputs).hessian
    grid = Grid.fit(weight, bits=bits, group_size=group_size, symmetric=symmetric)
    rounded = gptq(weight, h, grid)
    expected = published.gptq(
        weight.numpy(), h.numpy(), grid.scales.numpy(), grid.minimums.numpy(), grid.group_size, bits, 0.01
    )
    assert np.array_equal(rounded.weight.values.numpy(), expected)
    assert rounded.damping == 0.01
    nearest = grid.nearest(weight)
    error = output_error(rounded.weight.dequantize().double() - weight, h)
    assert error < 0.7 * output_error(nearest - weight, h)


def test_gptq_in_float32_is_nearly_as_good() -> None:
    weight, inputs = layer()
    h = observed(inputs).hessian
    grid = Grid.fit(weight.float(), bits=4, group_size=32, symmetric=False)
    exact, single = (gptq(weight.to(kind), h.to(kind), grid).weight for kind in (F64, torch.float32))
    errors = [float(output_error(one.dequantize().double() - weight, h)) for one in (exact, single)]
    assert errors[1] == pytest.approx(errors[0], rel=0.02)


def test_unseen_input_keeps_its_weight() -> None:
    weight, inputs = layer()
    inputs[:, [3, 77]] = 0
    grid = Grid.fit(weight, bits=4, group_size=32, symmetric=False)
    rounded = gptq(weight, observed(inputs).hessian, grid)
    assert rounded.dead == 2
    assert rounded.damping == 0.01
    assert torch.equal(rounded.weight.values[:, [3, 77]], grid.values(weight)[:, [3, 77]])


def test_h_that_cannot_be_factorized_is_damped_more() -> None:
    weight, inputs = layer(rows=20)
    h = observed(inputs).hessian
    eigenvalue = -0.02 * float(h.diagonal().mean())
    vector = torch.linalg.eigh(h).eigenvectors[:, 0]
    h = h + eigenvalue * torch.outer(vector, vector)
    grid = Grid.fit(weight, bits=4, group_size=32, symmetric=False)
    rounded = gptq(weight, h, grid)
    assert rounded.damping == 0.1
    assert not torch.equal(rounded.weight.values, grid.values(weight))


@pytest.mark.parametrize("broken", [torch.nan, -1e9], ids=["nan", "negative"])
def test_unfactorizable_hessian_falls_back_to_rounding(broken: float) -> None:
    weight, inputs = layer()
    h = observed(inputs).hessian
    h[1, 1] = broken
    grid = Grid.fit(weight, bits=4, group_size=32, symmetric=False)
    rounded = gptq(weight, h, grid)
    assert rounded.damping is None
    assert torch.equal(rounded.weight.values, grid.values(weight))


@pytest.mark.parametrize(("group_size", "seed"), [(32, 0), (64, 1), (128, 2)])
def test_awq_takes_the_best_of_the_published_factors(group_size: int, seed: int) -> None:
    weight, inputs = layer(seed=seed)

    def make_grid(weight: Tensor) -> Grid:
        return Grid.fit(weight, bits=4, group_size=group_size, symmetric=False)

    statistics = observed(inputs)
    factors = input_scales(weight, statistics.mean_magnitude, statistics.hessian, make_grid)
    losses = {}
    for number, tried in enumerate(published.awq_candidates(weight.numpy(), inputs.numpy(), group_size)):
        scaled = weight.numpy() * tried
        grid = make_grid(torch.from_numpy(scaled))
        restored = published.rounded(scaled, grid.scales.numpy(), grid.minimums.numpy(), group_size)
        outputs = (inputs.numpy() / tried) @ restored.T
        losses[number] = ((outputs - (inputs @ weight.T).numpy()) ** 2).mean()
    best = min(losses, key=lambda number: losses[number])
    np.testing.assert_allclose(
        factors, published.awq_candidates(weight.numpy(), inputs.numpy(), group_size)[best], rtol=1e-9
    )
    plain = make_grid(weight)
    assert losses[best] < ((inputs @ (plain.nearest(weight) - weight).T) ** 2).mean()


def test_query_heads_of_a_group_share_factors() -> None:
    weight, inputs = layer()
    statistics = observed(inputs)
    factors = input_scales(
        weight,
        statistics.mean_magnitude,
        statistics.hessian,
        lambda weight: Grid.fit(weight, bits=4, group_size=32, symmetric=False),
        shared=2,
        heads=8,
    )
    pairs = factors.view(4, 2, 32)
    assert torch.equal(pairs[:, 0], pairs[:, 1])
    assert pairs[:, 0].unique().numel() > 4


def test_factors_are_one_where_nothing_is_better() -> None:
    inputs = torch.eye(64, dtype=F64)
    weight = torch.arange(16, dtype=F64).repeat(3, 4)
    statistics = observed(inputs)
    factors = input_scales(
        weight,
        statistics.mean_magnitude,
        statistics.hessian,
        lambda weight: Grid.fit(weight, bits=4, group_size=32, symmetric=False),
    )
    assert torch.equal(factors, torch.ones(64, dtype=F64))


@pytest.mark.parametrize("symmetric", [True, False])
def test_clipping_takes_the_best_range_per_group(symmetric: bool) -> None:
    weight, inputs = layer()
    weight[2, 40] = 9.0
    kind = GridKind(4, 32, symmetric)
    shrinks = clip(weight, observed(inputs).hessian, kind)
    assert shrinks.min() < 1
    for row in (0, 2):
        for group in range(8):
            inside = slice(32 * group, 32 * group + 32)
            losses = {}
            for step in range(10):
                share = 1 - 0.05 * step
                outputs = inputs[:, inside] @ (kind.fit(weight, (share, share)).nearest(weight) - weight)[row, inside]
                losses[share] = float(outputs.square().mean())
            assert float(shrinks[row, group]) == pytest.approx(min(losses, key=lambda shrink: losses[shrink]))


@pytest.mark.parametrize("symmetric", [True, False])
def test_range_ends_minimize_output_error(symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if outputs were computed anew for each move of each end of each group, one after another."""
    weight, inputs = layer()
    kind, hessian = GridKind(4, 32, symmetric), observed(inputs).hessian
    shrinks = clip(weight, hessian, kind)

    def losses(ends: Sequence[Tensor]) -> Tensor:
        return (inputs @ (kind.fit(weight, (ends[0], ends[1])).nearest(weight) - weight).T).square().mean(0)

    start = losses([shrinks, shrinks])
    found = losses(clip_ends(weight, hessian, kind, shrinks))
    assert (found <= start).all()
    assert found.mean() < 0.8 * start.mean()
    monkeypatch.setattr(awq, "PASSES", ((0.1, 0.05), (0.03,)))
    ends = [shrinks.clone(), shrinks.clone()]
    for moves in awq.PASSES:
        for group in range(8):
            for end in ends:
                place, least = end[:, group].clone(), losses(ends)
                best = place
                for share in (1 + sign * move for move in moves for sign in (-1, 1)):
                    end[:, group] = place * share
                    error = losses(ends)
                    best, least = torch.where(error < least, end[:, group], best), torch.minimum(error, least)
                end[:, group] = best
    torch.testing.assert_close(losses(clip_ends(weight, hessian, kind, shrinks)), losses(ends))


def test_factors_that_clipping_makes_useless_are_told_apart() -> None:
    weight, inputs = layer()
    kind, hessian = GridKind(4, 32, symmetric=False), observed(inputs).hessian
    far_apart = torch.logspace(-1, 1, 256, dtype=F64)
    assert not helps(weight, far_apart, hessian, kind)
    spread = weight / far_apart
    own = hessian * torch.outer(far_apart, far_apart)
    assert helps(spread, far_apart, own, kind)


def test_smoothing_moves_what_is_hard_to_round() -> None:
    weight, inputs = layer()
    factors = smoothing_factors(observed(inputs).largest, weight)
    np.testing.assert_allclose(factors, published.smoothing(inputs.numpy(), weight.numpy(), 0.5), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close((inputs / factors).abs().amax(0), (weight * factors).abs().amax(0))
