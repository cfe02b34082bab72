"""Layers with states in Triton against torch's reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.state_rows import inputs_of, run_with_drafts, width
from vlmserve.kernels.blocks import allocate_states
from vlmserve.kernels.states import DeltaWeights, Segments, StateCache, StateRows
from vlmserve.kernels.torch_states import RuleRows, TorchConvolution, TorchDelta, recurrent_rule
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


@pytest.mark.parametrize("spec", [DELTA, CONVOLUTION])
def test_drafts_equal_torch(spec: DeltaSpec | ConvolutionSpec) -> None:
    torch.manual_seed(0)
    mixed, cpu = torch.randn(12, width(spec)), torch.device("cpu")
    kernels: list[Any] = []
    if isinstance(spec, DeltaSpec):
        channels, heads = torch.randn(spec.channels, spec.kernel), spec.num_value_heads
        weights = DeltaWeights(channels, -torch.rand(heads), torch.randn(heads), torch.randn(spec.value_size), 1e-6)
        kernels = [TorchDelta(spec, weights), TritonDelta(spec, weights)]
    else:
        weight = torch.randn(spec.channels, spec.kernel)
        kernels = [TorchConvolution(weight), TritonConvolution(spec, weight)]
    found = []
    for kernel in kernels:
        [cache] = allocate_states([spec], SLOTS, torch.float32, cpu, draft_places=2)
        torch.manual_seed(1)
        found.append((run_with_drafts(kernel, spec, mixed, cache, [(3, 2), (2, 2), (0, 0), (4, 0)]), cache))
    (expected, theirs), (actual, own) = found
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    for tensor, reference in zip(own.tensors, theirs.tensors, strict=True):
        torch.testing.assert_close(tensor[2], reference[2], atol=1e-4, rtol=1e-4)


def exact_delta(
    spec: DeltaSpec, weights: DeltaWeights, mixed: Tensor, gates: Tensor, tail: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Results of a sequence and the state after each of its rows, in float64."""
    mixed, gates, tail = mixed.double(), gates.double(), tail.double()
    qkv, z = mixed.split([spec.channels, spec.values], 1)
    history = torch.cat([tail, qkv]).T[None]
    qkv = F.silu(F.conv1d(history, weights.convolution.double()[:, None], groups=spec.channels))[0].T
    parts = qkv.split([spec.keys, spec.keys, spec.values], 1)
    query, key, value = (one.unflatten(1, (heads, -1)) for one, heads in zip(parts, spec_heads(spec), strict=True))
    query, key = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + 1e-6) for one in (query, key))
    group = spec.num_value_heads // spec.num_key_heads
    query, key = query.repeat_interleave(group, 1) * spec.key_size**-0.5, key.repeat_interleave(group, 1)
    b, a = gates.chunk(2, 1)
    decay = weights.decay.double() * F.softplus(a + weights.dt_bias.double(), threshold=100)
    inputs, after, results = RuleRows(query, key, value, decay, b.sigmoid()), [state[None].double()], []
    for row in range(len(mixed)):
        result, state = recurrent_rule(inputs.rows(row, row + 1), after[-1])
        after.append(state)
        results.append(result[0])
    output = torch.stack(results)
    output = output * torch.rsqrt(output.square().mean(-1, keepdim=True) + weights.eps) * weights.norm.double()
    return output.flatten(1) * F.silu(z), torch.cat(after)


def spec_heads(spec: DeltaSpec) -> tuple[int, int, int]:
    return spec.num_key_heads, spec.num_key_heads, spec.num_value_heads


def test_chunks_equal_float64_from_any_start(device: torch.device) -> None:
    """Beside a decode: a prompt with two checkpoints, and rows after a hit at an odd position. All slots that nothing
    should read are NaN."""
    torch.manual_seed(3)
    chunks, slots, hits, checkpoints = [(5, 6), (0, 70), (61, 131)], [1, 2, 3], {2: 7}, {1: {33: 4, 70: 5}, 2: {64: 6}}
    rows = StateRows.of(Segments.of_chunks(chunks, slots, hits, checkpoints), device)
    weights = DeltaWeights(
        torch.randn(DELTA.channels, DELTA.kernel), -torch.rand(2), torch.randn(2), torch.randn(DELTA.value_size), 1e-6
    )
    on_device = DeltaWeights(*(one.to(device) for one in weights_of(weights)), weights.eps)
    [cache] = allocate_states([DELTA], SLOTS, torch.float32, device)
    for tensor in cache.tensors:
        tensor.fill_(torch.nan)
        tensor[[1, 7]] = torch.randn(2, *tensor.shape[1:], device=device)
    assert cache.states is not None
    tails, before = cache.tail.clone().cpu(), cache.states.clone().cpu()
    mixed, gates = inputs_of(DELTA, torch.randn(141, width(DELTA)))
    output = TritonDelta(DELTA, on_device)(mixed.to(device), gates.to(device), cache, rows).cpu().double()
    first = 0
    for index, (start, end) in enumerate(chunks):
        part, source = slice(first, first + end - start), hits.get(index, slots[index])
        tail, state = (torch.zeros_like(one[0]) if start == 0 else one[source] for one in (tails, before))
        expected, states = exact_delta(DELTA, weights, mixed[part], gates[part], tail, state)
        torch.testing.assert_close(output[part], expected, atol=2e-5, rtol=2e-5)
        for reached, slot in (*checkpoints.get(index, {}).items(), (end, slots[index])):
            torch.testing.assert_close(cache.states[slot].cpu().double(), states[reached - start], atol=1e-5, rtol=1e-5)
        first = part.stop
    assert cache.states[[0, 8]].isnan().all()


def weights_of(weights: DeltaWeights) -> tuple[Tensor, ...]:
    return weights.convolution, weights.decay, weights.dt_bias, weights.norm


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
