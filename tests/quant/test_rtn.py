"""Rounding to nearest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmserve.quant.methods.rtn import RowRounder, round_to_nearest


@given(
    st.integers(1, 9),
    st.integers(1, 150),
    st.sampled_from([4, 8]),
    st.sampled_from([32, 64, 128]),
    st.booleans(),
    st.integers(0, 100),
)
@settings(max_examples=80, deadline=None)
def test_weights_move_to_the_nearest_value(
    out_features: int, in_features: int, bits: int, group_size: int, symmetric: bool, seed: int
) -> None:
    weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(seed))
    quantized = round_to_nearest(weight, bits=bits, group_size=group_size, symmetric=symmetric)
    assert int(quantized.values.max()) < 2**bits
    steps = quantized.scales.repeat_interleave(quantized.group_size, 1)[:, :in_features]
    moved = (quantized.dequantize() - weight).abs() / steps
    # A zero point is rounded as well, and so is what the kernel adds to a group: at the ends of its range a weight may
    # lie one step off.
    assert moved.max() <= (0.5001 if bits == 8 else 1.1)
    assert moved.numel() < 500 or moved.mean() <= 0.3


def test_rounding_moves_weights_half_a_step() -> None:
    weight = torch.randn(40, 130, generator=torch.Generator().manual_seed(0)) + torch.linspace(-5, 5, 40)[:, None]
    quantized = round_to_nearest(weight, bits=4, group_size=32, symmetric=False, zero_points=True)
    zeros = -quantized.minimums / quantized.scales
    assert torch.equal(zeros, zeros.round())
    assert 0 <= zeros.min() <= zeros.max() <= 15
    steps = quantized.scales.repeat_interleave(32, 1)[:, :130]
    # Rounding the zero point moves both ends of the range.
    assert ((quantized.dequantize() - weight).abs() / steps).max() < 1.1


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_zero_and_empty_groups_survive_rounding(bits: int, symmetric: bool) -> None:
    weight = torch.zeros(2, 64)
    weight[1, 0] = 3.0
    restored = round_to_nearest(weight, bits=bits, group_size=32, symmetric=symmetric).dequantize()
    assert torch.equal(restored[0], torch.zeros(64))
    assert restored[1, 1:].abs().max() <= 0.01
    assert abs(restored[1, 0] - 3) < (0.01 if bits == 8 else 0.25)


def test_other_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="8 or 4 bits"):
        round_to_nearest(torch.zeros(2, 2), bits=3, group_size=32, symmetric=True)


@pytest.mark.parametrize(("bits", "sizes"), [(4, (1, 30, 9)), (8, (17, 23))])
def test_rows_round_as_they_arrive(bits: int, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(40, 130, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = round_to_nearest(weight, bits=bits, group_size=32, symmetric=False)
    monkeypatch.setattr("vlmserve.quant.methods.rtn.ELEMENTS_AT_ONCE", 500)
    rows = RowRounder((40, 130), bits=bits, group_size=32, symmetric=False)
    starts = torch.tensor([0, *sizes[:-1]]).cumsum(0).tolist()
    for first, part in reversed(list(zip(starts, torch.split(weight, sizes), strict=True))):
        rows.write(first, part)
    written = rows.weight()
    for name in ("values", "scales", "minimums"):
        assert torch.equal(getattr(written, name), getattr(whole, name))
