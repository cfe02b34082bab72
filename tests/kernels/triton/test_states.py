"""Layers with states in Triton against torch's reference."""

from __future__ import annotations

import pytest
import torch

from tests.state_rows import inputs_of, width
from vlmserve.kernels.blocks import allocate_states
from vlmserve.kernels.states import DeltaWeights, Segments, StateCache, StateRows
from vlmserve.kernels.torch_states import TorchConvolution, TorchDelta
from vlmserve.kernels.triton.states import TritonConvolution, TritonDelta, unsupported_reason
from vlmserve.layer_specs import ConvolutionSpec, DeltaSpec

DELTA = DeltaSpec(num_key_heads=1, num_value_heads=2, key_size=12, value_size=8, kernel=4)
CONVOLUTION = ConvolutionSpec(channels=300, kernel=3)
SLOTS = 9


def batch(device: torch.device) -> StateRows:
    """A decode, a sequence without rows, a new prompt with a checkpoint, rows after a hit, and two rows that are cut
    although no slot was free for a checkpoint."""
    chunks, slots = [(5, 6), (9, 9), (0, 6), (8, 10), (20, 22)], [1, 2, 3, 4, 8]
    return StateRows.of(Segments.of_chunks(chunks, slots, {1: 7, 3: 6}, {2: {2: 5}, 4: {21: 8}}), device)


def states(spec: DeltaSpec | ConvolutionSpec, device: torch.device) -> tuple[StateCache, StateCache]:
    """The same random states twice."""
    [one] = allocate_states([spec], SLOTS, torch.float32, device)
    for tensor in one.tensors:
        tensor.copy_(torch.randn(tensor.shape))
    return one, StateCache(one.tail.clone(), None if one.states is None else one.states.clone())


def assert_same(one: StateCache, other: StateCache) -> None:
    for tensor, expected in zip(one.tensors, other.tensors, strict=True):
        torch.testing.assert_close(tensor, expected, atol=1e-5, rtol=1e-5)


def test_delta_rule_equals_torch(device: torch.device) -> None:
    torch.manual_seed(0)
    rows, heads = batch(device), DELTA.num_value_heads
    inputs = inputs_of(DELTA, torch.randn(int(rows.host.starts[-1]), width(DELTA), device=device))
    weights = DeltaWeights(
        torch.randn(DELTA.channels, DELTA.kernel, device=device),
        -torch.rand(heads, device=device) * 8,
        torch.tensor([-18.0, 25.0], device=device),
        torch.randn(DELTA.value_size, device=device),
        1e-6,
    )
    own, expected = states(DELTA, device)
    result = TritonDelta(DELTA, weights)(*inputs, own, rows)
    torch.testing.assert_close(result, TorchDelta(DELTA, weights)(*inputs, expected, rows), atol=1e-4, rtol=1e-4)
    assert_same(own, expected)


def test_convolution_equals_torch(device: torch.device) -> None:
    torch.manual_seed(1)
    rows = batch(device)
    mixed = torch.randn(int(rows.host.starts[-1]), 3 * CONVOLUTION.channels, device=device)
    weight = torch.randn(CONVOLUTION.channels, CONVOLUTION.kernel, device=device)
    own, expected = states(CONVOLUTION, device)
    result = TritonConvolution(CONVOLUTION, weight)(mixed, own, rows)
    torch.testing.assert_close(result, TorchConvolution(weight)(mixed, expected, rows), atol=1e-5, rtol=1e-5)
    assert_same(own, expected)


def test_large_keys_have_a_reason() -> None:
    assert unsupported_reason(DELTA) is None
    large = DeltaSpec(num_key_heads=1, num_value_heads=1, key_size=512, value_size=128, kernel=4)
    assert "larger than 256" in str(unsupported_reason(large))


@pytest.mark.parametrize("count", [0, 1])
def test_padding_sequences_use_their_slot_alone(device: torch.device, count: int) -> None:
    """Rows that pad a captured step read and write slot 0."""
    torch.manual_seed(2)
    rows = StateRows.of(Segments.of_chunks([(5, 6)] * (count + 2), [1] * count + [0, 0]), device)
    own, expected = states(CONVOLUTION, device)
    mixed = torch.randn(count + 2, 3 * CONVOLUTION.channels, device=device)
    weight = torch.randn(CONVOLUTION.channels, CONVOLUTION.kernel, device=device)
    TritonConvolution(CONVOLUTION, weight)(mixed, own, rows)
    for tensor, before in zip(own.tensors, expected.tensors, strict=True):
        assert torch.equal(tensor[1 + count :], before[1 + count :])
